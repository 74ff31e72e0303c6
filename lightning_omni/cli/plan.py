"""The options of ``lightning-omni plan`` about exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from lightning_omni.checks import check_whole
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import method_named, text_of
from lightning_omni.tuning.search import Search, Space
from lightning_omni.tuning.search.space import compression_named
from lightning_omni.wire.all_reduce import EXACT, all_reduce_of

_Read = TypeVar("_Read")


def exchanges_of(
    search: Search, method: str | None, wire: str | None, period: int | None, all_reduce: str | None = None
) -> Space:
    if period is not None:
        _as_option(
            "period", lambda: check_whole("period", period, "local steps between two exchanges, 1 or more", low=1)
        )
    space, start = search.spec.space, search.spec.start
    methods = space.method or tuple(filter(None, [start.method]))  # "" is unknown here
    wires = space.compression or tuple(filter(None, [start.wire]))
    if method is not None:
        value = _as_option("method", lambda: method_named(method))
        methods = (text_of(value, without=("period",)),)
        if period is None and "period=" in method:
            period = getattr(value, "period", None)
    if wire is not None:
        wires = (wire,)
        _check_wire(wire, methods if method is not None else ())
    all_reduces = space.all_reduce
    if all_reduce is not None:
        is_exact = _as_option("all-reduce", lambda: all_reduce_of(all_reduce)) == EXACT
        all_reduces = () if is_exact else (all_reduce,)
    return Space(
        groups=(1,),
        method=methods,
        compression=wires,
        period=() if period is None else (period,),
        all_reduce=all_reduces,
    )


def _check_wire(wire: str, methods: Sequence[str]) -> None:
    formats = _as_option("compression", lambda: compression_named(wire).features)
    for method in methods:
        _as_option("compression", partial(refuse_pairs, method_named(method), formats))


def _as_option(option: str, read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except ConfigurationError as error:
        _, equals, rest = str(error).partition("=")
        raise ConfigurationError(f"--{option}{equals}{rest}") from error
