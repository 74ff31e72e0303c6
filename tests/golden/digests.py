"""What is kept of one golden case: bits, order and a few numbers.

Bits hold where they were recorded (torch, machine and processor are kept beside them) and nowhere else for sure:
matrix libraries and vectorised functions may differ in the last place. The order of events, staleness and counts hold
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

import msgspec
import numpy as np
import torch
from torch import Tensor

DIGITS = 12
"""Hexadecimal digits that are kept of a SHA-256."""
TOLERANCE = 1e-5
"""Relative difference that a kept number may have on another machine."""
EVENT_ORDER = (
    *("kind", "group", "optimizer", "read_at", "clock", "refused", "epoch", "spans", "groups", "parameters"),
    "present",
)


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


def here() -> dict[str, str]:
    """Where bits are the same: torch without its build, machine, processor, and the instruction set that torch uses.

    AVX2 and AVX512 give the same bits in all cases (compare runs with ``ATEN_CPU_CAPABILITY=avx2`` and without); below,
    products are rounded before they are added, and most cases differ in their last bits. The libraries that multiply
    matrices choose their code by the processor, however torch is built, and a few cases differ from one to another.
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__.partition("+")[0],
        "machine": platform.machine(),
        "processor": processor(),
        "instructions": "AVX2 or AVX512" if instructions in ("AVX2", "AVX512") else instructions,
    }


def processor() -> str:
    """The processor's name and a digest of what it can do, where the system tells."""
    told = Path("/proc/cpuinfo")
    if not told.exists():
        return platform.processor()
    first = dict(re.findall(r"^(model name|flags)\s*: (.*)$", told.read_text().partition("\n\n")[0], re.MULTILINE))
    flags = " ".join(sorted(first.get("flags", "").split()))
    return f"{first.get('model name', platform.processor())} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def digest(parts: Iterable[Any]) -> str:
    """Digest of arrays, tensors, bytes and plain values, in order; no two lists of parts are written alike."""
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
    return "plain", json.dumps(msgspec.to_builtins(part), sort_keys=True).encode()


def named(columns: Mapping[str, Any]) -> list[Any]:
    """Names and values, for `digest`."""
    return [item for name in sorted(columns) for item in (name, columns[name])]


def size_of(weight: Any) -> float:
    """The sum of magnitudes, to nine digits."""
    return float(f"{np.abs(np.asarray(weight, dtype=np.float64)).sum():.9g}")


def order_of(events: Iterable[Any]) -> list[Any]:
    """What of recorded events is the same on every machine."""
    return [{name: getattr(event, name) for name in EVENT_ORDER} for event in events]
