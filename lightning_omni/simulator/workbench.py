"""The parameters of all simulated groups, and the computation of their gradients."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import Parameter
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset, default_collate

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.methods.model.replica import Pulled, Replica, copies
from lightning_omni.methods.model.server_optimizer import held_by
from lightning_omni.simulator.workload import Loss, MakeOptimizer
from lightning_omni.wire.layout import Layout

# --- Parameters -------------------------------------------------------------------------------------------------------

# Groups that read the same weights share them, so that those of a thousand groups fit into the memory of a few.


class SharedWeights(list[Tensor]):
    """The master weights at one clock. They are never changed, and freed when no group holds them."""


class WeightsByClock:
    """The weights of each clock that a group still uses.

    Attributes:
        most: the largest number of such clocks at a time.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._at: WeakValueDictionary[int, SharedWeights] = WeakValueDictionary()
        self.most = 0

    def at(self, clock: int, buffer: Tensor) -> SharedWeights:
        """Return a copy of the weights in ``buffer`` at this clock; all readers share it."""
        known = self._at.get(clock)
        if known is None:
            known = self._at[clock] = SharedWeights(self._layout.views(buffer.clone()))
            self.most = max(self.most, len(self._at))
        return known


class OwnReplica(Replica):
    """A replica that frees gradients after each step; otherwise a thousand groups would keep a thousand."""

    def step(self, gradient: Sequence[Tensor | None]) -> None:
        super().step(gradient)
        for parameter in self.ordered:
            parameter.grad = None


class SharingReplica(Replica):
    """A replica that refers to shared weights, and copies them before it first moves them.

    ``parameters`` and ``optimizer`` only determine how each weight is moved.
    """

    def __init__(self, parameters: Sequence[Parameter], optimizer: Optimizer, group: int, start: SharedWeights) -> None:
        super().__init__(parameters, optimizer, group)
        self._weights: list[Tensor] = start

    def weights(self) -> list[Tensor]:
        return self._weights

    def load(self, pulled: Pulled) -> None:
        if not (tensors := pulled.tensors):
            return
        self._weights = tensors if isinstance(tensors, SharedWeights) else copies(tensors)
        self.clock = pulled.clock
        self.drift.read()

    def move(self, by: Sequence[Tensor], factor: float = 1.0) -> None:
        self._own()
        super().move(by, factor)

    def descend(self, gradient: Sequence[Tensor | None]) -> None:
        self._own()
        super().descend(gradient)

    def _own(self) -> None:
        if isinstance(self._weights, SharedWeights):
            self._weights = copies(self._weights)


def named_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Parameter]:
    """Return the parameters of an optimizer by name, in its order; all must be the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = held_by(optimizer)
    if any(id(parameter) not in names for parameter in ordered):
        raise ConfigurationError("optimizer: it must be made from the parameters that it is called with")
    return {names[id(parameter)]: parameter for parameter in ordered}


def own_replica(
    make: MakeOptimizer, model: nn.Module, parameters: Mapping[str, Parameter], weights: Sequence[Tensor], group: int
) -> OwnReplica:
    """Return a replica with parameters of its own for a group.

    ``make`` makes the user's optimizer from all parameters of the model, of which ``parameters`` are trained.
    """
    own = {
        name: Parameter(weight.clone(), requires_grad=parameter.requires_grad)
        for (name, parameter), weight in zip(parameters.items(), weights, strict=True)
    }
    optimizer = make([own.get(name, other) for name, other in model.named_parameters()])
    return OwnReplica(list(own.values()), optimizer, group)


MOST_TOGETHER = 32
"""The most gradients computed at a time."""
MOST_SAMPLES = 512
"""The most samples in them together; more exceed the processor's cache."""
MOST_NUMBERS = 2_000_000
"""The most weights in them together, for the same reason."""
FEWEST_TOGETHER = 8
"""The fewest gradients computed at a time, unless ``batched`` is True; fewer are as fast one by one."""


