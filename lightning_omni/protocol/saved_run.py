"""A saved state of the server, read by what is no server: the run as of one moment, in the form of a snapshot.

Rule: nothing of the user's is imported for it: no optimizer, no method. Only where several servers hold a share each
does it need to know whether these treat each number by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ConfigurationError, MalformedMessage, OmniError
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, unpack
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.epochs import Epochs
from lightning_omni.protocol.layout import Layout, TensorSpec, spec_of
from lightning_omni.protocol.leases import EpochPlan
from lightning_omni.protocol.persistence import check_state
from lightning_omni.protocol.split import ELEMENTWISE, Split


@dataclass(frozen=True)
class SavedPart:
    """What the servers hold of one optimizer.

    Attributes:
        weights: of each parameter, by name, in the order of the layout.
        state: of the optimizer, by places of parameters among these; empty if it steps at the workers.
        method: what the server side of the method remembers.
        groups: hyperparameters as of the last push, with the names of the parameters; empty likewise.
        steps_here: whether the optimizer steps at the server.
    """

    weights: Mapping[str, Tensor]
    state: Mapping[int, Mapping[str, Any]]
    method: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    steps_here: bool


@dataclass(frozen=True)
class SavedRun:
    """A run, as its servers have saved it.

    Attributes:
        cut: the moment.
        plan: of the epoch that is under way, or was last; None if no data were leased.
        groups: number of groups that took part.
        method: as plain data.
        parts: of each optimizer.
        run_state: what groups that join are given, see `lightning_omni.strategy.joining`; None if none can.
    """

    cut: Cut
    plan: EpochPlan | None
    groups: int
    method: Mapping[str, Any]
    parts: Sequence[SavedPart]
    run_state: Mapping[str, Any] | None

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]]) -> SavedRun:
        """Reads what `ServerCore.state` has said.

        Args:
            states: of each server, the one that coordinates first; of one moment.

        Raises:
            ConfigurationError: another release has saved it, or the shares cannot be put together.
        """
        first = states[0]
        check_state(first, "release", "use the release of lightning-omni that has saved it")
        services = first["services"]
        formed = msgspec.msgpack.decode(services["Snapshots"]["formed"], type=m.Form)
        epochs = Epochs()
        epochs.load(services["DataLeasing"])
        run_state = _run_state(services)
        shares = [state["services"]["Snapshots"]["parts"] for state in states]
        shapes: Sequence[Any] = (run_state or {}).get("parts") or [None] * len(shares[0])
        return cls(
            cut=Cut(
                clocks=tuple(int(part["clock"]) for part in shares[0]),
                pushes=dict(services["Training"]["handled"]),
                epoch=epochs.plan.epoch if epochs.plan is not None else -1,
                total=epochs.plan.total if epochs.plan is not None else 0,
                trained=epochs.trained_spans,
            ),
            plan=epochs.plan,
            groups=len(epochs.book.groups) if epochs.book is not None else len(formed.groups),
            method=formed.method,
            parts=[
                _whole(formed, part, shape) if len(states) > 1 or formed.by_member else _part(part[0])
                for *part, shape in zip(*shares, shapes, strict=True)
            ],
            run_state=run_state,
        )


def _run_state(services: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stored = services.get("Joining")
    if stored is None:
        return None
    tree: Mapping[str, Any] = unpack(msgspec.msgpack.decode(stored["packed"], type=Packed), stored["buffer"], copy=True)
    return tree


def _part(part: Mapping[str, Any]) -> SavedPart:
    """What one server holds of an optimizer."""
    optimizer, weights = part["optimizer"], part["weights"]
    if optimizer is None:
        return SavedPart(weights, {}, part["method"], (), steps_here=False)
    places = {name: place for place, name in enumerate(weights)}
    held = [name for group in optimizer["groups"] for name in group["params"]]
    state = {places[held[key]]: values for key, values in optimizer["state"].items()}
    return SavedPart(weights, state, part["method"], optimizer["groups"], steps_here=True)


def _whole(formed: m.Form, shares: Sequence[Mapping[str, Any]], described: Mapping[str, Any] | None) -> SavedPart:
    """What several servers hold of an optimizer, put together.

    Args:
        formed: says how groups exchange.
        shares: of each server.
        described: names and shapes of the parameters.
    """
    parts = [_part(share) for share in shares]
    if described is None:
        raise ConfigurationError(
            f"{len(shares)} servers have saved a share of the weights each, and the module's shapes are in none of"
            " them: they are known only of runs that groups join. Start lightning-omni serve again, or load a"
            " checkpoint that the Trainer has saved"
        )
    split = _rows(described, parts) if formed.by_member else _ranges(formed, described, parts, shares[0]["optimizer"])
    weights = split.merged([list(part.weights.values()) for part in parts])
    state = split.merged_tree([part.state for part in parts])
    specs = split.layout.specs
    return SavedPart(
        weights={spec.name: _shaped(weight, spec) for spec, weight in zip(specs, weights, strict=True)},
        state={
            place: {key: _shaped(value, specs[place]) for key, value in values.items()}
            for place, values in state.items()
        },
        method=split.merged_tree([part.method for part in parts]),
        groups=[
            {**group, "params": list(dict.fromkeys(name for part in alike for name in part["params"]))}
            for group, *others in zip(*(part.groups for part in parts), strict=True)
            for alike in [(group, *others)]
        ],
        steps_here=parts[0].steps_here,
    )


def _ranges(
    formed: m.Form, described: Mapping[str, Any], parts: Sequence[SavedPart], optimizer: Mapping[str, Any] | None
) -> Split:
    """How servers divide what one leader exchanges: see `Split.of`."""
    try:
        method = m.method_from_wire(formed.method)
    except OmniError as error:
        raise ConfigurationError(
            f"{len(parts)} servers have saved a share of the weights each, and how these are divided depends on the"
            f" method: {error}"
        ) from error
    elementwise = method.elementwise and (optimizer is None or optimizer["class"] in ELEMENTWISE)
    dtypes = {name: weight.dtype for part in parts for name, weight in part.weights.items()}
    specs = [
        TensorSpec(name, tuple(shape), str(dtypes[name]).removeprefix("torch."))
        for name, shape in zip(described["names"], described["shapes"], strict=True)
        if name in dtypes
    ]
    split = Split.of(Layout(tuple(specs)), len(parts), elementwise)
    for share, part in zip(split.shares, parts, strict=True):
        if [(spec.name, spec.local_shape) for spec in share.specs] != [
            (name, tuple(weight.shape)) for name, weight in part.weights.items()
        ]:
            raise MalformedMessage("the shares that the servers have saved do not fit together")
    return split


def _shaped(value: Any, spec: TensorSpec) -> Any:
    """What one server has of a parameter that members of a group hold together is flat."""
    is_flat = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == math.prod(spec.shape)
    return value.view(spec.shape) if is_flat else value


def _rows(described: Mapping[str, Any], parts: Sequence[SavedPart]) -> Split:
    """How the members of a group divide parameters that they hold together: whole rows, in their order."""
    if not described["rows"]:
        raise ConfigurationError(
            "the members of a group divide the model otherwise than by rows (tensor parallelism, or replicas), so that"
            " the weights cannot be put together from what their servers have saved. Let a group join the run again,"
            " or load a checkpoint that the Trainer has saved"
        )
    names, shapes = described["names"], described["shapes"]
    dtypes = [spec_of(name, parts[0].weights[name]).dtype for name in names]
    shares: list[list[TensorSpec]] = [[] for _ in parts]
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        begin = 0
        for part, specs in zip(parts, shares, strict=True):
            end = begin + part.weights[name].numel()
            specs.append(TensorSpec(name, tuple(shape), dtype, (begin, end)))
            begin = end
    whole = tuple(
        TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    )
    places = tuple(range(len(names)))
    return Split(Layout(whole), tuple(Layout(tuple(specs)) for specs in shares), (places,) * len(parts))
