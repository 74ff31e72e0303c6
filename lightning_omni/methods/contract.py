"""What every method is: a frozen value with a group side and a server side. No sockets, clocks or threads here.

The *group side* is a generator that reads as the paper's pseudo-code of a worker. It yields what it needs (the next
gradient, an exchange with the server, a peer's weights) and is sent the answer by its driver, in real time or in
any other. Every rank of a group runs the same generator on the same answers.

The *server side* is a plain object: a push goes in, and the groups that now get an answer come out.

Rule 1: whatever either side remembers lies in `Replica.memory` or comes out of `ServerSide.state`, so that checkpoint,
copy and simulation come for free; a generator may be thrown away and made again whenever it needs the next gradient.
Rule 2: staleness is counted by the server side when a push arrives, against `Master.clock`, and nowhere else.
Rule 3: time is an event like any other. A server side reads it from `ServerSide.now` and asks for a moment in
`ServerSide.due`; what drives it, in real time or in any other, calls `ServerSide.expire` then.
Rule 4: weights are never changed behind the replica's or the master's back: both sides hand tensors over, and a side
that keeps one keeps a copy.
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
from lightning_omni.methods.fragments import state_of, states_in
from lightning_omni.methods.master import Master
from lightning_omni.methods.replica import Hyperparameters, Pulled, Replica
from lightning_omni.methods.totals import Total

Tensors = Sequence[Tensor | None]
"""One tensor for each parameter, shaped like it; ``None`` where the parameter took no part in the loss."""

# --- What a group side needs -----------------------------------------------------------------------------------------


class NextGradient(msgspec.Struct, frozen=True):
    """Need: the next gradient of the group's batch, at the weights that the replica holds. Answer: `Gradient`."""


class Gradient(msgspec.Struct, frozen=True):
    """A group's gradient: the mean over the group's batch, after clipping, unscaling and accumulation.

    Attributes:
        tensors: one for each parameter.
        hyperparameters: the worker's hyperparameters at this step.
        samples: in the group's batch; 0 if that is not known, for data that are not leased.
    """

    tensors: Tensors
    hyperparameters: Hyperparameters
    samples: int = 0


class Step(msgspec.Struct, frozen=True):
    """Need: one step of the worker's own optimizer along ``gradient``, on every rank of the group. Answer: None."""

    gradient: Gradient


class Exchange(msgspec.Struct, frozen=True):
    """Need: push ``tensors`` to the server and hear its answer. Answer: `Pulled`.

    Attributes:
        tensors: a gradient, weights or a difference of weights, as the method has it.
        read_at: clock of the weights that they were computed from.
        hyperparameters: what the server's optimizer is to step with; empty if it has none.
        note: one number for the server side.
        pull: whether the answer is to bring tensors.
        fragment: which of the method's ``fragments`` it is of, push and answer alike; None for all parameters. Then
            ``tensors`` has one for each piece of the fragment (`lightning_omni.methods.fragments`), and so has the
            answer.
    """

    tensors: Tensors
    read_at: int
    hyperparameters: Hyperparameters = ()
    note: float = 0.0
    pull: bool = True
    fragment: int | None = None


class Send(msgspec.Struct, frozen=True):
    """Need: begin an exchange, and do not wait for its answer. Answer: None, at once.

    It travels while the next gradients are computed; `Receive` brings its answer. One exchange may be under way: until
    its answer is received nothing else may be said to the server. Where a group cannot go on computing, at a
    synchronization point of all groups, say, what is under way is received before its time, and given to
    `Method.apply_answer`.

    Attributes:
        exchange: its tensors are copied before this is answered.
    """

    exchange: Exchange


class Receive(msgspec.Struct, frozen=True):
    """Need: the answer of the exchange that is under way, waiting for it if it has to be. Answer: `Pulled`."""


class Fetch(msgspec.Struct, frozen=True):
    """Need: the server's weights, without pushing anything. Answer: `Pulled`."""


class StepTime(msgspec.Struct, frozen=True):
    """Need: seconds that one local step takes this group, lately, exchanges left out. Answer: float."""


class Publish(msgspec.Struct, frozen=True):
    """Need: other groups may read these weights from now on, until the next ones. Answer: them, as others get them."""

    tensors: Sequence[Tensor]


class ReadPeer(msgspec.Struct, frozen=True):
    """Need: what ``group`` has published. Answer: its tensors, or None if there is nothing (it is gone, say)."""

    group: int


class SendPeer(msgspec.Struct, frozen=True):
    """Need: put weights into the inbox of ``group``, which does not wait for them. Answer: them, as it gets them.

    To this group itself nothing is sent.
    """

    group: int
    tensors: Sequence[Tensor]