class Samples:
    """A map-style dataset that is read in batches, in the permutations of torch's DistributedSampler."""

    def __init__(self, data: Any, seed: int) -> None:
        if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
            raise ConfigurationError("data: pass a map-style dataset (with __len__ and __getitem__) that is not empty")
        self._data, self._seed = data, seed
        self._tensors = data.tensors if type(data) is TensorDataset else None
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._data)

    def at(self, epoch: int, positions: range) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self), generator=generator)
        return self._order[positions.start : positions.stop : positions.step]

    def batch(self, indices: Tensor) -> Any:
        if self._tensors is not None:
            return tuple([tensor[indices] for tensor in self._tensors])
        return default_collate([self._data[index] for index in indices.tolist()])

    def batches(self, indices: Sequence[Tensor]) -> Any:
        if self._tensors is not None:
            return self.batch(torch.stack(list(indices)))
        return tree_map(lambda *parts: torch.stack(parts), *map(self.batch, indices))


_FEW_SAMPLES = 8
"""The largest batch at which batched convolutions are faster."""


class Result(msgspec.Struct, frozen=True):
    """A gradient, tensor by tensor, and the mean loss of its samples."""

    gradient: list[Tensor | None]
    loss: float


class _Computation(msgspec.Struct):
    group: int
    due: float
    weights: list[Tensor]
    parts: list[Tensor]
    result: Result | None = None


