"""The space of settings that a search covers, and the specification of a search."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from numbers import Integral, Real
from typing import Any, ClassVar

from lightning_omni.checks import plain
from lightning_omni.combinations import refuse_pairs
from lightning_omni.errors import ConfigurationError
from lightning_omni.json_dataclasses import Serializable
from lightning_omni.methods import Method, method_named
from lightning_omni.tuning.model.setting import Scaling, Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.wire.all_reduce import all_reduce_of
from lightning_omni.wire.compression import Compression

AVERAGED = "diloco:outer_lr=1.0,outer_momentum=0"
_STREAMED = f"{AVERAGED},fragments=4,delay=1,keep_steps=true,dynamic_steps=true"
DEFAULT_METHODS = ("async_sgd", "local_sgd", "elastic_averaging", AVERAGED, _STREAMED)
DEFAULT_WIRES = ("fp32", "int8", "int8/bf16")
"""The default ways in which groups may exchange. DiLoCo's outer step with a rate of 1 is local SGD that sends changes,
so that its answers may be rounded, too, and its fragments may travel during the computation."""

DEFAULT_ALL_REDUCES = ("bf16", "powersgd:16,dtype=bf16", "powersgd:8,dtype=bf16", "powersgd:4,dtype=bf16")
"""The default formats in which the members of a group may average their gradients."""

UNBOUNDED = 1e30
"""Bound of a number without one; JSON has no infinity."""
Axis = list[Any] | tuple[float, float]
"""The possible values, or the smallest and the largest value."""


class Dimension(ABC):
    """A user-defined dimension, which lists its values and applies one to a run.

    It is passed by name, as ``OmniTuner(space={"workers": Workers()})``. Every rank calls `apply` before groups are
    formed, if the value differs from that of `current`.

    Attributes:
        needs_regroup: whether a value takes effect only if groups are formed again.
    """

    needs_regroup: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the key in ``space=``."""

    @abstractmethod
    def axis(self, known: Any) -> list[Any]:
        """Return numbers, texts or booleans to choose from, given `Evidence`; rank 0 calls it, often in a thread."""

    @abstractmethod
    def current(self, world: Any) -> Any:
        """Return the present value of a run."""

    @abstractmethod
    def apply(self, world: Any, value: Any) -> None:
        """Make a run use a value."""


def compression_named(text: Any) -> Compression:
    """Return the formats that a setting names, such as ``"int8"``, or ``"int8/bf16"`` for push and pull.

    Raises:
        ConfigurationError: it is not a text, or names no format.
    """
    if not isinstance(text, str) or not text:
        raise ConfigurationError(
            f'space={{"compression": {text!r}}}: pass formats, such as "int8", or "int8/bf16" for push and pull'
        )
    push, _, pull = text.partition("/")
    return Compression(push, pull or "fp32")


