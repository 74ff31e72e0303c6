"""The cost of merging a submodule: its bytes are observed in the first batches, and its passes are timed separately."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_omni.methods.model.modules import tensors_of, with_tensors
from lightning_omni.runtime.exchange.serve_time import one_thread
from lightning_omni.tuning.model.measured import HeadMeasured
from lightning_omni.tuning.search import constants as c


class ObservedHead:
    """A submodule that may be merged, observed while it is used.

    Args:
        module: the submodule.
        batch: samples of this rank in a step.
    """

    def __init__(self, module: nn.Module, batch: int) -> None:
        self._module, self._batch = module, batch
        self._inputs: Any = None
        self._count = 0
        self._outputs = 0
        self._hook = module.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Count a call with gradients; of the first, keep the inputs' shapes, as CPU tensors, and outputs' bytes."""
        if not torch.is_grad_enabled():
            return
        self._count += 1
        if self._count == 1:
            tree = (args, kwargs)
            self._inputs = with_tensors(tree, [_alike(tensor) for tensor in tensors_of(tree)])
            self._outputs = _nbytes(tensors_of(output))

    def close(self) -> None:
        """Stop observing."""
        self._hook.remove()

    def measured(self, steps: int, is_flat: bool = False) -> HeadMeasured | None:
        """Return the cost of merging; None unless each step has called the submodule once, with this rank's batch.

        Args:
            steps: number of steps since the beginning.
            is_flat: whether each sample has to be one row of numbers: more, such as tokens or pixels, take long.
        """
        rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_of(self._inputs)} if self._count else set()
        if self._count != steps or rows != {self._batch}:
            return None
        if is_flat and any(tensor.ndim > 2 for tensor in tensors_of(self._inputs)):
            return None
        trained = [each for each in self._module.parameters() if each.requires_grad]
        return HeadMeasured(
            nbytes=4 * sum(each.numel() for each in trained),
            inputs=_nbytes(tensors_of(self._inputs)) / self._batch,
            outputs=self._outputs / self._batch,
            seconds=self._seconds() / self._batch,
        )

    def _seconds(self) -> float:
        """Return the seconds of a batch's passes and a step of a copy, on one CPU thread, as at a server."""
        twin = copy.deepcopy(self._module).cpu()
        parameters = [each for each in twin.parameters() if each.requires_grad]
        found = []
        with one_thread(), torch.random.fork_rng(devices=[]):
            for _ in range(c.TIMED_PASSES):
                began = time.perf_counter()
                self._pass(twin, parameters)
                found.append(time.perf_counter() - began)
        return min(found)

    def _pass(self, twin: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        given = [
            tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            for tensor in tensors_of(self._inputs)
        ]
        args, kwargs = with_tensors(self._inputs, given)
        ends = [each for each in tensors_of(twin(*args, **kwargs)) if each.requires_grad]
        wanted = [*(each for each in given if each.requires_grad), *parameters]
        if not ends or not wanted:
            return
        found = torch.autograd.grad(ends, wanted, [torch.zeros_like(each) for each in ends], allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, found[len(wanted) - len(parameters) :], strict=True):
                if gradient is not None:
                    parameter.add_(gradient)


def _alike(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape, with numbers that are valid for all layers."""
    return (torch.ones_like if tensor.is_floating_point() else torch.zeros_like)(tensor, device="cpu")


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors as float32, the reference of wire formats."""
    return sum(4 * each.numel() if each.is_floating_point() else each.nbytes for each in tensors)
