"""Values of tensors that are not contiguous travel in memory that is, and come back whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_omni.errors import UnsupportedError
from lightning_omni.runtime.model.tensor_sync import contiguous, write

NUMBERS = torch.arange(24.0).view(1, 2, 3, 4)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.zeros(1, 2, 3, 4),
    "with gaps": lambda: torch.zeros(1, 2, 3, 8)[..., ::2],
    "from an offset": lambda: torch.zeros(2, 2, 3, 4)[1:],
    "turned": lambda: torch.zeros(4, 3, 2, 1).permute(3, 2, 1, 0),
    "channels last": lambda: torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "whole numbers": lambda: torch.zeros(1, 2, 3, 8, dtype=torch.int16)[..., ::2],
    "complex": lambda: torch.zeros(4, 3, 2, 1, dtype=torch.complex64).permute(3, 2, 1, 0),
    "conjugated": lambda: torch.zeros(1, 2, 3, 4, dtype=torch.complex64).conj(),
    "expanded, of one": lambda: torch.zeros(2, 3, 4).expand(1, -1, -1, -1),
    "a weight": lambda: torch.nn.Parameter(torch.zeros(1, 2, 3, 8)[..., ::2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_collective_writes_is_in_the_tensor_whatever_its_strides(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    strides = tensor.stride()
    with contiguous(tensor, "table") as memory:
        assert memory.is_contiguous()
        assert not memory.any()
        memory.copy_(NUMBERS)
    assert torch.equal(tensor.detach(), NUMBERS.to(tensor.dtype))
    assert tensor.stride() == strides


def test_a_contiguous_tensor_is_itself_the_memory_and_one_number_or_none_is_contiguous() -> None:
    for tensor in (torch.ones(3, 2), torch.tensor(5), torch.tensor(True), torch.empty(0, 3), torch.ones(2, 0).T):
        with contiguous(tensor, "table") as memory:
            assert memory.data_ptr() == tensor.data_ptr()
            assert memory.shape == tensor.shape


def test_an_expanded_tensor_is_written_once_and_no_memory_beside_it() -> None:
    behind = torch.zeros(8)
    mask = behind[:4].expand(3, 1000, 4)
    with contiguous(mask, "mask") as memory:
        assert memory.numel() == 12_000
        memory.copy_(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    assert behind.nan_to_num(2.0, 4.0).tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("tensor", [torch.zeros(1, 4).expand(3, 4), torch.zeros(6).unfold(0, 4, 1)])
def test_values_that_places_of_one_number_cannot_have_are_refused_by_name(tensor: Tensor) -> None:
    write(tensor, torch.ones(3, 4), "body.mask")
    assert tensor.eq(1.0).all()
    with pytest.raises(UnsupportedError, match=r"places of body\.mask share memory .*\.clone\(\)"):
        write(tensor, torch.arange(12.0).view(3, 4), "body.mask")