class ReadInbox(msgspec.Struct, frozen=True):
    """Need: empty this group's inbox. Answer: `Inbox`."""


class Inbox(msgspec.Struct, frozen=True):
    """What peers have sent since the inbox was last read.

    Attributes:
        total: the sum of it all, tensor by tensor; None if there was nothing.
        count: number of messages.
    """

    total: Sequence[Tensor] | None
    count: int


Need = NextGradient | Step | Exchange | Send | Receive | Fetch | StepTime | Publish | ReadPeer | SendPeer | ReadInbox
Answer = Gradient | Pulled | Inbox | Sequence[Tensor] | float | None
GroupSide = Generator[Need, Any, None]

# --- The server's half -----------------------------------------------------------------------------------------------


class Push(msgspec.Struct, frozen=True):
    """What a group's push brings to the server side.

    Attributes:
        group: number of the group.
        read_at: clock of the weights that ``tensors`` were computed from.
        tensors: as in `Exchange`; they are only valid until `ServerSide.receive` returns.
        hyperparameters: as in `Exchange`.
        note: as in `Exchange`.
        fragment: as in `Exchange`; `Master.fragment` has the same pieces of the master weights.
    """

    group: int
    read_at: int
    tensors: Tensors
    hyperparameters: Hyperparameters = ()
    note: float = 0.0
    fragment: int | None = None


class Sum(msgspec.Struct, frozen=True):
    """Pushes of several groups that an aggregator has added up.

    Attributes:
        parts: the pushes, in the order in which they came, all of the same fragment, and each without its tensors.
        tensors: their sum, valid for as long as `Push.tensors`; None where no push had one.
        counts: of each tensor, how many of the pushes had one.
    """

    parts: Sequence[Push]
    tensors: Tensors
    counts: Sequence[int]


class Reply(msgspec.Struct, frozen=True):
    """The server side's answer to a group.

    Attributes:
        group: number of the group.
        staleness: updates between the read that its push was computed from and the push's arrival.
        tensors: what to send; None sends the master weights as they are now, of the fragment that was pushed if it was
            one. What is None among them is sent as zeros.
        note: one number for the group side.
    """

    group: int
    staleness: int
    tensors: Tensors | None = None
    note: float = 0.0