class Workbench:
    """The gradient computations in flight, made late and, where that is faster, together.

    A computation is made when its result, or that of one made with it, is fetched. All groups share the model's buffers
    (BatchNorm's running statistics), which every forward pass changes, in the order of the fetches.

    Args:
        model: the model, whose weights are replaced.
        group_batch: samples in a group's usual batch.

    Attributes:
        anchors: numbers that require a gradient besides the parameters, for backward passes that need not reach these.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Parameter],
        loss: Loss,
        samples: Samples,
        batched: bool | Literal["auto"],
        group_batch: int,
    ) -> None:
        self.model, self.samples = model, samples
        self._parameters, self._loss = list(parameters.values()), loss
        self.anchors: Sequence[Tensor] = ()
        self._jobs: dict[int, _Computation] = {}
        size = sum(parameter.numel() for parameter in self._parameters)
        self._width = min(MOST_TOGETHER, MOST_SAMPLES // group_batch, MOST_NUMBERS // max(1, size))
        self._fewest = FEWEST_TOGETHER
        if batched is True:
            self._width, self._fewest = max(2, self._width), 2
        elif batched == "auto" and not _suits(model, group_batch):
            self._width = 0
        frozen = any(not parameter.requires_grad for parameter in self._parameters)
        if not batched or frozen:  # vmap would give frozen parameters a gradient
            self._width = 0
        self._is_probed, self._is_automatic = False, batched == "auto"
        self._objective = _Objective(model, loss)
        self._names = [f"model.{name}" for name in parameters]
        self._several = vmap(grad_and_value(self._value), randomness="different")
        self._several_at_one = vmap(grad_and_value(self._value), in_dims=(None, 0), randomness="different")

    def begin(self, group: int, due: float, weights: list[Tensor], parts: list[Tensor]) -> None:
        """Begin a computation whose result is needed at ``due``, in seconds; ``weights`` must not change before."""
        self._jobs[group] = _Computation(group, due, weights, parts)

    def drop(self, group: int) -> None:
        self._jobs.pop(group, None)

    def result(self, group: int) -> Result:
        job = self._jobs[group]
        if job.result is None:
            together = self._neighbours(job) if self._is_probed and self._width >= self._fewest else [job]
            if len(together) < self._fewest or not self._compute_together(together):
                watches = self._is_automatic and self._width > 0
                before = torch.get_rng_state() if watches else None
                job.result = self.compute(job.weights, [self.samples.batch(part) for part in job.parts])
                # For a parameter that takes no part, vmap returns zeros, but torch None, which its optimizers skip.
                # Random numbers, of dropout for example, are drawn in another order for several gradients at a time.
                is_random = before is not None and not torch.equal(before, torch.get_rng_state())
                self._is_probed = True
                if is_random or any(tensor is None for tensor in job.result.gradient):
                    self._width = 0
        del self._jobs[group]
        assert job.result is not None
        return job.result

    def compute(self, weights: Sequence[Tensor], batches: Sequence[Any]) -> Result:
        """Compute the gradient of one batch, or the mean over members, each divided before the sum, as in DDP."""
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.data = weight
        total: list[Tensor | None] = []
        losses = 0.0
        for batch in batches:
            with torch.enable_grad():
                loss = self._loss(self.model, batch)
            gradient = self._differentiate(loss)
            losses += float(loss.detach())
            total = _added(total, gradient, len(batches)) if len(batches) > 1 else list(gradient)
        return Result(total, losses / len(batches))

    def _differentiate(self, loss: Tensor) -> list[Tensor | None]:
        """Return one gradient for each parameter; None where it is frozen, or took no part in the loss."""
        moving = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigurationError(
                f"loss: it returns {found}; let it return the mean loss of the batch, one number with the gradient that"
                " the model gives it"
            )
        gradients = torch.autograd.grad(loss, [*moving, *self.anchors], allow_unused=True)[: len(moving)]
        if any(each is not None and each.layout != torch.strided for each in gradients):
            raise UnsupportedError(
                "a gradient is sparse, and gradients travel dense; build the embedding with sparse=False"
            )
        rest = iter(gradients)
        return [next(rest) if parameter.requires_grad else None for parameter in self._parameters]

    def _neighbours(self, job: _Computation) -> list[_Computation]:
        size = len(job.parts[0])
        alike = (
            (other.due, other.group)
            for other in self._jobs.values()
            if other.result is None and len(other.parts) == 1 and len(other.parts[0]) == size and other is not job
        )
        return [job, *(self._jobs[group] for _, group in heapq.nsmallest(self._width - 1, alike))]

    def _compute_together(self, jobs: list[_Computation]) -> bool:
        if len(jobs[0].parts) > 1:
            return False
        first = jobs[0].weights
        try:
            batch = self.samples.batches([job.parts[0] for job in jobs])
            if all(job.weights is first for job in jobs):
                gradients, losses = self._several_at_one(tuple(first), batch)
            else:
                stacked = tuple(torch.stack(column) for column in zip(*(job.weights for job in jobs), strict=True))
                gradients, losses = self._several(stacked, batch)
        except (RuntimeError, TypeError, ValueError):
            self._width = 0  # vmap does not support this model; the model's own errors appear without vmap
            return False
        rows = zip(*(gradient.unbind() for gradient in gradients), strict=True)
        for job, row, loss in zip(jobs, rows, losses.tolist(), strict=True):
            job.result = Result(list(row), loss)
        return True

    def _value(self, weights: tuple[Tensor, ...], batch: Any) -> Tensor:
        named = dict(zip(self._names, weights, strict=True))
        return cast(Tensor, functional_call(self._objective, named, (batch,)))


class _Objective(nn.Module):
    """The loss as a module, so that ``functional_call`` can set the weights of the model inside."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def _suits(model: nn.Module, group_batch: int) -> bool:
    """Return whether batching is faster, and the model has no buffers or dropout modules."""
    if group_batch > _FEW_SAMPLES and any(parameter.dim() > 2 for parameter in model.parameters()):
        return False  # convolutions with separate weights for each group of samples are slow
    return not any(True for _ in model.buffers()) and not any(isinstance(m, _DropoutNd) for m in model.modules())


def _added(total: list[Tensor | None], gradient: Sequence[Tensor | None], members: int) -> list[Tensor | None]:
    """Return ``total + gradient / members``, in place; a missing tensor counts as zero unless missing everywhere."""
    parts = [None if tensor is None else tensor / members for tensor in gradient]
    if not total:
        return list(parts)
    return [
        mine if part is None else part if mine is None else mine.add_(part)
        for mine, part in zip(total, parts, strict=True)
    ]
