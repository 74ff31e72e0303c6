"""Tells which weights somebody wrote, a callback or a hook, since they were loaded."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

_LARGE = 1 << 16
"""Numbers in a weight from which on comparing all of it takes longer than a step should."""
_FEW = 1 << 12
"""Numbers of a frozen weight by which a step tells that it was written."""


class Writes:
    """What the weights were when they were loaded. Parameters are named by their place, which never changes.

    Trained weights are compared with what was loaded. Frozen ones are not loaded with each exchange, so that a few of
    their numbers are looked at; one that was written belongs to the group that wrote it: a target network's, say.
    """

    def __init__(self) -> None:
        self._loaded: list[Tensor] = []
        self._versions: list[int] = []
        self._marks: list[int] = []
        self._frozen: set[str] = set()
        self._looks = 0

    def forget(self) -> None:
        """Nothing was loaded yet."""
        self._loaded = []

    def remember(self, parameters: Iterable[Parameter], loaded: Sequence[Tensor]) -> None:
        """These were loaded, and are what the parameters hold; tensors are kept, not copied."""
        parameters = list(parameters)
        self._loaded, self._versions = list(loaded), [parameter._version for parameter in parameters]
        self._marks = [0 if parameter.requires_grad else fingerprint(parameter, _FEW) for parameter in parameters]

    def of_trained(self, parameters: Mapping[str, Parameter], in_passing: bool = False) -> list[str]:
        """Names of trained weights that were written.

        Args:
            parameters: all of them, in order.
            in_passing: of each large weight that torch says is unwritten, looks at an eighth, at another each time.
                (What goes through ``.data`` torch does not count.)
        """
        self._looks += in_passing
        return [
            name
            for place, (name, parameter) in enumerate(parameters.items())
            if parameter.requires_grad and self._is_written(place, parameter, in_passing)
        ]

    def of_frozen(self, parameters: Mapping[str, Parameter]) -> set[str]:
        """Names of frozen weights that were written while they were frozen."""
        for place, (name, parameter) in enumerate(parameters.items()):
            if parameter.requires_grad:
                self._frozen.discard(name)
            elif place < len(self._loaded) and (
                fingerprint(parameter, _FEW) != self._marks[place]
                if self._marks[place]
                else parameter._version != self._versions[place]  # it was trained when it was loaded
            ):
                self._frozen.add(name)
        return self._frozen

    def _is_written(self, place: int, parameter: Parameter, in_passing: bool) -> bool:
        if place >= len(self._loaded):
            return False
        here, known = parameter.detach().flatten(), self._loaded[place].flatten()
        if in_passing and parameter._version == self._versions[place] and len(known) > _LARGE:
            eighth = self._looks % 8
            part = slice(eighth * len(known) // 8, (eighth + 1) * len(known) // 8)
            here, known = here[part], known[part]
        return not _is_same(here, known)


def fingerprint(tensor: Tensor, most: int) -> int:
    """Tells, of about ``most`` numbers spread over it, whether a tensor was written."""
    flat = tensor.detach().flatten()
    some = flat[:: max(1, flat.numel() // most)].cpu().contiguous()
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _is_same(weight: Tensor, known: Tensor) -> bool:
    here = weight.to(known.device)
    return torch.equal(here, known) or torch.allclose(here, known, rtol=0.0, atol=0.0, equal_nan=True)