class ServerSide(ABC):
    """The server's half of a method, for one optimizer. Its whole state is here and in its `Master`.

    Args:
        method: whose half it is.
        master: the master weights.
        groups: numbers of the groups that take part.

    Attributes:
        groups: the groups that are alive.
        idle_groups: those among them that have nothing to push for now: they wait for others at the end of an epoch, or
            at a synchronization point of all ranks. No group must wait for a push of theirs.
        as_sent: what a group gets of tensors that it is answered; where both sides apply them, both apply this.
        overlaps: whether groups compute while their exchanges are under way, so that a push may come from weights that
            are not the last ones its group was sent.
        now: the moment of what happens now, in seconds on a clock that only goes forward. What drives the side sets it.
        due: when `expire` is to be called, on the same clock; infinite for never.
    """

    method: Method

    def __init__(self, method: Method, master: Master, groups: Iterable[int]) -> None:
        self.method, self.master = method, master
        self.groups = set(groups)
        self.idle_groups: set[int] = set()
        master.cut(method.fragments)
        self.as_sent: Callable[[Tensors], Tensors] = lambda tensors: tensors
        self.overlaps = False
        self.now, self.due = 0.0, math.inf
        self.setup()

    def setup(self) -> None:  # noqa: B027  # most methods remember nothing
        """Makes what the side remembers, when it is made itself."""

    @property
    def working(self) -> set[int]:
        """Groups that will push again before long."""
        return self.groups - self.idle_groups

    @abstractmethod
    def receive(self, push: Push) -> list[Reply]:
        """Merges a push and says which groups now get an answer."""

    def receive_sum(self, pushes: Sum) -> list[Reply]:
        """Merges pushes that come as their sum; only where `Method.most_added` allows it."""
        raise NotImplementedError(f"{type(self).__name__} needs each push by itself")

    def released(self) -> list[Reply]:
        """Groups that need not wait any more, now that another is gone or idle. None waits unless a method makes it."""
        return []

    def expire(self) -> list[Reply]:
        """The moment `due` has come. No later moment is reached before; a push may be, if it is as late."""
        return []

    def idle(self, group: int) -> list[Reply]:
        """A group has nothing to push for now."""
        self.idle_groups.add(group)
        return self.released()

    def resume(self, group: int) -> None:
        """An idle group computes again."""
        self.idle_groups.discard(group)

    def evict(self, group: int) -> list[Reply]:
        """A group is gone for good."""
        self.groups.discard(group)
        self.idle_groups.discard(group)
        return self.released()

    def join(self, group: int) -> None:
        """A group more takes part from now on. It reads the weights before it pushes anything."""
        self.groups.add(group)

    def fetched(self, group: int) -> None:  # noqa: B027  # most methods need not know
        """A group reads the master weights without a push."""

    def grow(self, start: int) -> None:  # noqa: B027  # most methods remember nothing for each parameter
        """The master has parameters from this place on that it did not have; pushes bring them from now on."""

    def read_from(self, group: int, start: int) -> None:  # noqa: B027
        """A group that did not know of the parameters from this place on reads them."""

    def staleness_of(self, push: Push) -> int:
        """Updates between the push's read and now."""
        return self.master.clock - push.read_at

    def state(self) -> dict[str, Any]:
        """What the side remembers, beyond the master: plain values and tensors. The tensors are the live ones."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # nothing remembered, nothing to load
        """Goes on from a `state`; called before the first push."""


class Barrier(ServerSide):
    """Adds up what the working groups push; when all have, merges the total once and answers them all.

    A group that is idle or gone is not waited for: then the total is that of the others. Of each fragment that was
    pushed there is a total; groups that come from different epochs' ends may push different ones.
    """

    def setup(self) -> None:
        self._totals = [Total() for _ in range(self.method.fragments)]
        self._waiting: dict[int, int] = {}  # group: staleness
        self._last: dict[int, Push] = {}  # by fragment

    @abstractmethod
    def merge(self, total: Total, last: Push) -> None:
        """One update of the master, or of ``last.fragment``, from all groups' pushes, of which ``last`` came last."""

    def receive(self, push: Push) -> list[Reply]:
        self._totals[push.fragment or 0].add(push.tensors)
        return self._wait(push)

    def receive_sum(self, pushes: Sum) -> list[Reply]:
        *others, last = pushes.parts
        self._totals[last.fragment or 0].add(pushes.tensors, counts=pushes.counts, pushes=len(pushes.parts))
        for push in others:
            self._waiting[push.group] = self.staleness_of(push)
        return self._wait(last)

    def _wait(self, push: Push) -> list[Reply]:
        """What a group has pushed is in the total."""
        self._waiting[push.group] = self.staleness_of(push)
        self._last[push.fragment or 0] = Push(
            push.group, push.read_at, (), push.hyperparameters, push.note, push.fragment
        )
        return self.released()

    def released(self) -> list[Reply]:
        if not self._last or not self.working <= self._waiting.keys():
            return []
        for number, last in self._last.items():
            self.merge(self._totals[number], last)
            self._totals[number].clear()
        waiting, self._waiting, self._last = self._waiting, {}, {}
        return [Reply(group, staleness) for group, staleness in waiting.items() if group in self.groups]

    def evict(self, group: int) -> list[Reply]:
        # What it pushed stays in the total: those samples were trained.
        self._waiting.pop(group, None)
        return super().evict(group)

    def grow(self, start: int) -> None:
        for number, total in enumerate(self._totals):
            total.reach(len(self.master.fragment(number)))

    def state(self) -> dict[str, Any]:
        return state_of([self.state_of_fragment(number) for number in range(self.method.fragments)])

    def state_of_fragment(self, number: int) -> dict[str, Any]:
        """What the side remembers of one fragment, 0 if there is one; as in `state`."""
        return {"total": self._totals[number].state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        # What had come in waits for the next push: groups have read the weights as they are without it.
        for total, saved in zip(self._totals, states_in(state), strict=True):
            total.load_state(saved["total"])


# --- A method --------------------------------------------------------------------------------------------------------


class Method(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """A distributed-SGD method: its hyperparameters, and how to make its two sides.

    A method is a value: frozen, comparable, and it travels to the server as plain numbers.

    Attributes:
        steps_at: where the user's optimizer runs: at the ``"server"``, once for all groups, or on every rank
            (``"worker"``).
        evaluated: which model is validated, tested and saved: ``"server"``, the weights that the server holds;
            ``"centre"``, the same where the groups' own weights circle around them; ``"mean"``, the mean of all
            groups' own weights.
        pushes_weights: whether pushes are weights, rather than what adds up: gradients, or changes of weights.
        answers_changes: whether answers are changes of weights, which both sides apply, rather than weights.
        elementwise: whether the server side treats each number of the weights by itself, so that several servers may
            each hold a part of a tensor; what it remembers for each parameter then stands in lists of one entry a
            parameter, or by place, as in the state of torch's optimizers. With several fragments it is the state of
            each, in a list by the name of "fragments": see `lightning_omni.methods.fragments.state_of`.
        talks_to_peers: whether group sides need `Publish`, `ReadPeer`, `SendPeer` or `ReadInbox`.
        resyncs: whether a group that has read newer weights than the server has, which went back to an earlier state,
            is refused and begins again from what there is (`Pulled.refused`); without it that is an error.
        fragments: how many parts the parameters are cut into, each of which is exchanged by itself; 1 exchanges them
            whole. What the server side computes must be element-wise, for the cuts go through tensors.
        side: class of the server side.
    """

    steps_at: ClassVar[Literal["server", "worker"]] = "server"
    evaluated: ClassVar[Literal["server", "centre", "mean"]] = "server"
    pushes_weights: ClassVar[bool] = False
    answers_changes: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    talks_to_peers: ClassVar[bool] = False
    resyncs: ClassVar[bool] = False
    fragments: ClassVar[int] = 1
    side: ClassVar[type[ServerSide] | None] = None

    @property
    def push_period(self) -> int:
        """Local steps of a group between two pushes, of whichever fragment: ``period / fragments``, if any."""
        return int(getattr(self, "period", 1)) // self.fragments

    def steps_to_push(self, replica: Replica) -> int:
        """Return how many local steps a group has to make until it pushes, whichever fragment, as things stand.

        Args:
            replica: of the group, between two gradients.
        """
        return self.push_period - int(replica.memory.get("steps", 0)) % self.push_period

    @property
    def pull_period(self) -> int:
        """Local steps of a group between two answers that bring weights."""
        return self.push_period

    @property
    def has_barrier(self) -> bool:
        """Whether every exchange, after a warm start, waits for those of all other groups."""
        return self.side is not None and issubclass(self.side, Barrier)

    @property
    def holds_others_up(self) -> bool:
        """Whether a group that takes long to push may hold the others up."""
        return self.has_barrier

    def check(self, groups: int) -> None:
        """Raises `ConfigurationError` if the method cannot work with that many groups."""

    def group_side(self, replica: Replica) -> GroupSide:
        """The worker's half: an endless generator of needs.

        Unless a method says otherwise: gradient at the weights last read; push it; read the master weights; repeat.
        """
        while True:
            gradient = yield NextGradient()
            replica.load((yield Exchange(gradient.tensors, replica.clock, gradient.hyperparameters)))

    def updates_per_batch(self, groups: int) -> int:
        """How often the master weights step while all ranks train one batch, in so many groups.

        One for each group, where the server steps for each push; methods that average what groups do make one.
        """
        return groups if self.steps_at == "server" else 1

    def most_added(self, groups: int) -> int:
        """Pushes that may come to the server side as one `Sum`, of so many groups; 0 if it needs each by itself."""
        return 0

    def changes_with_period(self, period: int) -> dict[str, Any]:
        """What is another one if ``period`` is this. Fragments are as many as can be sent at equal distances."""
        return {"period": period, **({"fragments": math.gcd(self.fragments, period)} if self.fragments > 1 else {})}

    def apply_answer(self, replica: Replica, pulled: Pulled) -> None:
        """What a group does with the answer of an exchange that was under way, if it comes before it is received.

        `group_side` begins again afterwards: what this has to know of the exchange, and what it leaves to be known,
        lies in the replica's memory. Unless a method says otherwise, the answer is loaded.
        """
        replica.load(pulled)

    def server_side(self, master: Master, groups: Iterable[int]) -> ServerSide:
        """The server's half, for the groups of these numbers."""
        if self.side is None:
            raise NotImplementedError(f"{type(self).__name__} has no server side")
        return self.side(self, master, groups)


def check_period(period: int) -> None:
    """Raises `ConfigurationError` unless there is a step between two exchanges."""
    check_whole("period", period, "the local steps between two exchanges, 1 or more", 1)


def check_fragments(fragments: int, period: int) -> None:
    """Raises `ConfigurationError` unless so many fragments can be exchanged at equal distances in a period."""
    check_whole("fragments", fragments, "the parts that parameters are exchanged in, 1 or more", 1)
    if period % fragments:
        raise ConfigurationError(
            f"fragments={fragments} with period={period}: a fragment is exchanged every"
            " period / fragments steps; pass a number that divides the period"
        )


def with_period(method: Method, period: int) -> Method:
    """A method with so many local steps between two exchanges, if it has such a number."""
    if getattr(method, "period", period) == period:
        return method
    return msgspec.structs.replace(method, **method.changes_with_period(period))
