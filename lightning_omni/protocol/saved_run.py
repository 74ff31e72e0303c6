"""Reading of a server's saved state outside a server, in the form of a snapshot.

Rule: reading imports no optimizer of the user. The method is needed only if several servers hold a share each, because
their division depends on whether it treats each element independently.
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
    """The state of one optimizer at the servers.

    Attributes:
        weights: weights of each parameter by name, in the order of the layout.
        state: optimizer state, by the places of parameters in ``weights``; empty if the optimizer steps at the workers.
        method: state of the method's server side.
        groups: hyperparameters of the last push, with the names of the parameters; empty if the optimizer steps at the
            workers.
        steps_here: whether the optimizer steps at the server.
    """

    weights: Mapping[str, Tensor]
    state: Mapping[int, Mapping[str, Any]]
    method: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    steps_here: bool


@dataclass(frozen=True)
class SavedRun:
    """A run as its servers have saved it.

    Attributes:
        cut: moment of the save.
        plan: plan of the current or last epoch; None if no data was leased.
        groups: number of participating groups.
        method: the method as plain data.
        parts: state of each optimizer.
        run_state: state for joining groups, see `lightning_omni.strategy.joining`; None if groups cannot join.
    """

    cut: Cut
    plan: EpochPlan | None
    groups: int
    method: Mapping[str, Any]
    parts: Sequence[SavedPart]
    run_state: Mapping[str, Any] | None

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]]) -> SavedRun:
        """Read the states that `ServerCore.state` has returned.

        Args:
            states: one state of each server, all of one moment; the coordinating server's is the first.

        Raises:
            ConfigurationError: another release has saved them, or the shares cannot be merged.
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
    optimizer, weights = part["optimizer"], part["weights"]
    if optimizer is None:
        return SavedPart(weights, {}, part["method"], (), steps_here=False)
    places = {name: place for place, name in enumerate(weights)}
    held = [name for group in optimizer["groups"] for name in group["params"]]
    state = {places[held[key]]: values for key, values in optimizer["state"].items()}
    return SavedPart(weights, state, part["method"], optimizer["groups"], steps_here=True)


def _whole(formed: m.Form, shares: Sequence[Mapping[str, Any]], described: Mapping[str, Any] | None) -> SavedPart:
    """Merge the shares that several servers hold of an optimizer.

    ``described`` has the names and shapes of the parameters; None if they were not saved.
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
    """Return how servers divide the parameters that one leader exchanges; see `Split.of`."""
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
    """Return the value in its parameter's shape: a server's part is flat if the members of a group hold it together."""
    is_flat = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == math.prod(spec.shape)
    return value.view(spec.shape) if is_flat else value


def _rows(described: Mapping[str, Any], parts: Sequence[SavedPart]) -> Split:
    """Return how the members of a group divide parameters that they hold together: whole rows, in their order."""
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
