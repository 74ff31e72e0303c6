"""What is kept of one golden case: bits, order and a few numbers.

Bits hold where the same code computes them (see `here`, which is kept beside them) and nowhere else for sure: matrix
libraries and vectorised functions may differ in the last place. The order of events, staleness and counts hold
everywhere, and the numbers do to 1e-5.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg  # noqa: F401  # its matrix library is one of `kernels`, whichever other tests this process has run
import torch
from threadpoolctl import threadpool_info
from torch import Tensor

from golden.names import nameless, nameless_event

DIGITS = 12
"""Hexadecimal digits that are kept of a SHA-256."""
TOLERANCE = 1e-5
"""Relative difference that a kept number may have on another machine."""
_VECTORS = re.compile(r"sse|ssse|avx|fma|f16c|xop|amx|asimd|sve")


@dataclass(frozen=True)
class Outcome:
    """What one case came to.

    Attributes:
        order: digest of all that is counted: who, when in the order, staleness, samples.
        numbers: a few sums over weights and times.
        bits: digests of everything, part by part.
    """

    order: str
    numbers: tuple[float, ...]
    bits: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As it stands in the file."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Outcome:
        """From the file."""
        return cls(plain["order"], tuple(plain["numbers"]), dict(plain["bits"]))

    def resembles(self, other: Outcome) -> bool:
        """Whether order and numbers are the same, as they must be on every machine."""
        alike = np.allclose(self.numbers, other.numbers, rtol=TOLERANCE, atol=1e-9, equal_nan=True)
        return self.order == other.order and len(self.numbers) == len(other.numbers) and bool(alike)


def here() -> dict[str, Any]:
    """Return what decides the bits: versions, processor, and the code that libraries have chosen for it.

    ATen's AVX2 and AVX512 give the same bits in all cases (compare runs with ``ATEN_CPU_CAPABILITY=avx2`` and without);
    below, products are rounded before they are added, and most cases differ in their last bits. NumPy and the library
    that multiplies matrices for torch choose by the processor's maker and its vector instructions. OpenBLAS, which
    NumPy and SciPy bring, names the kernel that it has chosen, and the environment may ask it for another one.
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__.partition("+")[0],
        "numpy": np.__version__,
        "machine": platform.machine(),
        "processor": processor(),
        "vectors": " ".join(vectors()),
        "instructions": "AVX2 or AVX512" if instructions in ("AVX2", "AVX512") else instructions,
        "blas": kernels(),
    }


def apart(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return in what the place where bits were recorded differs from this one; empty if bits are the same."""
    names = [name for name in {**recorded, **found} if recorded.get(name) != found.get(name)]
    return "; ".join(f"{name}: {recorded.get(name)}, and here {found.get(name)}" for name in names)


def processor() -> str:
    """Return the processor's name, where the system tells."""
    return _cpuinfo().get("model name", platform.processor())


def vectors() -> list[str]:
    """Return the processor's instruction sets for vectors, where the system tells."""
    told = _cpuinfo()
    return [flag for flag in sorted(told.get("flags", told.get("Features", "")).split()) if _VECTORS.match(flag)]


def kernels() -> list[str]:
    """Return the matrix libraries of NumPy and SciPy, each with its version and the kernel that it uses here."""
    found = (each for each in threadpool_info() if each["user_api"] == "blas")
    return sorted(
        {" ".join(str(each.get(key)) for key in ("internal_api", "version", "architecture")) for each in found}
    )


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's entries in the system's table."""
    told = Path("/proc/cpuinfo")
    text = told.read_text().partition("\n\n")[0] if told.exists() else ""
    return dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))


def digest(parts: Iterable[Any]) -> str:
    """Return the digest of arrays, tensors, bytes and plain values, in order, whatever things are called.

    No two lists of parts have the same bytes.
    """
    whole = hashlib.sha256()
    for part in parts:
        kind, data = _bytes_of(part)
        whole.update(f"{kind}:{len(data)};".encode())
        whole.update(data)
    return whole.hexdigest()[:DIGITS]


def _bytes_of(part: Any) -> tuple[str, bytes]:
    if isinstance(part, Tensor):
        part = part.detach().numpy()
    if isinstance(part, np.ndarray):
        return f"{part.dtype}{part.shape}", part.tobytes()
    if isinstance(part, bytes):
        return "bytes", part
    return "plain", json.dumps(nameless(part)).encode()


def named(columns: Mapping[str, Any]) -> list[Any]:
    """Return names of the user's, of parameters, say, and their values, for `digest`."""
    return [item for name in sorted(columns) for item in (name, columns[name])]


def size_of(weight: Any) -> float:
    """The sum of magnitudes, to nine digits."""
    return float(f"{np.abs(np.asarray(weight, dtype=np.float64)).sum():.9g}")


def order_of(events: Iterable[Any]) -> list[Any]:
    """Return the part of recorded events that is the same on every machine."""
    return [nameless_event(event) for event in events]
