"""Hardsync and n-softsync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_omni.checks import check_choice, check_whole, counted
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods.barrier import Barrier
from lightning_omni.methods.contract import Method, Push, Reply, ServerSide, Total
from lightning_omni.methods.model.replica import Hyperparameters

# --- hardsync ---------------------------------------------------------------------------------------------------------


class _MeanGradient(Barrier):
    def merge(self, total: Total, last: Push) -> None:
        self.master.update(total.scaled(1 / total.count), last.hyperparameters)


class HardSync(Method, frozen=True, kw_only=True, tag="hardsync"):
    r"""Synchronous SGD across groups, through the parameter server.

    .. math:: w_{t+1} = \mathrm{step}\Bigl(w_t,\; \tfrac1\lambda \sum_{l=1}^{\lambda} g_l(w_t)\Bigr)

    for :math:`\lambda` groups. Staleness is 0, unless a group has paused while others trained. With equal groups, the
    result is that of one group with their whole batch.

    Example:
        >>> HardSync()
        HardSync()

    References:
        Gupta, Zhang, Wang 2016, "Model Accuracy and Runtime Tradeoff in Distributed Deep Learning" (Rudra),
        arXiv:1509.04210.
    """

    side = _MeanGradient
    sums_gradients = True

    def updates_per_batch(self, groups: int) -> int:
        return 1


# --- n-softsync -------------------------------------------------------------------------------------------------------


class _EveryC(ServerSide):
    method: SoftSync

    def setup(self) -> None:
        self._total = Total()
        self._staleness = 0
        self._hyperparameters: Any = ()

    @property
    def c(self) -> int:
        return max(1, len(self.groups) // self.method.n)

    def receive(self, push: Push) -> list[Reply]:
        staleness = self.staleness_of(push)
        self._total.add(push.tensors, 1 / max(1, staleness) if self.method.modulation == "each" else 1.0)
        self._staleness += staleness
        self._hyperparameters = push.hyperparameters
        if self._total.count >= self.c:
            self._update()
        return [Reply(push.group, staleness)]

    def released(self) -> list[Reply]:
        enough = 1 if self.groups <= self.idle_groups else self.c
        if self._total.count >= enough:
            self._update()
        return []

    def _update(self) -> None:
        total, mean_staleness = self._total, self._staleness / self._total.count
        scale = {"none": 1.0, "average": 1 / max(1.0, mean_staleness), "each": total.weight / total.count}
        self.master.update(total.scaled(1 / total.weight), self._hyperparameters, scale[self.method.modulation])
        total.clear()
        self._staleness = 0

    def grow(self, start: int) -> None:
        self._total.reach(len(self.master.parameters))

    def rearranged(self, hyperparameters: Hyperparameters) -> None:
        self._hyperparameters = hyperparameters

    def state(self) -> dict[str, Any]:
        return {
            "total": self._total.state(),
            "staleness": self._staleness,
            "hyperparameters": [dict(group) for group in self._hyperparameters],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._total.load_state(state["total"])
        self._staleness = int(state["staleness"])
        self._hyperparameters = state["hyperparameters"]


class SoftSync(Method, frozen=True, kw_only=True, tag="softsync"):
    r"""n-softsync: one update for every :math:`c = \lfloor\lambda/n\rfloor` gradients of :math:`\lambda` groups.

    .. math:: w_{t+1} = \mathrm{step}\Bigl(w_t,\; \tfrac1c \sum_{k=1}^{c} g_k(w_{t-\tau_k})\Bigr), \qquad
        \alpha_k = \begin{cases} \alpha & \text{modulation "none"} \\
            \alpha / \max(1, \tfrac1c \sum_k \tau_k) & \text{"average"} \\
            \alpha / \max(1, \tau_k) & \text{"each"} \end{cases}

    A fast group may appear twice in a sum, and no group waits. The mean staleness is :math:`(\lambda-1)/c` at any
    speeds; n = :math:`\lambda` is asynchronous SGD. With "each", the sum is weighted by :math:`1/\max(1,\tau_k)` and
    the learning rate multiplied by the mean weight, which for plain SGD is the paper's :math:`\tfrac1c\sum\alpha_k
    g_k`, and for adaptive optimizers makes the step smaller, too.

    Args:
        n: number of parts that the groups are split into, 1 to the number of groups.
        modulation: how staleness scales the learning rate.

    When all groups are idle (before a validation, for example), even fewer than c gradients are applied, so that no
    sample is lost.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> SoftSync(n=2)
        SoftSync(n=2, modulation='each')

    References:
        Gupta, Zhang, Wang 2016 (Rudra), arXiv:1509.04210 (n-softsync, "average");
        Zhang et al. 2016, "Staleness-aware Async-SGD", arXiv:1511.05950 ("each").
    """

    side = _EveryC
    sums_gradients = True
    n: int = 1
    modulation: Literal["none", "average", "each"] = "each"

    def __post_init__(self) -> None:
        check_whole("n", self.n, "1 or more: softsync splits the groups into n parts", 1)
        check_choice("modulation", self.modulation, ("none", "average", "each"))

    def check(self, groups: int) -> None:
        if self.n > groups:
            raise ConfigurationError(
                f"n={self.n}, but there {'is' if groups == 1 else 'are'} only {counted(groups, 'group')}: an update"
                " needs floor(groups / n) >= 1 gradients;"
                f" pass n{'=' if groups == 1 else '<='}{groups} or more groups"
            )

    def updates_per_batch(self, groups: int) -> int:
        return groups // max(1, groups // self.n)
