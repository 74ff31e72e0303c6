"""What OmniTuner sets where groups join a run: their number decides, and the weights move as they would with one."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_omni.errors import UnsupportedError
from lightning_omni.methods import METHODS, AsyncSGD, Method, method_named
from lightning_omni.tuning.callback.hyperparameters import follow_groups
from lightning_omni.tuning.callback.tuned_fit import check_joined, may_form_groups
from lightning_omni.tuning.callback.tuned_run import TunerOptions
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import Space

FREE = Space(groups=(1,), momentum=(0.0, 0.999))
OPTIONS = TunerOptions(
    target=None,
    monitor="val_loss",
    is_lower_better=True,
    budget=0.1,
    space={},
    further=(),
    retune_every=1,
    seed=0,
)
MOMENTA = st.floats(0.0, 0.99)
RATES = st.floats(1e-4, 10.0)
COUNTS = st.integers(1, 64)


@given(MOMENTA, RATES, COUNTS)
def test_groups_move_the_weights_as_far_in_a_second_as_one_and_with_no_more_momentum(
    momentum: float, lr: float, groups: int
) -> None:
    """The way of an update is lr / (1 - m), and g groups make g of them in the time that one takes for one."""
    own = Setting(groups=1, momentum=momentum, lr=lr)
    setting = follow_groups(own, groups, AsyncSGD(), Scaling(), FREE)
    assert groups * setting.lr / (1 - setting.momentum) == pytest.approx(lr / (1 - momentum), rel=1e-6)
    total = 1 - (1 - setting.momentum) / groups
    assert total == pytest.approx(max(momentum, 1 - 1 / groups), abs=1e-6)
    assert setting.lr <= lr * (1 + 1e-9)
    assert setting.groups == groups


@given(MOMENTA, RATES, COUNTS)
def test_rates_of_adaptive_optimizers_fall_with_the_root_of_the_groups(momentum: float, lr: float, groups: int) -> None:
    own = Setting(groups=1, momentum=momentum, lr=lr)
    setting = follow_groups(own, groups, AsyncSGD(), Scaling(is_adaptive=True), FREE)
    assert setting.lr == pytest.approx(lr / math.sqrt(groups))
    assert setting.momentum == follow_groups(own, groups, AsyncSGD(), Scaling(), FREE).momentum


@given(st.lists(COUNTS, min_size=1, max_size=6), MOMENTA, RATES)
def test_what_is_set_depends_on_how_many_groups_there_are_and_not_on_how_many_there_were(
    counts: list[int], momentum: float, lr: float
) -> None:
    own = setting = Setting(groups=1, momentum=momentum, lr=lr)
    for groups in [*counts, 1]:
        setting = replace(follow_groups(own, groups, AsyncSGD(), Scaling(), FREE), groups=groups)
    assert setting.momentum == pytest.approx(own.momentum, abs=1e-9)
    assert setting.lr == pytest.approx(own.lr)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_that_average_what_groups_do_or_wait_for_all_keep_the_users_own(name: str) -> None:
    own = Setting(groups=1, momentum=0.9, lr=0.1)
    method: Method = method_named(name)
    setting = follow_groups(own, 8, method, Scaling(), FREE)
    is_stepped_by_each = method.updates_per_batch(8) > 1
    assert (setting != replace(own, groups=8)) == is_stepped_by_each


def test_one_softsync_update_of_all_groups_is_one_update() -> None:
    own = Setting(groups=1, momentum=0.9, lr=0.1)
    one, two = (follow_groups(own, 8, method_named(f"softsync:n={n}"), Scaling(), FREE) for n in (1, 2))
    assert (one.momentum, one.lr) == (0.9, 0.1)
    assert two.momentum == pytest.approx(0.8)


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 20])
def test_a_server_that_divides_the_rate_by_the_staleness_is_given_what_it_divides(groups: int) -> None:
    own = Setting(groups=1, momentum=0.6, lr=0.1)
    plain = follow_groups(own, groups, AsyncSGD(), Scaling(), FREE)
    aware = follow_groups(own, groups, AsyncSGD(staleness_aware=True), Scaling(), FREE)
    assert aware.momentum == plain.momentum
    assert aware.lr / max(1, groups - 1) == pytest.approx(plain.lr)


def test_bounds_of_the_user_hold_and_the_rate_makes_up_for_a_momentum_that_stays() -> None:
    own = Setting(groups=1, momentum=0.9, lr=0.1)
    fixed = follow_groups(own, 4, AsyncSGD(), Scaling(), replace(FREE, momentum=(0.9, 0.9)))
    assert fixed.momentum == 0.9
    assert fixed.lr == pytest.approx(0.025)
    bounded = follow_groups(own, 40, AsyncSGD(), Scaling(), replace(FREE, lr=(0.05, 0.1)))
    assert bounded.lr == 0.05


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"space": {"groups": [1, 2]}}, "space={'groups': ...} with elastic=True"),
        ({"space": {"method": "diloco"}}, "pass some of 'momentum', 'lr', 'rebalance'"),
    ],
)
def test_what_a_group_that_joins_cannot_choose_is_refused_by_name(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_joined(replace(OPTIONS, **changed))
    assert says in str(caught.value)
    check_joined(replace(OPTIONS, space={"momentum": [0.0, 0.9], "lr": 0.1, "rebalance": False}))


@pytest.mark.parametrize(("groups", "may"), [(np.arange(1, 5), True), (np.array([1]), False), (1, False), ([1], False)])
def test_numbers_of_groups_may_be_an_array(groups: Any, may: bool) -> None:
    two: Any = SimpleNamespace(world_size=2)
    assert may_form_groups(replace(OPTIONS, space={"groups": groups}), two) is may
