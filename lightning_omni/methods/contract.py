"""The contract of a method: a frozen value with a group side and a server side. No sockets, clocks or threads here.

:doc:`/contribute/extending` explains both sides and their rules. The group side keeps all its state in
`Replica.memory`: a driver may start a new generator whenever the present one requests a gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from torch import Tensor

from lightning_omni.checks import check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.model.replica import Hyperparameters, Pulled, Replica
from lightning_omni.methods.model.server_optimizer import Master

# --- Sums of pushes, in which any tensor may be missing ---------------------------------------------------------------


class Total:
    """A running weighted sum of pushes.

    A parameter that no push has is ``None``; one that only some have is the sum of theirs.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.weight = 0.0
        self._sum: list[Tensor | None] = []
        self._counts: list[int] = []

    def reach(self, parameters: int) -> None:
        missing = parameters - len(self._sum)
        self._sum.extend([None] * missing)
        self._counts.extend([0] * missing)

    def add(self, tensors: Sequence[Tensor | None], weight: float = 1.0) -> None:
        """Add ``weight * tensors`` of one push; the total shares no memory with them."""
        self.reach(len(tensors))
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            self._counts[index] += 1
            mine = self._sum[index]
            if mine is None:
                self._sum[index] = tensor.detach().clone() if weight == 1.0 else tensor.detach() * weight
            else:
                mine.add_(tensor, alpha=weight)
        self.count += 1
        self.weight += weight

    def scaled(self, factor: float) -> list[Tensor | None]:
        """Return the sum times a factor, in place: only `clear` may follow."""
        if factor != 1.0:  # skips a pass over the tensors
            for tensor in self._sum:
                if tensor is not None:
                    tensor.mul_(factor)
        return self._sum

    def means(self) -> list[Tensor | None]:
        """Return each tensor's mean over the pushes that had it, in place, like `scaled`; all weights must be 1."""
        for tensor, count in zip(self._sum, self._counts, strict=True):
            if tensor is not None and count > 1:
                tensor.mul_(1 / count)
        return self._sum

    def take(self, factor: float = 1.0) -> list[Tensor | None]:
        scaled = self.scaled(factor)
        self.clear()
        return scaled

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight, "sum": list(self._sum), "counts": list(self._counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.count, self.weight = int(state["count"]), float(state["weight"])
        self._sum = [None if tensor is None else tensor.clone() for tensor in state["sum"]]
        self._counts = [int(count) for count in state["counts"]]


Tensors = Sequence[Tensor | None]
"""One tensor for each parameter, or piece of a fragment; ``None`` where it took no part or need not travel."""

# --- The needs of a group side ---------------------------------------------------------------------------------------


class NextGradient(msgspec.Struct, frozen=True):
    """A request for the gradient of the group's next batch, at the weights in the replica. Answer: `Gradient`."""


class Gradient(msgspec.Struct, frozen=True):
    """A group's gradient: the mean over the group's batch, after clipping, unscaling and accumulation.

    Attributes:
        hyperparameters: the worker's, at this step.
        samples: samples in the group's last batch, without those accumulated before; 0 for data that are not leased.
    """

    tensors: Tensors
    hyperparameters: Hyperparameters
    samples: int = 0


class Step(msgspec.Struct, frozen=True):
    """A request for a step of the worker's own optimizer along ``gradient``, on every rank of a group. Answer: None."""

    gradient: Gradient


class Exchange(msgspec.Struct, frozen=True):
    """A request to push ``tensors`` to the server and wait for its answer. Answer: `Pulled`.

    Attributes:
        tensors: gradients, weights or differences of weights, by the method.
        read_at: clock of the weights that ``tensors`` were computed from.
        hyperparameters: the values for this step of the server's optimizer; empty if the optimizer steps on the ranks.
        note: one number for the server side.
        pull: whether the answer contains tensors.
        fragment: number of the exchanged fragment (`lightning_omni.methods.model.fragments`): push and answer hold one
            tensor for each of its pieces; None for all parameters.
    """

    tensors: Tensors
    read_at: int
    hyperparameters: Hyperparameters = ()
    note: float = 0.0
    pull: bool = True
    fragment: int | None = None


class Send(msgspec.Struct, frozen=True):
    """A request to begin an exchange without waiting for its answer. Answer: None, at once.

    Until `Receive` returns its answer, the group side sends nothing else to the server. Where a group must stop
    computing (at a synchronization point, for example), the driver passes the answer to `Method.apply_answer`.

    Attributes:
        exchange: its tensors are copied before this request is answered.
    """

    exchange: Exchange


class Receive(msgspec.Struct, frozen=True):
    """A request to wait for the answer of the exchange in flight. Answer: `Pulled`."""


class Fetch(msgspec.Struct, frozen=True):
    """A request for the server's weights, without a push. Answer: `Pulled`."""


class StepTime(msgspec.Struct, frozen=True):
    """A request for local steps' mean seconds since the last request, without exchanges. Answer: float; 0 for none."""


class Publish(msgspec.Struct, frozen=True):
    """A request to let other groups read these weights until the next `Publish`. Answer: the weights as received."""

    tensors: Sequence[Tensor]


class ReadPeer(msgspec.Struct, frozen=True):
    """A request for the weights that ``group`` published last. Answer: its tensors; None if none can be read."""

    group: int


class SendPeer(msgspec.Struct, frozen=True):
    """A request to put weights into the inbox of ``group``, without waiting for it. Answer: the weights as received.

    A message to this group itself, or to one that is gone or slow to read, is not sent.
    """

    group: int
    tensors: Sequence[Tensor]


class ReadInbox(msgspec.Struct, frozen=True):
    """A request to empty this group's inbox. Answer: `Inbox`."""


class Inbox(msgspec.Struct, frozen=True):
    """The messages of peers since the inbox was last read.

    Attributes:
        total: their sum, tensor by tensor; None without messages.
        count: number of messages.
    """

    total: Sequence[Tensor] | None
    count: int


Need = NextGradient | Step | Exchange | Send | Receive | Fetch | StepTime | Publish | ReadPeer | SendPeer | ReadInbox
Answer = Gradient | Pulled | Inbox | Sequence[Tensor] | float | None
GroupSide = Generator[Need, Any, None]

# --- The server's half -----------------------------------------------------------------------------------------------


class Push(msgspec.Struct, frozen=True):
    """A group's push, as the server side receives it; `Exchange` has the other attributes.

    Attributes:
        tensors: only valid until `ServerSide.receive` returns.
        fragment: `Master.fragment` returns the same pieces of the master weights.
    """

    group: int
    read_at: int
    tensors: Tensors
    hyperparameters: Hyperparameters = ()
    note: float = 0.0
    fragment: int | None = None


class Reply(msgspec.Struct, frozen=True):
    """The server side's answer to a group.

    Attributes:
        staleness: updates between the read that the push was computed from and its arrival.
        tensors: the tensors to send, each None as zeros; None sends the present master weights, or those of the pushed
            fragment.
        note: one number for the group side.
    """

    group: int
    staleness: int
    tensors: Tensors | None = None
    note: float = 0.0


class ServerSide(ABC):
    """The server side of a method, for one optimizer.

    Attributes:
        groups: the groups that are alive.
        idle_groups: those that push nothing for now: at the end of an epoch, at a synchronization point, in a
            validation, or waiting with another optimizer's push. No group may wait for a push of theirs.
        as_sent: maps the tensors of an answer to the values that the group receives; where both sides apply an answer,
            they apply these.
        now: time of the current event, in seconds on a monotonic clock, from the driver.
        due: time at which the driver calls `expire`; infinite for never.
        waits_for_all: whether a push is answered once all working groups have pushed.
    """

    method: Method
    waits_for_all: ClassVar[bool] = False

    def __init__(self, method: Method, master: Master, groups: Iterable[int]) -> None:
        self.method, self.master = method, master
        self.groups = set(groups)
        self.idle_groups: set[int] = set()
        master.cut(method.fragments)
        self.as_sent: Callable[[Tensors], Tensors] = lambda tensors: tensors
        self.now, self.due = 0.0, math.inf
        self.setup()

    def setup(self) -> None:  # noqa: B027  # most methods remember nothing
        """Initialize the side's own state."""

    @property
    def working(self) -> set[int]:
        """Return the groups that are not idle."""
        return self.groups - self.idle_groups

    def declines(self, staleness: int) -> bool:
        """Return whether to decline a push: its group gets the master weights, and the pool its leased samples.

        ``staleness`` is negative if the server restarted from earlier weights; unless declined, the push then counts as
        computed from the present ones.
        """
        return False

    @abstractmethod
    def receive(self, push: Push) -> list[Reply]:
        """Merge a push, and return replies to the groups that now get an answer."""

    def released(self) -> list[Reply]:
        """Make due updates, and return replies to groups that may continue, after another has left or become idle."""
        return []

    def expire(self) -> list[Reply]:
        """Handle the time `due`; return replies as `released` does. Later events may come before this call."""
        return []

    def idle(self, group: int) -> list[Reply]:
        """Mark a group as idle; return replies as `released` does."""
        self.idle_groups.add(group)
        return self.released()

    def resume(self, group: int) -> None:
        """Mark an idle group as working again."""
        self.idle_groups.discard(group)

    def evict(self, group: int) -> list[Reply]:
        """Remove a group for good; return replies likewise."""
        self.groups.discard(group)
        self.idle_groups.discard(group)
        return self.released()

    def join(self, group: int) -> None:
        """Add a group. It reads the weights before its first push."""
        self.groups.add(group)

    def fetched(self, group: int) -> None:  # noqa: B027  # most methods need not know
        """Handle a group's read of the master weights by a `Fetch`, or after a refused or repeated push."""

    def grow(self, start: int) -> None:  # noqa: B027  # most methods remember nothing for each parameter
        """Extend the state to the master's new parameters, from index ``start`` on."""

    def read_from(self, group: int, start: int) -> None:  # noqa: B027
        """Handle a group's first read of the parameters from index ``start`` on."""

    def staleness_of(self, push: Push) -> int:
        """Return the updates since the read that a push was computed from."""
        return self.master.clock - push.read_at

    def rearranged(self, hyperparameters: Hyperparameters) -> None:  # noqa: B027  # nothing waits
        """Replace the hyperparameters of waiting pushes by those of the optimizer's new parameter groups."""

    def state(self) -> dict[str, Any]:
        """Return the side's state, without the master's, as plain values and live tensors."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # nothing remembered, nothing to load
        """Restore a `state`, before the first push."""


# --- A method --------------------------------------------------------------------------------------------------------


class Method(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A distributed-SGD method: its hyperparameters, and constructors of its two sides.

    It travels to the server as its name and plain values.

    Attributes:
        steps_at: where the user's optimizer runs: at the ``"server"``, one for all groups, or on every rank
            (``"worker"``).
        evaluated: the weights that are validated, tested and saved: ``"server"``, the server's; ``"centre"``, the same
            where the groups' own circle around them; ``"mean"``, the mean of all groups' own.
        pushes_weights: whether pushes are weights, and not gradients or changes, which add up.
        answers_changes: whether answers are changes of weights, which both sides apply.
        elementwise: whether the server side treats each element separately, so that several servers may each hold a
            part of a tensor. Its state per parameter must then be in lists with one entry per parameter, or in mappings
            by parameter index, as in torch's optimizers; with several fragments, see
            `lightning_omni.methods.model.fragments.state_of`.
        sums_gradients: whether the server side's state is a sum of gradients, which any number of groups can continue.
        talks_to_peers: whether group sides use `Publish`, `ReadPeer`, `SendPeer` or `ReadInbox`.
        fragments: number of fragments that are exchanged one by one. With several, the server side must be
            element-wise.
        side: class of the server side.
    """

    steps_at: ClassVar[Literal["server", "worker"]] = "server"
    evaluated: ClassVar[Literal["server", "centre", "mean"]] = "server"
    pushes_weights: ClassVar[bool] = False
    answers_changes: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    sums_gradients: ClassVar[bool] = False
    talks_to_peers: ClassVar[bool] = False
    fragments: ClassVar[int] = 1
    side: ClassVar[type[ServerSide] | None] = None

    @property
    def push_period(self) -> int:
        """Return the local steps of a group between two pushes of any fragment."""
        return int(getattr(self, "period", 1)) // self.fragments

    def steps_to_push(self, replica: Replica) -> int:
        """Return the local steps until a group that waits for its next gradient pushes any fragment."""
        return self.push_period - int(replica.memory.get("steps", 0)) % self.push_period

    @property
    def pull_period(self) -> int:
        """Return the local steps of a group between two answers that contain weights."""
        return self.push_period

    @property
    def has_barrier(self) -> bool:
        """Return whether every exchange after a warm start waits for those of all other groups."""
        return self.side is not None and self.side.waits_for_all

    def check(self, groups: int) -> None:
        """Raise `ConfigurationError` if the method cannot work with this number of groups."""

    def group_side(self, replica: Replica) -> GroupSide:
        """Run the worker's half, an endless generator of requests.

        By default it pushes the gradient at the weights last read, and loads the master weights.
        """
        while True:
            gradient = yield NextGradient()
            replica.load((yield Exchange(gradient.tensors, replica.clock, gradient.hyperparameters)))

    def updates_per_batch(self, groups: int) -> int:
        """Return the successive updates of the weights while every rank trains one batch, in ``groups`` groups.

        By default: one for each group if the optimizer steps at the server, else 1.
        """
        return groups if self.steps_at == "server" else 1

    def changes_with_period(self, period: int) -> dict[str, Any]:
        """Return the settings that change with ``period``; the returned number of fragments divides it."""
        return {"period": period, **({"fragments": math.gcd(self.fragments, period)} if self.fragments > 1 else {})}

    def apply_answer(self, replica: Replica, pulled: Pulled) -> None:
        """Apply the answer of an exchange in flight that arrives before `group_side` requests it; by default, load it.

        `group_side` restarts afterwards.
        """
        replica.load(pulled)

    def server_side(self, master: Master, groups: Iterable[int]) -> ServerSide:
        """Return the server's half, for these groups."""
        if self.side is None:
            raise NotImplementedError(f"{type(self).__name__} has no server side")
        return self.side(self, master, groups)


def check_period(period: int) -> None:
    check_whole("period", period, "the local steps between two exchanges, 1 or more", 1)


def check_fragments(fragments: int, period: int) -> None:
    check_whole("fragments", fragments, "the parts that parameters are exchanged in, 1 or more", 1)
    if period % fragments:
        raise ConfigurationError(
            f"fragments={fragments} with period={period}: a fragment is exchanged every"
            " period / fragments steps; pass a number that divides the period"
        )


def with_period(method: Method, period: int) -> Method:
    """Return the method with another period, if it has one."""
    if getattr(method, "period", period) == period:
        return method
    return msgspec.structs.replace(method, **method.changes_with_period(period))