def _inside(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


@dataclass(frozen=True)
class Space:
    """The settings that a search may choose.

    Args:
        groups: numbers of groups, with 1 among them.
        momentum: the smallest and the largest explicit momentum.
        lr: the smallest and the largest learning rate.
        rebalance: whether batches may be split in proportion to speeds.
        period: local steps between two exchanges; empty for powers of two up to `LARGEST_PERIOD`.
        further: user-defined dimensions.
        method: methods of exchange; empty for that of the setting that a search starts from.
        compression: formats of push, or of push and pull, as ``"int8/bf16"``; empty likewise.
        overlap: whether exchanges may travel during the computation; empty likewise.
        all_reduce: all-reduce formats, beside that of this setting.

    Raises:
        ConfigurationError: a range is empty or out of bounds, or a method or format does not exist.
    """

    groups: tuple[int, ...]
    momentum: tuple[float, float] = (0.0, 0.95)
    lr: tuple[float, float] = (0.0, UNBOUNDED)
    rebalance: bool = True
    period: tuple[int, ...] = ()
    further: tuple[Dimension, ...] = ()
    method: tuple[str, ...] = ()
    compression: tuple[str, ...] = ()
    overlap: tuple[bool, ...] = ()
    all_reduce: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        (least, most), (slowest, fastest) = self.momentum, self.lr
        _check_range("momentum", self.momentum, 0 <= least <= most < 1, "from 0 up to 1, without 1")
        _check_range("lr", self.lr, 0 <= slowest <= fastest and fastest > 0, "above 0")
        if any(each < 1 for each in self.period):
            raise ConfigurationError(f'space={{"period": {list(self.period)}}}: pass numbers of steps, 1 or more')
        _check_texts("method", self.method, 'names of methods, such as "local_sgd"', method_named)
        _check_texts("all_reduce", self.all_reduce, 'formats, such as "powersgd:4"', all_reduce_of)
        for each in self.compression:
            compression_named(each)

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        ranks: int,
        allowed: Callable[[int], bool] = lambda groups: True,
        momentum: float = 0.0,
    ) -> Space:
        """Build a space from a user's values, with defaults for the others.

        ``given`` has names of `Space`, with single values, lists or ranges, and user-defined dimensions; ``allowed``
        tells whether a number of groups is possible. The user's own ``momentum`` is within the bounds unless ``given``
        excludes it.

        Raises:
            ConfigurationError: a name is not known, or a value is not possible.
        """
        further = tuple(each for each in given.values() if isinstance(each, Dimension))
        given = {name: value for name, value in given.items() if not isinstance(value, Dimension)}
        for name in given:
            if name not in _KNOWN:
                raise ConfigurationError(f"space={{{name!r}: ...}}: pass some of {', '.join(map(repr, _KNOWN))}")
        options: dict[str, Any] = {"groups": group_counts(ranks), "momentum": (0.0, max(momentum, cls.momentum[1]))}
        options |= {name: _KNOWN[name](name, value) for name, value in given.items()}
        groups = options.pop("groups")
        if not all(1 <= number <= ranks for number in groups):
            raise ConfigurationError(
                f'space={{"groups": {list(groups)}}}: pass whole numbers from 1 to {ranks}, the ranks'
            )
        return cls(tuple(sorted({1, *(g for g in groups if g == 1 or allowed(g))})), further=further, **options)

    def ways(self, start: Setting, suggested: Callable[[Setting], Setting]) -> list[Setting]:
        """Return ``start``, of one group, and all numbers of groups with all possible exchanges and all-reduce formats.

        ``suggested`` returns a setting with the momentum and learning rate that suit it.
        """
        found = [start]
        exchanges = self.method or (start.method,), self.compression or (start.wire,), self.overlap or (start.overlap,)
        for method, wire, overlap in product(*exchanges):
            if not method:  # the cost of a user's own method is not known
                continue
            value = method_named(method)
            periods = (self.period or periods_up_to(c.LARGEST_PERIOD)) if hasattr(value, "period") else (1,)
            for groups in self.groups[1:]:
                if not _can_be(value, groups, wire, overlap):
                    continue
                like = replace(start, groups=groups, method=method, wire=wire, overlap=overlap)
                found += [suggested(replace(like, period=period)) for period in periods]
        formats = [each for each in self.all_reduce if each != start.all_reduce]
        return found + [replace(each, all_reduce=format_) for format_ in formats for each in found]

    def holds(self, setting: Setting) -> Setting:
        """Return a setting, moved to the nearest bounds."""
        momentum, lr = _inside(setting.momentum, self.momentum), _inside(setting.lr, self.lr)
        return replace(setting, momentum=momentum, lr=lr)


def _check_range(name: str, bounds: tuple[float, float], is_good: bool, what: str) -> None:
    if not is_good:
        raise ConfigurationError(f'space={{"{name}": {bounds}}}: pass the least and the largest value, {what}')


def _check_texts(name: str, values: Sequence[Any], what: str, read: Callable[[str], object]) -> None:
    for each in values:
        if not isinstance(each, str) or not each:
            raise ConfigurationError(f'space={{"{name}": {each!r}}}: pass {what}')
        read(each)


