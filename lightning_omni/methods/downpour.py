"""Downpour SGD and GPU A-SGD."""

from __future__ import annotations

from typing import Literal

from lightning_omni.checks import check_choice, check_whole
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.barrier import Barrier
from lightning_omni.methods.contract import Exchange, Fetch, GroupSide, Method, NextGradient, Push, Reply, Step, Total
from lightning_omni.methods.model.replica import Replica


class _ApplyOrAdd(Barrier):
    method: Downpour

    def receive(self, push: Push) -> list[Reply]:
        if self.master.clock < self.method.warm_start:
            return super().receive(push)
        staleness = self.staleness_of(push)
        self._apply(push.tensors, push)
        return [Reply(push.group, staleness)]

    def merge(self, total: Total, last: Push) -> None:
        self._apply(total.scaled(1 / total.count), last)

    def _apply(self, tensors: object, push: Push) -> None:
        if self.method.send == "gradients":
            self.master.update(tensors, push.hyperparameters)  # type: ignore[arg-type]
        else:
            self.master.add(tensors)  # type: ignore[arg-type]


class Downpour(Method, frozen=True, kw_only=True, tag="downpour"):
    r"""Downpour SGD; with ``send="updates"`` and n_push = n_fetch, GPU A-SGD.

    Every group descends on its own, and accumulates its gradients:

    .. math:: x \leftarrow x - \eta g(x), \qquad a \leftarrow a + g(x)

    Every ``n_push`` steps it pushes a and clears it; every ``n_fetch`` steps the master weights *overwrite* x. The
    server applies each a at once. With ``send="gradients"`` the user's optimizer steps at the server along a, and the
    steps in between are plain SGD with its learning rate. With ``send="updates"`` it steps at the worker, and the
    server *adds* the accumulated change of x.

    Args:
        n_push: steps between two pushes.
        n_fetch: steps between two fetches.
        send: ``"gradients"`` or ``"updates"``.
        warm_start: server updates made in lock-step, with the mean of all groups' gradients or updates, before
            asynchrony begins: from random weights, asynchronous steps often make no progress. (GPU A-SGD starts from a
            partly trained model instead: load the checkpoint of one group.)

    ``n_push = n_fetch = 1`` with gradients is `AsyncSGD`.

    Raises:
        ConfigurationError: an argument is out of range, or updates are sent with n_push other than n_fetch.

    Example:
        >>> Downpour(n_push=10, n_fetch=10, send="updates")  # GPU A-SGD with n_sync = 10
        Downpour(n_push=10, n_fetch=10, send='updates', warm_start=0)

    References:
        Dean et al. 2012, "Large Scale Distributed Deep Networks";
        Paine et al. 2013, "GPU Asynchronous Stochastic Gradient Descent", arXiv:1312.6186.
    """

    side = _ApplyOrAdd
    n_push: int = 1
    n_fetch: int = 1
    send: Literal["gradients", "updates"] = "gradients"
    warm_start: int = 0

    def __post_init__(self) -> None:
        for name in ("n_push", "n_fetch"):
            check_whole(name, getattr(self, name), "at least 1 step between two exchanges", 1)
        check_whole("warm_start", self.warm_start, "a number of server updates, 0 for a cold start")
        check_choice("send", self.send, ("gradients", "updates"))
        if self.send == "updates" and self.n_push != self.n_fetch:
            raise ConfigurationError(
                f"n_push={self.n_push}, n_fetch={self.n_fetch}: a fetch overwrites what was not pushed, so updates are"
                ' pushed and fetched together: pass n_push=n_fetch, or send="gradients"'
            )

    @property
    def steps_at(self) -> Literal["server", "worker"]:  # type: ignore[override]  # depends on a setting
        return "server" if self.send == "gradients" else "worker"

    @property
    def push_period(self) -> int:
        return self.n_push

    def steps_to_push(self, replica: Replica) -> int:
        return 1 if replica.clock < self.warm_start else super().steps_to_push(replica)

    @property
    def pull_period(self) -> int:
        return self.n_fetch

    @property
    def has_barrier(self) -> bool:
        return False  # except in the warm start

    def group_side(self, replica: Replica) -> GroupSide:
        return self._gradients(replica) if self.send == "gradients" else self._updates(replica)

    def _gradients(self, replica: Replica) -> GroupSide:
        total, memory = Total(), replica.memory
        if "total" in memory:
            total.load_state(memory["total"])
        while True:
            gradient = yield NextGradient()
            if "total" not in memory:  # weights were replaced, and the memory with them
                total.clear()
            memory["steps"] = step = memory.get("steps", 0) + 1
            total.add(gradient.tensors)
            lockstep = replica.clock < self.warm_start
            fetch = lockstep or step % self.n_fetch == 0
            if lockstep or step % self.n_push == 0:
                pulled = yield Exchange(total.take(), replica.clock, gradient.hyperparameters, pull=fetch)
                if pulled.refused and not fetch:  # it has descended along what is not finite
                    fetch, pulled = True, (yield Fetch())
                if fetch:
                    replica.load(pulled)
            elif fetch:
                replica.load((yield Fetch()))
            if not fetch:
                replica.descend(gradient.tensors)
            memory["total"] = total.state()

    def _updates(self, replica: Replica) -> GroupSide:
        memory = replica.memory
        while True:
            gradient = yield NextGradient()
            memory["steps"] = step = memory.get("steps", 0) + 1
            before = replica.remember("fetched")
            yield Step(gradient)
            if replica.clock < self.warm_start or step % self.n_push == 0:
                pulled = yield Exchange(replica.change(since=before), replica.clock)
                replica.continue_from(pulled)
                del memory["fetched"]
