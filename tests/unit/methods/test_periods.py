"""A method whose period is longer than the run is told before the first batch, with the argument and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import run
from test_cluster_methods import NAMES, POINTS
from torch.nn import Parameter

from lightning_omni.methods import (
    REGISTRY,
    Exchange,
    Gradient,
    Inbox,
    NextGradient,
    Pulled,
    Replica,
)
from lightning_omni.methods.contract import Fetch, Publish, ReadInbox, ReadPeer, Receive, Send, SendPeer, StepTime

LATE = "with method="
FITS: dict[str, dict[str, Any]] = {
    "16 steps": {"strategy": {"groups": 2, "method": "diloco"}},
    "8 steps of two batches": {
        "strategy": {"groups": 2, "method": "local_sgd:period=9"},
        "trainer": {"accumulate_grad_batches": 2},
    },
    "5 of 48 steps": {
        "strategy": {"groups": 2, "method": "async_diloco:period=6"},
        "trainer": {"max_epochs": 3, "max_steps": 5},
    },
    "static, 20 steps": {
        "strategy": {"groups": 2, "method": "diloco:period=24,fragments=4,delay=2", "data": "static"},
        "trainer": {"limit_train_batches": 10, "max_epochs": 2},
    },
    "saved": {
        "strategy": {"groups": 2, "method": "diloco:period=40"},
        "trainer": {"max_epochs": 1},
        "checkpoint": {"every_n_epochs": 1},
    },
    "13 more": {
        "strategy": {"groups": 2, "method": "diloco:period=40"},
        "trainer": {"max_epochs": 2, "max_steps": 29},
        "resume": "checkpoints/*.ckpt",
    },
    "enough": {"strategy": {"groups": 2, "method": "diloco:period=32"}, "trainer": {"max_epochs": 2}},
    "of unknown length": {"strategy": {"groups": 2, "method": "diloco"}, "loader": "of unknown length"},
    "one group": {"strategy": {"groups": 1, "method": "diloco"}},
}


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What fits of two ranks have warned of, in their order."""
    fits = [{"devices": 2, "data": {"samples": 256}, **fit} for fit in FITS.values()]
    output = run("groups.py", {"fits": fits}, spares=1).output
    return [line.partition("OmniStrategy: ")[2] for line in output.splitlines() if LATE in line]


def test_a_run_that_is_shorter_than_a_period_is_told_so_before_its_first_batch(said: list[str]) -> None:
    assert len(said) == 6, "\n".join(said)
    diloco, local, asynchronous, fragments, saved, resumed = said
    assert diloco.startswith(
        "each group makes about 16 steps in this fit, and with method='diloco' it exchanges nothing"
    )
    assert "after 500 steps. The model would end with the weights that this fit begins with" in diloco
    assert 'Pass a shorter period, method="diloco:period=4" say, or train for longer' in diloco
    assert "about 8 steps in this fit, and with method='local_sgd:period=9'" in local
    assert "Each group would train a model of its own" in local
    assert "about 5 steps in this fit, and with method='async_diloco:period=6'" in asynchronous
    assert "about 20 steps in this fit" in fragments
    assert "it exchanges 3 of 4 fragments in them: all of its weights have been exchanged after 24 steps." in fragments
    assert 'method="diloco:period=4,fragments=4"' in fragments
    assert "about 16 steps in this fit, and with method='diloco:period=40'" in saved
    assert "about 13 steps in this fit, and with method='diloco:period=40'" in resumed
    assert "have been exchanged after 40 steps" in saved
    assert "have been exchanged after 40 steps" not in resumed, "the steps before the checkpoint count"


@pytest.mark.parametrize("point", POINTS, ids=NAMES)
def test_a_method_says_how_many_steps_a_group_makes_until_it_pushes(point: dict[str, Any]) -> None:
    method = REGISTRY.from_wire(point)
    parameters = [Parameter(torch.ones(4)), Parameter(torch.ones(3))]
    replica = Replica(parameters, torch.optim.SGD(parameters, lr=0.1), 0)
    side, sent = method.group_side(replica), Exchange((), 0)
    answer: Any = None
    expected = made = pushes = 0
    while pushes < 7:
        match need := side.send(answer):
            case NextGradient():
                left = method.steps_to_push(replica)
                expected = expected if made else left
                assert left == expected - made > 0
                made += 1
                answer = Gradient([torch.ones(4), torch.ones(3)], ({"lr": 0.1},))
            case Exchange() | Send() | Publish() | SendPeer() | ReadPeer():
                if made:
                    assert made == expected
                    pushes, made = pushes + 1, 0
                sent = need.exchange if isinstance(need, Send) else need if isinstance(need, Exchange) else sent
                answer = None
                if isinstance(need, Exchange):
                    answer = pulled(replica, need)
                elif isinstance(need, Publish | SendPeer):
                    answer = need.tensors
            case Receive():
                answer = pulled(replica, sent)
            case Fetch():
                answer = Pulled([each.clone() for each in replica.weights()], replica.clock)
            case StepTime():
                answer = 0.1
            case ReadInbox():
                answer = Inbox(None, 0)
            case _:
                answer = None


def pulled(replica: Replica, exchange: Exchange) -> Pulled:
    """An answer of the shapes that were pushed."""
    tensors = [torch.zeros(3) if each is None else each.clone() for each in exchange.tensors]
    return Pulled(tensors, replica.clock + 1, fragment=exchange.fragment)
