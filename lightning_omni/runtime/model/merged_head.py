"""A rank's side of a merged head: it sends activations to the server, and gets outputs and gradients back."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_omni.errors import ConfigurationError, Refused, UnsupportedError
from lightning_omni.group.merged_head import MergedHeadClient
from lightning_omni.methods.model.head import pass_through
from lightning_omni.methods.model.modules import tensors_of, with_tensors
from lightning_omni.runtime.model.parameter_groups import ParameterGroups
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.model.tensor_sync import gathered
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.server_exchange import ServerExchange
from lightning_omni.transport.connections import Answer
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, unpack
from lightning_omni.wire.layout import DTYPES


class RemoteHead:
    """A replacement of a submodule's ``forward``, while several groups train.

    Attributes:
        side: this group's messages for the head, and whether it has exclusive access.
    """

    def __init__(
        self,
        parallel: ParallelState,
        exchange: ServerExchange,
        parameter_groups: ParameterGroups,
        part: Part,
        number: int,
        name: str,
        module: nn.Module,
    ) -> None:
        self._exchange, self._parameter_groups = exchange, parameter_groups
        self._parallel, self._part, self._number, self._name, self._module = parallel, part, number, name, module
        self._parameters = set(part.replica.ordered)
        self.side = MergedHeadClient(name, number, module, part.optimizer, part.replica.ordered)
        self._own = module.forward
        self._rows: list[int] = []
        self._output: Any = None
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] = []

    def install(self) -> None:
        """Replace the submodule's forward pass, and clear its gradients. A second call changes nothing."""
        if self._module.forward is not self:
            self._module.forward = self
            self.side.begin_loop()
            for parameter in self._parameters:
                parameter.grad = None  # of earlier steps on this rank

    def remove(self) -> None:
        if self._module.forward is self:
            del self._module.forward

    def release(self) -> None:
        if self.side.has_access:
            message = self.side.release()
            if self._parallel.is_leader:
                self._exchange.ask(message, m.HeadReleased)

    def __reduce__(self) -> Any:
        # A copy of the module, or its pickle, has a forward pass of its own again.
        return _own_forward, (type(self._module), self._module)

    # --- The submodule's forward -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._parallel.is_computing:
            return self._own(*args, **kwargs)
        tree = (args, kwargs)
        if not torch.is_grad_enabled():
            return self._evaluate(tree)
        self.side.check()
        with torch.no_grad():
            self._parameter_groups.follow(self._number)
        outputs = pass_through(self, tree)
        self.side.begin()
        return with_tensors(self._output, outputs)

    def _evaluate(self, tree: Any) -> Any:
        """Return the output for this rank's rows, without training; a rank may request it alone."""
        with self._exchange.timed():
            answer, payload = self._ask(*self._forward(tree, exclusive=False), m.HeadOutput)
        output = unpack(answer.packed, payload)
        return with_tensors(output, [tensor.to(self._parallel.device) for tensor in tensors_of(output)])

    def step_done(self) -> None:
        """End a step, after which the submodule may be used again.

        Raises:
            UnsupportedError: a weight of the submodule got a gradient on this rank.
        """
        self.release()
        self.side.step_done()
        for name, parameter in self._part.replica.parameters.items():
            if parameter.grad is not None and self._parallel.is_computing:
                raise UnsupportedError(
                    f'merged="{self._name}": its weight {name} got a gradient outside of the submodule\'s forward pass'
                    " (a part of it was called by itself, or the loss has a penalty on it), and nothing would step it;"
                    " call the submodule as a whole, or merge nothing"
                )

    def bring(self, tree: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send the group's batch to the head; return this rank's rows of each output tensor. All members call it."""
        parallel = self._parallel
        with self._exchange.timed():
            self._rows = self._count_rows(tensors)
            whole = self._gather(tensors)
            packed, payload = Packed(b"", ()), torch.empty(0)
            if parallel.is_leader:
                answer, payload = self._ask(*self._forward(with_tensors(tree, whole), exclusive=True), m.HeadOutput)
                packed = answer.packed
            note = self._exchange.members.broadcast_bytes(msgspec.msgpack.encode(packed))
            packed = msgspec.msgpack.decode(note, type=Packed)
            views = packed.layout.views(payload) if parallel.is_leader else []
            self._shapes = shapes = [(spec.shape, DTYPES[spec.dtype]) for spec in packed.specs]
            self._output = unpack(packed, torch.zeros(packed.layout.nbytes, dtype=torch.uint8))
            # Copies, because torch does not allow writes to a view that a function returns.
            return [tensor.clone() for tensor in self._scatter(views, shapes)]

    def _forward(self, tree: Any, exclusive: bool) -> tuple[m.HeadForward, Tensor]:
        kind = self._parallel.device.type
        mixed = torch.is_autocast_enabled(kind)
        autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if mixed else ""
        return self.side.forward(tree, autocast, exclusive)

    def _ask(self, message: m.Message, payload: Tensor, expect: type[Answer]) -> tuple[Answer, Tensor]:
        try:
            return self._exchange.ask(message, expect, payload)
        except Refused as no:
            raise ConfigurationError(f'merged="{self._name}": {no}') from no

    def take_back(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[Any]:
        """Send the gradients of the output to the head, which makes a step; return those of this rank's inputs."""
        parallel = self._parallel
        self.side.end()
        with self._exchange.timed():
            presence = self._share_presence(gradients)
            gathered = iter(self._gather([gradient for gradient in presence if gradient is not None]))
            whole = [None if gradient is None else next(gathered) for gradient in presence]
            there, payload = b"", torch.empty(0)
            back: list[Any] = []
            if parallel.is_leader:
                mean = 1 / len(parallel.members)  # as DDP averages over ranks
                answer, payload = self._ask(*self.side.backward(whole, parallel.core.place, mean), m.HeadGradients)
                back = unpack(answer.packed, payload)
                there = msgspec.msgpack.encode(
                    ([gradient is not None for gradient in back], answer.applied, answer.refused_in_row)
                )
            present, applied, refused = msgspec.msgpack.decode(self._exchange.members.broadcast_bytes(there))
            shapes = [
                ((sum(self._rows), *shape[1:]) if self._is_shared else tuple(shape), dtype)
                for (shape, dtype), is_there in zip(inputs, present, strict=True)
                if is_there
            ]
            mine = iter(self._scatter([gradient for gradient in back if gradient is not None], shapes))
        parallel.core.check_nonfinite(refused)
        self._exchange.warn_of_refusal(applied, refused)
        return [next(mine) if is_there else None for is_there in present]

    # --- Among the members of a group ------------------------------------------------------------------------------

    @property
    def _is_shared(self) -> bool:
        return len(self._parallel.members) > 1

    def _count_rows(self, tensors: Sequence[Tensor]) -> list[int]:
        if not self._is_shared:
            return []
        sizes = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors}
        if len(sizes) != 1 or -1 in sizes:
            raise UnsupportedError(
                f'merged="{self._name}": the batches of a group\'s members are put together, so every tensor that goes'
                f" into the submodule must have the batch as its first dimension; their sizes are {sorted(sizes)}"
            )
        mine = torch.tensor([sizes.pop()], device=self._parallel.device)
        return [int(rows) for rows in gathered(mine, self._parallel.compute_group)]

    def _share_presence(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients, with zeros for those that only other members have."""
        if not self._is_shared or len(gradients) == 1:  # without it there is no backward pass
            return list(gradients)
        are_there = [int(each is not None) for each in gradients]
        flags = self._parallel.process_groups.largest(are_there, self._parallel.compute_group)
        mine = self._rows[self._parallel.members.index(self._parallel.rank)]
        return [
            gradient if gradient is not None or not flag else torch.zeros((mine, *shape[1:]), dtype=dtype)
            for gradient, flag, (shape, dtype) in zip(gradients, flags, self._shapes, strict=True)
        ]

    def _gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather all members' rows at the leader, concatenated; other members return their own."""
        if not self._is_shared:
            return list(tensors)
        parallel, group = self._parallel, self._parallel.compute_group
        own = [tensor.detach().to(parallel.device).contiguous() for tensor in tensors]
        if not parallel.is_leader:
            for tensor in own:
                dist.send(tensor, group=group, group_dst=0)
            return own
        blocks = [[tensor] for tensor in own]
        for member, rows in enumerate(self._rows[1:], 1):
            for tensor, block in zip(own, blocks, strict=True):
                block.append(tensor.new_empty((rows, *tensor.shape[1:])))
                dist.recv(block[-1], group=group, group_src=member)
        return [torch.cat(block) for block in blocks]

    def _scatter(self, whole: Sequence[Tensor], shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Send each member its rows from the leader, and return them on this rank's device."""
        parallel, group = self._parallel, self._parallel.compute_group
        if not self._is_shared:
            return [tensor.to(parallel.device) for tensor in whole]
        if any(not shape or shape[0] != sum(self._rows) for shape, _ in shapes):
            raise UnsupportedError(
                f'merged="{self._name}": what comes out of the submodule must have the batch as its first dimension, so'
                " that every member of the group can get its rows; merge another submodule: the shapes are"
                f" {[list(s) for s, _ in shapes]}"
            )
        if parallel.is_leader:
            blocks = [tensor.to(parallel.device).split(self._rows) for tensor in whole]
            for member in range(1, len(self._rows)):
                for tensor in blocks:
                    dist.send(tensor[member].contiguous(), group=group, group_dst=member)
            return [tensor[0] for tensor in blocks]
        rows = self._rows[parallel.members.index(parallel.rank)]
        mine = [torch.empty((rows, *shape[1:]), dtype=dtype, device=parallel.device) for shape, dtype in shapes]
        for tensor in mine:
            dist.recv(tensor, group=group, group_src=0)
        return mine


def _own_forward(kind: type[nn.Module], module: nn.Module) -> Any:
    return types.MethodType(kind.forward, module)
