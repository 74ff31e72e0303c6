"""Sources of a group's gradient, and the compute times of its devices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_omni.errors import ConfigurationError
from lightning_omni.group.leased_batches import apportion, positions
from lightning_omni.group.merged_head import MergedHeadClient
from lightning_omni.methods.model.head import check_mergeable, held_by_one, pass_through
from lightning_omni.methods.model.modules import describe_module, tensors_of, with_tensors
from lightning_omni.simulator.cluster import Cluster
from lightning_omni.simulator.engine import Engine, Timeline
from lightning_omni.simulator.network import Exchanges
from lightning_omni.simulator.server import HEAD, SimulatedServer
from lightning_omni.simulator.workbench import Result, Workbench
from lightning_omni.simulator.workload import Loss
from lightning_omni.wire import messages as m
from lightning_omni.wire.all_reduce import EXACT, AllReduce, Unsent, run_through
from lightning_omni.wire.codec import unpack
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import Batch

FORWARD = 1 / 3
"""The forward pass's part of a batch's time; the backward pass has twice as many matrix products."""
_DRAWN_AT_ONCE = 64


class DeviceClock:
    """The times of one rank's batches; the seed of their jitter is ``(seed, rank)``."""

    def __init__(self, cluster: Cluster, rank: int, seed: int) -> None:
        self._cluster, self._rank, self._device = cluster, rank, cluster.devices[rank]
        self._random = np.random.default_rng((seed, rank))
        self._factors: list[float] = []

    def seconds(self, samples: int, now: float) -> float:
        if not self._factors:
            self._factors = self._device.jitter.factors(self._random, _DRAWN_AT_ONCE).tolist()
        time = self._device.seconds(samples) * self._factors.pop()
        return time * self._cluster.slowness(self._rank, now) if self._cluster.events else time

    def speed(self, samples: int, now: float) -> float:
        return samples / (self._device.seconds(samples) * self._cluster.slowness(self._rank, now))


