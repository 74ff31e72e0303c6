"""A rank's copy of one optimizer's parameters: its flat layout, and the detection of writes by user code."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_omni.errors import MalformedMessage, UnsupportedError
from lightning_omni.methods import Pulled, Replica
from lightning_omni.methods.model.replica import Drift, copies
from lightning_omni.methods.model.server_optimizer import describe, detach_state
from lightning_omni.runtime.model.sharded import complete, gradient_of, here, like, load_state, parts_of, rows
from lightning_omni.wire.formats.base import Memory, zeros_on
from lightning_omni.wire.layout import DTYPES, Layout
from lightning_omni.wire.partition import over_parameters

_LARGE = 1 << 16
"""Elements of a weight above which a comparison of all takes too long for a step."""
_AT_ONCE = 1 << 24
"""Elements that a device compares at once, because their comparison takes memory."""
SAMPLED = 1 << 16
"""Approximate number of a tensor's elements by which ranks compare it, or detect a write where they synchronize."""
_FEW = 1 << 12
"""Approximate number of a frozen weight's elements that a step compares to detect a write."""
PREFIX = 256
"""Bytes of further information in front of the tensors that a rank broadcasts."""


class ModelReplica(Replica):
    """The parameters of one optimizer on this rank, by name, in its order; those added in mid-run are the last.

    With ``is_shared``, several ranks hold them together, each a part.

    Attributes:
        ever_held: these parameters, as a set; released ones remain in it.
    """

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer, is_shared: bool = False) -> None:
        super().__init__(list(parameters.values()), optimizer)
        self.parameters, self._is_shared = dict(parameters), is_shared
        self.ever_held = set(self.ordered)
        self._writes = Writes()
        self._stashed: Pulled | None = None
        self._stashed_drift: Drift | None = None
        self._released: set[Parameter] = set()
        self._detached: dict[Tensor, Any] = {}
        self._given: list[Tensor | None] = []
        self._version = 0

    @cached_property
    def layout(self) -> Layout:
        return self._layout_of({name: here(parameter) for name, parameter in self.parameters.items()})

    def described(self) -> dict[str, Any]:
        description = describe(self.optimizer, {parameter: name for name, parameter in self.parameters.items()})
        if self._is_shared:
            description["state"] = parts_of(description["state"])
        return description

    def part_of(self, tree: Any) -> Any:
        """Return this rank's part of a tree of sharded tensors, or of whole ones."""
        if not self._is_shared or any(isinstance(leaf, DTensor) for leaf in tree_leaves(tree)):
            return parts_of(tree)

        def part(value: Any, index: int | None) -> Any:
            if index is None or not isinstance(value, Tensor):
                return value
            return here(rows(value, self.ordered[index]))

        return over_parameters(tree, self.layout_with({}).specs, part)

    def on_device(self, tree: Any) -> Any:
        device = self.ordered[0].device
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)

    def sharded(self, tree: Any) -> Any:
        """Return a tree of this rank's parts as tensors, sharded as their parameters; see `like`."""

        def part(value: Any, index: int | None) -> Any:
            return value if index is None or not isinstance(value, Tensor) else like(value, self.ordered[index])

        return over_parameters(tree, self.layout.specs, part)

    def layout_with(self, more: Mapping[str, Parameter]) -> Layout:
        return self._layout_of({**self.parameters, **more})

    def _layout_of(self, tensors: Mapping[str, Tensor]) -> Layout:
        try:
            plain = Layout.of({name: tensor.detach() for name, tensor in tensors.items()})
        except MalformedMessage as error:
            raise UnsupportedError(f"{error}; leave it out of the optimizer, or use groups=1") from error
        return Layout(plain.specs, self._version, self.first if self._version else 0, servers=self.servers)

    def here(self, tensor: Tensor) -> Tensor:
        return here(tensor)

    # --- Parameters that come and go in mid-run ----------------------------------------------------------------------

    def hold(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters, self.ordered = dict(parameters), list(parameters.values())
        self.first = len(self.ordered)
        self.ever_held, self._released = set(self.ordered), set()
        detach_state(self.optimizer, self._detached)
        self._writes = Writes()
        self.abandon()
        self._lay_out()

    def begin_layout(self) -> None:
        self._version, self.first = 0, len(self.ordered)
        self._lay_out()

    def divide(self, servers: int) -> None:
        self.servers = servers
        self._lay_out()

    def grow(self, more: Mapping[str, Parameter], version: int) -> None:
        """Append parameters; the layout gets the version that the server has assigned."""
        self._version = version
        self.parameters.update(more)
        self.ordered.extend(more.values())
        self.ever_held.update(more.values())
        if self._stashed is not None:
            self._stashed = Pulled(
                [*self._stashed.tensors, *copies([each.detach() for each in more.values()])], self._stashed.clock
            )
        self._lay_out()

    def release(self, held: Set[Parameter]) -> None:
        """Release parameters that are not ``held``: values stay, gradients are left out, and state is stashed."""
        self._released = self.ever_held - held
        detach_state(self.optimizer, self._detached)

    def take_detached(self, parameters: Iterable[Parameter]) -> dict[Tensor, Any]:
        return {each: self._detached.pop(each) for each in parameters if each in self._detached}

    def _lay_out(self) -> None:
        vars(self).pop("layout", None)

    def load(self, pulled: Pulled) -> None:
        """Overwrite the weights, except frozen ones that this group has written: those are its own."""
        if not pulled.tensors:
            return
        own = self.own_frozen()
        values = zip(self.parameters, self.weights(), pulled.tensors, strict=True)
        if pairs := [(weight, value) for name, weight, value in values if name not in own]:
            weights, tensors = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(weights, tensors)
        complete(self.ordered)
        self.clock = pulled.clock
        self.drift.read()
        self._writes.remember(self.ordered, pulled.tensors)

    def overwrite(self, values: Sequence[Tensor], fragment: int | None = None, of: int = 1) -> None:
        kept = {name: here(self.parameters[name]).clone() for name in self.own_frozen()}
        super().overwrite(values, fragment, of)
        for name, value in kept.items():
            here(self.parameters[name]).copy_(value)
        complete(self.ordered)
        self._writes.mark(self.ordered)

    def agreed(self, fragment: int | None = None, of: int = 1) -> list[bool]:
        own, names = self.own_frozen(), list(self.parameters)
        known = zip(super().agreed(fragment, of), self.pieces(fragment, of), strict=True)
        return [agreed and names[piece.place] not in own for agreed, piece in known]

    @property
    def loose(self) -> list[int]:
        own, names = self.own_frozen(), list(self.parameters)
        return [index for index in super().loose if names[index] not in own]

    def take_frozen(self, pulled: Pulled) -> None:
        super().take_frozen(pulled)
        complete(self.ordered)
        self._writes.mark(self.ordered)

    def know(self) -> None:
        self.drift.read()
        self._writes.remember(self.ordered, copies(self.weights()))

    def descend(self, gradient: Sequence[Tensor | None]) -> None:
        self.own_frozen()  # noted before this step counts as the method's write
        super().descend(gradient)
        complete(self.ordered)
        self._writes.follow(self.ordered, self.weights())

    def move(self, by: Sequence[Tensor], factor: float = 1.0) -> None:
        super().move(by, factor)
        complete(self.ordered)
        self._writes.stepped(self.ordered)

    def forget(self) -> None:
        self._writes.forget()
        self._given = []

    def written(self, in_passing: bool = False) -> list[str]:
        return self._writes.of_trained(self.parameters, in_passing)

    def own_frozen(self) -> set[str]:
        """Return the names of frozen weights that other code has written."""
        return self._writes.of_frozen(self.parameters)

    def served(self) -> list[Parameter]:
        """Return the parameters whose values are the server's: all but `own_frozen`."""
        own = self.own_frozen()
        return [parameter for name, parameter in self.parameters.items() if name not in own]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients, in order; None where a parameter took no part in the loss, or was released.

        Raises:
            UnsupportedError: a gradient is sparse, or a parameter has another dtype or shape than before.
        """
        for spec, each in zip(() if self._is_shared else self.layout.specs, self.ordered, strict=False):
            if spec.shape != each.shape or DTYPES[spec.dtype] is not each.dtype:
                raise UnsupportedError(
                    f"the parameter {spec.name} has {each.dtype} and shape {tuple(each.shape)}, and the groups exchange"
                    f" it with {DTYPES[spec.dtype]} and shape {spec.shape}: change it before training begins, or use"
                    " groups=1"
                )
        gradients = [gradient_of(each) if each not in self._released else None for each in self.ordered]
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise UnsupportedError(
                    f"the gradient of {name} is sparse, and gradients travel dense; build the embedding with"
                    " sparse=False, or use groups=1"
                )
        if self._is_shared:
            gradients = [None if gradient is None else here(gradient) for gradient in gradients]
        self._given = gradients
        return gradients

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        if self._is_shared:
            gradient = [
                parameter.grad if part is given else None if part is None else like(part, parameter)
                for part, parameter, given in zip(gradient, self.ordered, self._given, strict=True)
            ]
        super().step(gradient)
        self._writes.stepped(self.ordered)

    # --- Synchronization: evaluated weights replace a group's own for a time ------------------------------------------

    def stash(self) -> None:
        if self._stashed is None:
            self._stashed, self._stashed_drift = Pulled(copies(self.weights()), self.clock), deepcopy(self.drift)

    def restore(self, but_frozen: bool = False) -> None:
        """Restore the group's own weights, if they were stashed.

        With ``but_frozen``, all groups continue with the evaluated frozen weights, unless all weights are frozen.
        """
        if self._stashed is None:
            return
        # A GAN's half that is frozen as a whole, for the other half's step, stays the group's own.
        but_frozen = but_frozen and any(each.requires_grad for each in self.ordered)
        pairs = zip(self.ordered, self.weights(), self._stashed.tensors, strict=True)
        back = [mine if but_frozen and not each.requires_grad else own for each, mine, own in pairs]
        drift = None if but_frozen else self._stashed_drift
        if drift is None:  # frozen weights that differ from the evaluated ones, and trained ones, are this group's own
            drift = Drift()
            drift.move(
                index
                for index, (mine, own) in enumerate(zip(self.weights(), back, strict=True))
                if self.ordered[index].requires_grad or not torch.equal(mine, own.to(mine.device))
            )
        self.load(Pulled(back, self._stashed.clock))
        self.drift = drift
        self._stashed = self._stashed_drift = None

    def abandon(self) -> None:
        self._stashed = None
        self.memory.clear()

    def own_state(self, whole: bool) -> dict[str, Any]:
        """Return this group's own state: its memory, and if ``whole`` its weights, clock and optimizer state."""
        if not whole:
            return {"memory": self.memory}
        state = parts_of(self.state()) if self._is_shared else self.state()
        if self._stashed is not None:
            state.update(weights=list(self._stashed.tensors), clock=self._stashed.clock)
        return state

    def resume(self, state: Mapping[str, Any]) -> None:
        self.memory = self.on_device(state["memory"])
        if "weights" in state and len(state["weights"]) == len(self.ordered):
            stashed = copies(self.on_device(list(state["weights"])))
            self._stashed, self._stashed_drift = Pulled(stashed, int(state["clock"])), None
            load_state(self.optimizer, state["optimizer"])


@dataclass
class Part:
    optimizer: Optimizer
    replica: ModelReplica
    empty: Callable[[int], Tensor]
    """Returns memory for exchanges with the server."""
    device: torch.device
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of exchanges by staleness, since the last report; a loop without Lightning requests none."""
    head: tuple[str, Module] | None = None
    """Name and submodule of a merged head, which is at the server and not pushed; None for other parts."""
    names: Callable[[], Mapping[Parameter, str]] = dict
    """Returns the present names of all the model's parameters."""
    outside: Collection[Parameter] = ()
    """Parameters of the optimizer that other parts exchange."""
    arranged: list[list[int]] = field(init=False)
    """The `arrangement` that the server has."""

    def __post_init__(self) -> None:
        self.arranged = self.arrangement
        self._outs: list[Memory] = []
        self._into, self._spare, self.coded = (Memory(self.empty) for _ in range(3))
        self.release()

    def memory(self) -> Tensor:
        """Return memory in which a rank that exchanges receives the weights, after `PREFIX` bytes."""
        return self._into.room(PREFIX + self.replica.layout.nbytes)

    def swap(self) -> None:
        """Exchange `memory` for other memory: the last weights are still compared with the group's."""
        self._into, self._spare = self._spare, self._into

    def on_device(self) -> Tensor:
        """Return memory for an answer's tensors on the device of the weights, where that is not the CPU."""
        return self._flat.room(PREFIX + self.replica.layout.nbytes)

    def release(self) -> None:
        self._flat, self.handed = (Memory(zeros_on(self.device)) for _ in range(2))
        if self.device.type != "cpu":
            self.replica.forget()

    def outs(self, servers: int) -> list[Memory]:
        while len(self._outs) < servers:
            self._outs.append(Memory(self.empty))
        return self._outs[:servers]

    @property
    def arrangement(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]


# --- Writes of other code ---------------------------------------------------------------------------------------------


class Writes:
    """A record of the weights as they were loaded, by index.

    Trained weights are compared with the loaded ones; of a frozen weight a few elements, unless torch has counted a
    write. A frozen weight that was written (a target network's, for example) belongs to the group that wrote it.
    """

    def __init__(self) -> None:
        self._loaded: list[Tensor] = []
        self._versions: list[int] = []
        self._marks: list[int] = []
        self._frozen: set[str] = set()
        self._checks = 0

    def forget(self) -> None:
        self._loaded = []

    def remember(self, parameters: Sequence[Parameter], loaded: Sequence[Tensor]) -> None:
        """Record the loaded tensors, which trained parameters now equal; they are kept, not copied."""
        self._loaded = list(loaded)
        self.mark(parameters)

    def follow(self, parameters: Sequence[Parameter], weights: Sequence[Tensor]) -> None:
        """Record in place that the group's method has moved the loaded weights."""
        if len(self._loaded) < len(weights):
            self.remember(parameters, copies(weights))
        else:
            torch._foreach_copy_(self._loaded, list(weights))
            self.mark(parameters)

    def mark(self, parameters: Sequence[Parameter]) -> None:
        """Record that only the method has written the parameters since they were loaded."""
        self._versions = [here(parameter)._version for parameter in parameters]
        marks = iter(fingerprints([parameter for parameter in parameters if not parameter.requires_grad], _FEW))
        self._marks = [0 if parameter.requires_grad else next(marks) for parameter in parameters]

    def stepped(self, parameters: Sequence[Parameter]) -> None:
        """Record that only the method has written the trained parameters since they were loaded."""
        marks = zip(parameters, self._marks, strict=False)
        self._marks = [0 if parameter.requires_grad else mark for parameter, mark in marks]
        # The method does not step a weight that was frozen when it was loaded: others have written it, if anyone has.
        frozen = {index: self._versions[index] for index, mark in enumerate(self._marks) if mark}
        self._versions = [frozen.get(index, here(each)._version) for index, each in enumerate(parameters)]

    def of_trained(self, parameters: Mapping[str, Parameter], in_passing: bool = False) -> list[str]:
        """Return the names of trained weights that other code has written.

        With ``in_passing``, each call compares another eighth of each large weight that is unwritten by torch's count,
        which misses writes through ``.data``.
        """
        self._checks += in_passing
        pairs = {
            name: self._compared(index, parameter, in_passing)
            for index, (name, parameter) in enumerate(parameters.items())
            if parameter.requires_grad and index < len(self._loaded)
        }
        if _are_equal(pairs.values()):
            return []
        return [name for name, (mine, known) in pairs.items() if not _is_same(mine, known)]

    def of_frozen(self, parameters: Mapping[str, Parameter]) -> set[str]:
        self._frozen -= {name for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = [
            (index, name, parameter)
            for index, (name, parameter) in enumerate(parameters.items())
            if not parameter.requires_grad and index < len(self._loaded)
        ]
        marks = fingerprints([parameter for _, _, parameter in frozen], _FEW)
        self._frozen |= {
            name
            for (index, name, parameter), mark in zip(frozen, marks, strict=True)
            if self._is_frozen_written(index, parameter, mark)
        }
        return self._frozen

    def _is_frozen_written(self, index: int, parameter: Parameter, mark: int) -> bool:
        mine, known = here(parameter), self._loaded[index]
        is_counted = mine._version != self._versions[index]
        if not self._marks[index]:  # it was trained when it was loaded
            return is_counted
        if mark != self._marks[index]:
            return True
        if not is_counted:
            return False
        # A few other elements may have been written. A loaded tensor that is the weight itself does not tell.
        if known.data_ptr() == mine.data_ptr() or not _is_same(mine.flatten(), known.flatten()):
            return True
        self._versions[index] = mine._version
        return False

    def _compared(self, index: int, parameter: Parameter, in_passing: bool) -> tuple[Tensor, Tensor]:
        mine, known = here(parameter), self._loaded[index].flatten()
        is_unwritten, mine = mine._version == self._versions[index], mine.flatten()
        if in_passing and is_unwritten and len(known) > _LARGE:
            eighth = self._checks % 8
            part = slice(eighth * len(known) // 8, (eighth + 1) * len(known) // 8)
            mine, known = mine[part], known[part]
        return mine, known


def fingerprints(tensors: Iterable[Tensor], most: int | None = None) -> list[int]:
    """Return a checksum of each tensor, by which a write is detected.

    Of each about ``most`` elements are read, spread over it; None reads all.
    """
    if not (flats := [here(tensor).flatten() for tensor in tensors]):
        return []
    every = [max(1, flat.numel() // most) if most is not None else 1 for flat in flats]
    samples = [flat[::step].contiguous().view(torch.uint8) for flat, step in zip(flats, every, strict=True)]
    devices = {sample.device for sample in samples}
    if len(devices) == 1 and torch.device("cpu") not in devices:
        samples = list(torch.cat(samples).cpu().split([sample.numel() for sample in samples]))
    return [zlib.crc32(sample.cpu().numpy().tobytes()) for sample in samples]


def _are_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    pairs = list(pairs)
    devices = {tensor.device for pair in pairs for tensor in pair}
    if any(mine.shape != known.shape or mine.dtype != known.dtype for mine, known in pairs):
        return False
    if len(devices) != 1 or torch.device("cpu") in devices:
        return all(torch.equal(mine.to(known.device), known) for mine, known in pairs)
    parts = [each for pair in pairs for each in zip(*(tensor.split(_AT_ONCE) for tensor in pair), strict=True)]
    return not torch.stack([torch.ne(mine, known).any() for mine, known in parts]).any()


def _is_same(weight: Tensor, known: Tensor) -> bool:
    here = weight.to(known.device)
    if (here.shape, here.dtype) != (known.shape, known.dtype):
        return False
    return torch.equal(here, known) or torch.allclose(here, known, rtol=0.0, atol=0.0, equal_nan=True)