def _numbers(name: str, given: Any, whole: bool = False) -> tuple[Any, ...]:
    values = _list(name, given)
    for each in values:
        good = isinstance(each, Integral) if whole else isinstance(each, Real) and math.isfinite(each)
        if isinstance(each, bool) or not good:
            raise ConfigurationError(
                f"space={{{name!r}: {given!r}}}: pass {'whole numbers' if whole else 'finite numbers'}, one or several"
            )
    return tuple(sorted(set(map(plain, values))))


def _bounds(name: str, given: Any) -> tuple[float, float]:
    numbers = _numbers(name, given)
    return numbers[0], numbers[-1]


def _flags(name: str, given: Any) -> tuple[bool, ...]:
    values = _choices(name, given)
    if not all(isinstance(each, bool) for each in values):
        raise ConfigurationError(f'space={{"{name}": {given!r}}}: pass True, False or both')
    return values


def _choices(name: str, given: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(_list(name, given)))


def _list(name: str, given: Any) -> list[Any]:
    values = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not values:
        raise ConfigurationError(f"space={{{name!r}: {given!r}}}: nothing to choose from; pass at least one value")
    return values


_KNOWN: dict[str, Callable[[str, Any], Any]] = {
    "groups": partial(_numbers, whole=True),
    "momentum": _bounds,
    "lr": _bounds,
    "rebalance": lambda name, given: any(_flags(name, given)),
    "period": partial(_numbers, whole=True),
    "method": _choices,
    "compression": _choices,
    "overlap": _flags,
    "all_reduce": _choices,
}
"""Readers of the user's values, by name."""


def periods_up_to(largest: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(largest.bit_length()))


def _can_be(method: Method, groups: int, wire: str, overlap: bool) -> bool:
    try:
        method.check(groups)
        given = compression_named(wire).features if wire else {}
        refuse_pairs(method, {**given, "overlap": "overlap=True"} if overlap else given)
    except ConfigurationError:
        return False
    return True


def group_counts(ranks: int) -> list[int]:
    return sorted({2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks})


def checked_axis(dimension: Dimension, known: Any) -> list[Any]:
    """Return the values of a user-defined dimension.

    Raises:
        ConfigurationError: they are no list of one or more plain values.
    """
    axis = dimension.axis(known)
    if not isinstance(axis, list) or not axis or not all(map(is_plain, axis)):
        raise ConfigurationError(
            f"space={{{dimension.name!r}: ...}}: its axis is {axis!r}; return a list of numbers, texts, or True and"
            " False"
        )
    return axis


def is_plain(value: Any) -> bool:
    """Return whether a value arrives unchanged on other ranks and in a checkpoint."""
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def apply_further(dimensions: Sequence[Dimension], world: Any, setting: Setting) -> bool:
    """Apply a setting's user-defined dimensions to a run, on every rank; return whether groups must be formed again."""
    wanted = dict(setting.further)
    changed = [each for each in dimensions if each.name in wanted and each.current(world) != wanted[each.name]]
    for dimension in changed:
        dimension.apply(world, wanted[dimension.name])
    return any(each.needs_regroup for each in changed)


@dataclass(frozen=True)
class SearchSpec(Serializable):
    """The specification of a search for a setting.

    Args:
        start: the setting of one group that the run uses without a search: the user's own.
        batch: samples of all ranks in one optimizer step.
        horizon: samples that the run will still train on.
        switch: seconds to form groups.
        budget: part of the run's time that choosing and forming groups may take.
        allowance: seconds of the budget that the run has earned and not spent.
    """

    start: Setting
    batch: int
    horizon: float
    space: Space
    scaling: Scaling = field(default_factory=Scaling)
    switch: float = 0.0
    budget: float = 1.0
    allowance: float = 0.0
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without user-defined dimensions."""
        return Serializable.to_dict(replace(self, space=replace(self.space, further=())))

    def can_wait(self, steps: int) -> bool:
        """Return whether measuring more pays: many groups may form, and the steps are a small part of the run."""
        return max(self.space.groups) > c.FEW_RANKS and steps < c.WAITING_SHARE * self.horizon / self.batch