class Members:
    """The devices of one group.

    Args:
        is_balanced: whether they get parts of a batch in proportion to their speeds.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: tuple[int, ...],
        seed: int,
        is_balanced: bool,
        in_pairs: bool,
        all_reduce: AllReduce = EXACT,
    ) -> None:
        self._all_reduce, self._unsent = all_reduce, dict[Hashable, Unsent]()
        self._ranks, self._link = ranks, cluster.group_link
        self._clocks = [DeviceClock(cluster, rank, seed) for rank in ranks]
        self._is_balanced, self._in_pairs = is_balanced and len(ranks) > 1, in_pairs

    @property
    def first(self) -> int:
        return self._ranks[0]

    def forget_unsent(self) -> None:
        self._unsent.clear()

    def positions(self, batch: Batch, now: float) -> list[range]:
        members, shares = len(self._ranks), self._shares(batch, now)
        return [positions(batch, member, members, shares, self._in_pairs) for member in range(members)]

    def work(self, batch: Batch, now: float) -> list[tuple[int, int, float]]:
        """Return each member's rank, samples of a batch that begins now, and seconds for them; a call draws jitter."""
        return [
            (rank, len(part), clock.seconds(len(part), now))
            for rank, clock, part in zip(self._ranks, self._clocks, self.positions(batch, now), strict=True)
        ]

    def reduce_seconds(self, layout: Layout) -> float:
        if self._is_exact:
            return self._link.ring_seconds(layout.nbytes, len(self._ranks))
        nbytes = self._all_reduce.nbytes([spec.shape for spec in layout.specs])
        rounds = self._all_reduce.messages
        return rounds * self._link.ring_seconds(round(nbytes / rounds), len(self._ranks))

    def averaged(self, gradient: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if self._is_exact:
            return gradient
        found = [None if each is None else each.clone() for each in gradient]
        there = {place: each for place, each in enumerate(found) if each is not None}
        # The gradient is the mean already, so the collective is the identity.
        run_through(self._all_reduce.average(list(there.values()), list(there), self._unsent), lambda mean: mean)
        return found

    @property
    def _is_exact(self) -> bool:
        return len(self._ranks) == 1 or self._all_reduce == EXACT

    def _shares(self, batch: Batch, now: float) -> tuple[int, ...]:
        if not self._is_balanced:
            return ()
        size = batch.stop - batch.start
        each = max(1, size // len(self._ranks))
        return apportion(size, [clock.speed(each, now) for clock in self._clocks])


class Assignment(NamedTuple):
    """A batch whose gradient a group is to compute.

    Attributes:
        parts: positions of each member's samples, or of all samples together.
        place: the epoch, and the number of its batches that the group has trained, with this one.
    """

    group: int
    leader: int
    weights: list[Tensor]
    parts: Sequence[range]
    place: tuple[int, int]
    seconds: float


class SimulatedHead:
    """A stand-in for the merged submodule's ``forward``, which calls the server.

    Args:
        optimizer: the user's, over all of the model's parameters.

    Attributes:
        parameters: the head's own, by name, in the optimizer's order.
        anchor: as in `pass_through`, for `Workbench.anchors`.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Optimizer) -> None:
        self.name = name
        self.anchor = torch.zeros((), requires_grad=True)
        self._module = check_mergeable(name, model)
        _, self.parameters = held_by_one(name, self._module, [optimizer])
        self._side = MergedHeadClient(name, HEAD, self._module, optimizer, list(self.parameters.values()))
        self._server: SimulatedServer
        self._group_place = (0, -1, 0)
        self._output: Any = None

    def part(self, seed: int) -> dict[str, Any]:
        return {"name": self.name, "module": describe_module(self._module), "seed": seed}

    def sizes(self, model: nn.Module, loss: Loss, batch: Any) -> tuple[int, int]:
        """Return the bytes of the head's inputs and outputs for a batch."""
        seen: list[tuple[int, int]] = []

        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen.append((_nbytes((args, kwargs)), _nbytes(output)))

        was_training = model.training
        hook = self._module.register_forward_hook(keep, with_kwargs=True)
        try:
            model.eval()  # no dropout, no running statistics
            loss(model, batch)
        finally:
            hook.remove()
            model.train(was_training)
        if len(seen) != 1:
            raise ConfigurationError(
                f"merged={self.name!r}: the loss uses the submodule {len(seen)} times, and access at the server is one"
                " forward and one backward pass"
            )
        return seen[0]

    def install(self, server: SimulatedServer) -> None:
        self._server = server
        self._module.forward = self

    def access_for(self, leader: int, epoch: int, trained: int) -> None:
        self._group_place = (leader, epoch, trained)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tree = (args, kwargs)
        outputs = pass_through(self, tree, self.anchor) if torch.is_grad_enabled() else self._ask(tree, exclusive=False)
        return with_tensors(self._output, outputs)

    def bring(self, tree: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._ask(with_tensors(tree, tensors), exclusive=True)

    def _ask(self, tree: Any, exclusive: bool) -> list[Tensor]:
        message, payload = self._side.forward(tree, exclusive=exclusive)
        answer, payload = self._server.ask_head(self._group_place[0], message, payload, m.HeadOutput)
        self._output = unpack(answer.packed, payload)
        return tensors_of(self._output)

    def take_back(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[Any]:
        leader, epoch, trained = self._group_place
        message, payload = self._side.backward(gradients, (epoch, trained))
        answer, payload = self._server.ask_head(leader, message, payload, m.HeadGradients)
        found: list[Any] = unpack(answer.packed, payload)
        return found


def _nbytes(tree: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_of(tree))


class Gradients:
    """A source of gradients for groups without a merged head."""

    def __init__(self, engine: Engine, bench: Workbench) -> None:
        self._engine, self._bench = engine, bench

    def compute(self, work: Assignment) -> Timeline:
        """Wait until the group has its gradient, and return the `Result`."""
        due, samples = self._engine.now + work.seconds, self._bench.samples
        indices = [samples.at(work.place[0], part) for part in work.parts]
        self._bench.begin(work.group, due, work.weights, indices)
        yield due
        return self._bench.result(work.group)

    def drop(self, group: int) -> None:
        self._bench.drop(group)


class MergedHeadGradients(Gradients):
    """A source of gradients whose batches pass through a merged head at the server.

    ``sizes`` are the bytes of the head's inputs and outputs for one sample.
    """

    def __init__(
        self,
        engine: Engine,
        bench: Workbench,
        head: SimulatedHead,
        costs: Exchanges,
        sizes: tuple[int, int],
    ) -> None:
        super().__init__(engine, bench)
        self._head, self._costs = head, costs
        bench.anchors = [head.anchor]
        self._inputs, self._outputs = sizes
        self._lost: set[int] = set()

    def compute(self, work: Assignment) -> Timeline:
        return (yield self._engine.start(self._through_head(work)))

    def drop(self, group: int) -> None:
        self._lost.add(group)

    def _through_head(self, work: Assignment) -> Timeline:
        """Run a batch in a process of its own, which reaches the head even if its group has died."""
        (part,) = work.parts
        samples = len(part)
        yield self._engine.now + work.seconds * FORWARD
        inputs, outputs = self._inputs * samples, self._outputs * samples
        yield from self._costs.to_head(work.group, inputs, (outputs, outputs), samples)
        if work.group in self._lost:
            return None
        # The group has had exclusive access until now, so the whole batch may be computed now.
        self._head.access_for(work.leader, *work.place)
        batch = self._bench.samples.batch(self._bench.samples.at(work.place[0], part))
        result: Result = self._bench.compute(work.weights, [batch])
        yield from self._costs.from_head(work.group, inputs)
        yield self._engine.now + work.seconds * (1 - FORWARD)
        return result
