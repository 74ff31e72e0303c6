"""Ranks with different models hear of it at once, all with the same words; a mere order becomes that of the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from patience import SLOWER
from torch import nn
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_omni.errors import ConfigurationError, UnsupportedError
from lightning_omni.runtime.model.tensor_sync import Largest, check_all_shared, check_model


class Ranks:
    """So many ranks, a thread each, and their one collective."""

    def __init__(self, count: int) -> None:
        self.calls = 0
        self._count, self._uploads = count, dict[int, list[int]]()
        self._all_here, self._all_read = Barrier(count, timeout=SLOWER * 20), Barrier(count, timeout=SLOWER * 20)

    def run(self, of: Callable[[int, Largest], Any]) -> list[Any]:
        """What each rank returns, or the text of its error."""

        def program(rank: int) -> Any:
            try:
                return of(rank, lambda numbers: self._largest(rank, numbers))
            except ConfigurationError as error:
                return str(error)

        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(program, range(self._count)))

    def _largest(self, rank: int, numbers: Sequence[int]) -> list[int]:
        self._uploads[rank] = list(numbers)
        self.calls += rank == 0
        self._all_here.wait()
        largest = [max(column) for column in zip(*self._uploads.values(), strict=True)]
        self._all_read.wait()
        return largest


def compare(of: Callable[[int], Module], count: int = 3) -> list[Any]:
    """The names of the tensors of each rank's module if all are alike, or why they are not."""

    def program(rank: int, largest: Largest) -> list[str]:
        module = of(rank)
        check_model(module, rank, largest)
        return names_in(module)

    return Ranks(count).run(program)


def names_in(module: Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


class Net(nn.Module):
    """A body, a buffer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4))
        self.register_buffer("table", torch.zeros(2, 3))
        self.head = nn.Linear(4, 4, bias=False)


def changed(change: Callable[[Net], Any], on: int = 1) -> Callable[[int], Module]:
    def of(rank: int) -> Module:
        net = Net()
        if rank == on:
            change(net)
        return net

    return of


DIFFERENT: dict[str, tuple[Callable[[int], Module], str]] = {
    "a layer more on rank 0": (
        changed(lambda net: net.add_module("more", nn.Linear(4, 1)), on=0),
        "rank 1 has no parameter more.weight, which rank 0 has (differences in all: 2)",
    ),
    "a buffer more on rank 2": (
        changed(lambda net: net.register_buffer("mask", torch.ones(2)), on=2),
        "rank 2 has a buffer mask, which rank 0 has not",
    ),
    "a frozen weight": (
        changed(lambda net: net.head.requires_grad_(False)),
        "the parameter head.weight is float32 of shape [4, 4], frozen on rank 1, and"
        " float32 of shape [4, 4], trained on rank 0",
    ),
    "another shape": (
        changed(lambda net: setattr(net, "table", torch.zeros(3, 2))),
        "the buffer table is float32 of shape [3, 2] on rank 1, and float32 of shape [2, 3] on rank 0",
    ),
    "an expanded buffer": (
        changed(lambda net: net.register_buffer("table", torch.zeros(1, 3).expand(2, 3))),
        "the buffer table is float32 of shape [2, 3], expanded along dimensions [0] on rank 1",
    ),
    "another dtype": (
        changed(lambda net: net.register_buffer("table", torch.zeros(2, 3).half())),
        "float16",
    ),
    "strides of a trained weight": (
        changed(lambda net: setattr(net.head, "weight", Parameter(torch.zeros(4, 4).T))),
        "strides [1, 4], trained on rank 1",
    ),
    "a tied weight": (
        changed(lambda net: setattr(net.head, "weight", net.body[0].weight)),
        "the parameter head.weight is tied to parameter body.0.weight on rank 1",
    ),
    "a lazy layer": (
        changed(lambda net: setattr(net, "head", nn.LazyLinear(4, bias=False))),
        "of no shape yet on rank 1",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_between_models_is_raised_on_all_ranks_by_name(name: str) -> None:
    of, words = DIFFERENT[name]
    one, *others = compare(of)
    assert words in one
    assert one.endswith("; all ranks train one model: build it alike on each of them")
    assert others == [one, one]


def test_strides_of_what_is_not_trained_may_differ_for_its_values_are_sent() -> None:
    found = compare(changed(lambda net: net.register_buffer("table", torch.zeros(3, 2).T)))
    assert isinstance(found[0], list)
    assert found[0] == found[1] == found[2]


class Unordered(nn.Module):
    """Registers submodules, weights and buffers in the order of each rank, as that of a set of strings is."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        keys = [*"abcd"][rank:] + [*"abcd"][:rank]
        layers = {key: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.BatchNorm1d(2)) for key in keys}
        self.layers = nn.ModuleDict({"none": nn.Tanh(), **layers})
        for key in keys:
            self.register_parameter(f"weight_{key}", Parameter(torch.zeros(2)))
            self.register_buffer(f"table_{key}", torch.zeros(2))


def test_ranks_that_register_the_same_in_another_order_are_refused() -> None:
    said = compare(Unordered, 2)
    assert said[0] == said[1]
    assert "rank 1 has parameter weight_b where rank 0 has parameter weight_a, in different orders" in said[0]


def test_tensors_that_ddp_ignores_may_differ_in_one_group_and_are_refused_in_several() -> None:
    def of(rank: int) -> Module:
        net = changed(lambda net: setattr(net, "head", nn.Linear(4, 2, bias=False)))(rank)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["table", "head.weight"])
        return net

    assert compare(of) == [names_in(Net())] * 3
    with pytest.raises(UnsupportedError, match=r"is to ignore head.weight.*use groups=1"):
        check_all_shared(of(0))
    frozen = of(0)
    assert isinstance(frozen, Net)
    frozen.head.requires_grad_(False)
    check_all_shared(frozen)


def test_a_thousand_tensors_that_are_alike_take_one_collective_of_three_numbers_and_little_time() -> None:
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(500)))
    ranks = Ranks(1)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        ranks.run(lambda rank, largest: check_model(module, rank, largest))
        seconds.append(time.perf_counter() - began)
    assert ranks.calls == 5
    assert min(seconds) < 0.1
