"""Quantities as users write them, ``10Gbit`` or ``5ms``, in all commands and in YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lightning_omni.errors import ConfigurationError

Quantity = float | str
"""A number in the base unit, or a number with a unit."""

_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*"
_RATE = re.compile(_NUMBER + r"([kKmMgGtT]i?)?([bB]it|b|B)(/s|ps)?")
_TIME = re.compile(_NUMBER + r"(ns|us|µs|ms|s|min|h)")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PREFIXES |= {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_FEWEST = 1000
"""Fewest bytes, or bytes per second, that are accepted without a unit: a mere 100 is meant in megabits, say."""
_AS_RATE = "pass bytes per second, as in 1e9 or 1GB/s, or bits, as in 10Gbit"
_AS_TIME = "pass seconds, as in 0.005, or with a unit, as in 5ms, 2s, 10min"


def rate_of(name: str, given: Quantity) -> float:
    """Return bytes per second.

    Args:
        name: the option, with which errors begin.
        given: bytes per second, 1000 or more; or a number with ``bit``, ``bit/s``, ``bps``, ``B`` or ``B/s`` after an
            optional k, M, G or T (powers of 1000; Ki, Mi, Gi and Ti are those of 1024).

    Raises:
        ConfigurationError: ``given`` is none of these, or not above 0.

    Example:
        >>> rate_of("--bandwidth", "1Gbit"), rate_of("--bandwidth", "1.5 MB/s"), rate_of("--bandwidth", 2.5e8)
        (125000000.0, 1500000.0, 250000000.0)
    """
    text = str(given).strip()
    found = _RATE.fullmatch(text)
    if found and found[3] == "b" and found[4] != "ps":
        number = f"{found[1]}{found[2] or ''}"
        raise ConfigurationError(f"{name} {given}: bits or bytes? pass {number}bit or {number}B")
    if found:
        value = float(found[1]) * _PREFIXES[(found[2] or "").lower()] / (1 if found[3] == "B" else 8)
    else:
        value = _plain(text)
        if 0 < value < _FEWEST:
            raise ConfigurationError(
                f"{name} {value:g}: bytes per second? pass a unit, as in {value:g}Mbit or {value:g}B/s"
            )
    if not value > 0:
        raise ConfigurationError(f"{name} {given}: {_AS_RATE}; above 0")
    return value


def bytes_of(name: str, given: Quantity) -> int:
    """Return a number of bytes, given as such, if 1000 or more, or with ``B`` after an optional prefix as in `rate_of`.

    Example:
        >>> bytes_of("--model-size", "50MB"), bytes_of("--model-size", 4e6)
        (50000000, 4000000)
    """
    found = _RATE.fullmatch(str(given).strip())
    is_size = found is None or (found[3] == "B" and not found[4])
    value = float(found[1]) * _PREFIXES[(found[2] or "").lower()] if found and is_size else _plain(str(given))
    if found is None and 0 < value < _FEWEST:
        raise ConfigurationError(f"{name} {value:g}: bytes? pass a unit, as in {value:g}MB or {value:g}B")
    if not 1 <= value < math.inf:
        raise ConfigurationError(f"{name} {given}: pass bytes, as in 50MB or 2.5e8; above 0")
    return round(value)


def seconds_of(name: str, given: Quantity) -> float:
    """Return seconds, given as such, or as a number with ``ns``, ``us``, ``ms``, ``s``, ``min`` or ``h``.

    Example:
        >>> seconds_of("--latency", "5ms"), seconds_of("--latency", "2 min"), seconds_of("--latency", 1e-4)
        (0.005, 120.0, 0.0001)
    """
    text = str(given).strip()
    found = _TIME.fullmatch(text)
    value = float(found[1]) * _SECONDS[found[2]] if found else _plain(text)
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} {given}: {_AS_TIME}; 0 or more")
    return value


def time_of(name: str, given: Quantity) -> float:
    seconds = seconds_of(name, given)
    if not seconds:
        raise ConfigurationError(f"{name} {given}: pass a time above 0, as in 30s or 2min")
    return seconds


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_above_zero(given: Mapping[str, float | None]) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigurationError(f"{flag(name)} {value}: pass a number above 0")


def check_momentum(given: float | None) -> None:
    if given is not None and not 0 <= given < 1:
        raise ConfigurationError(f"--momentum {given}: pass a number from 0 up to 1, but not 1")


def _plain(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
