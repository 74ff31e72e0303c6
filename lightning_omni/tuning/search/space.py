"""The space of settings that a search covers: one object for each dimension.

A dimension holds its bounds and puts a setting inside them. `Dimension` is the base class of user-defined dimensions,
which also list their values and apply a value to a run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from numbers import Integral, Real
from typing import Any, ClassVar

from typing_extensions import override

from lightning_omni.checks import plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method, method_named
from lightning_omni.methods.overlap import check_overlap
from lightning_omni.tuning.model.forecast import Setting
from lightning_omni.tuning.search import constants as c
from lightning_omni.wire.all_reduce import all_reduce_of
from lightning_omni.wire.compression import Compression

_AVERAGED = "diloco:outer_lr=1.0,outer_momentum=0"
_STREAMED = f"{_AVERAGED},fragments=4,delay=1,keep_steps=true,dynamic_steps=true"
METHODS = ("async_sgd", "local_sgd", "elastic_averaging", _AVERAGED, _STREAMED)
WIRES = ("fp32", "int8", "int8/bf16")
"""The default ways in which groups may exchange. DiLoCo's outer step with a rate of 1 is local SGD that sends changes,
so that its answers may be rounded, too, and its fragments may travel during the computation."""

ALL_REDUCES = ("bf16", "powersgd:16,dtype=bf16", "powersgd:8,dtype=bf16", "powersgd:4,dtype=bf16")
"""The default formats in which the members of a group may average their gradients."""

Axis = list[Any] | tuple[float, float]
"""The possible values, or the smallest and the largest value."""


class Dimension(ABC):
    """A user-defined dimension.

    It is passed by name, as ``OmniTuner(space={"workers": Workers()})``, and its value is part of every setting. Every
    rank calls `apply` before groups are formed, if the value differs from that of `current`.

    Attributes:
        needs_regroup: whether groups have to be formed again for a value to take effect, even if their number stays.
    """

    needs_regroup: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the key in ``space=``."""

    @abstractmethod
    def axis(self, known: Any) -> Axis:
        """Return the values to choose from.

        Args:
            known: the `Evidence` for the choice.
        """

    @abstractmethod
    def current(self, world: Any) -> Any:
        """Return the present value of a run."""

    @abstractmethod
    def apply(self, world: Any, value: Any) -> None:
        """Make a run use a value."""

    def put(self, setting: Setting, value: Any) -> Setting:
        """Return a setting with a value in this dimension."""
        return setting.with_further(self.name, value)


class OwnDimension(ABC):
    """A dimension that every run has."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the key in ``space=``."""

    def hold(self, setting: Setting) -> Setting:
        """Return a setting, moved to the nearest bound if it is outside."""
        return setting


@dataclass(frozen=True)
class Groups(OwnDimension):
    """Numbers of compute groups, with 1 among them."""

    numbers: tuple[int, ...]
    name = "groups"

    def __post_init__(self) -> None:
        if 1 not in self.numbers:
            raise ConfigurationError(f'space={{"groups": {list(self.numbers)}}}: one group has to be among them; add 1')


@dataclass(frozen=True)
class Range(OwnDimension, ABC):
    """The smallest and the largest value of a number."""

    bounds: tuple[float, float]

    def _check(self, is_good: bool, what: str) -> None:
        if not is_good:
            raise ConfigurationError(
                f'space={{"{self.name}": {self.bounds}}}: pass the least and the largest value, {what}'
            )


@dataclass(frozen=True)
class Momentum(Range):
    """Bounds of the explicit momentum."""

    name = "momentum"

    def __post_init__(self) -> None:
        self._check(0 <= self.bounds[0] <= self.bounds[1] < 1, "from 0 up to 1, without 1")

    def hold(self, setting: Setting) -> Setting:
        return replace(setting, momentum=_inside(setting.momentum, self.bounds))


@dataclass(frozen=True)
class LearningRate(Range):
    """Bounds of the learning rate."""

    name = "lr"

    def __post_init__(self) -> None:
        self._check(0 <= self.bounds[0] <= self.bounds[1] and self.bounds[1] > 0, "above 0")

    def hold(self, setting: Setting) -> Setting:
        return replace(setting, lr=_inside(setting.lr, self.bounds))


@dataclass(frozen=True)
class Period(OwnDimension):
    """Local steps between two exchanges; empty for powers of two up to `LARGEST_PERIOD`."""

    numbers: tuple[int, ...]
    name = "period"

    def __post_init__(self) -> None:
        if any(each < 1 for each in self.numbers):
            raise ConfigurationError(f'space={{"period": {list(self.numbers)}}}: pass numbers of steps, 1 or more')


@dataclass(frozen=True)
class ExchangeDimension(OwnDimension, ABC):
    """The values of one property of the exchange; empty for that of the setting that a search starts from."""

    values: tuple[Any, ...]

    def options(self, setting: Setting) -> Sequence[Any]:
        """Return the values to choose from; by default the value of a setting."""
        return self.values or (getattr(setting, self.name),)

    def _check_texts(self, what: str, read: Callable[[str], object]) -> None:
        for each in self.values:
            if not isinstance(each, str) or not each:
                raise ConfigurationError(f'space={{"{self.name}": {each!r}}}: pass {what}')
            read(each)


@dataclass(frozen=True)
class MethodName(ExchangeDimension):
    """The methods, as `lightning_omni.methods.method_named` takes them, without their periods."""

    name = "method"

    def __post_init__(self) -> None:
        self._check_texts('names of methods, such as "local_sgd"', method_named)


@dataclass(frozen=True)
class Wire(ExchangeDimension):
    """The wire formats, as ``"int8"``, or ``"int8/bf16"`` for pushes and answers."""

    name = "wire"

    def __post_init__(self) -> None:
        for each in self.values:
            compression_named(each)


@dataclass(frozen=True)
class Overlap(ExchangeDimension):
    """The choice whether exchanges travel while the next gradient is computed."""

    name = "overlap"

    def __post_init__(self) -> None:
        if not all(isinstance(each, bool) for each in self.values):
            raise ConfigurationError(f'space={{"overlap": {list(self.values)}}}: pass True, False or both')


@dataclass(frozen=True)
class AllReduceFormat(ExchangeDimension):
    """The formats in which members of a group average their gradients: names that `all_reduce_of` takes."""

    name = "all_reduce"

    def __post_init__(self) -> None:
        self._check_texts('formats, such as "powersgd:4"', all_reduce_of)


@dataclass(frozen=True)
class MergedName(ExchangeDimension):
    """The submodules that several groups may merge: names in ``named_modules()``; merging none is always possible."""

    name = "merged"

    def __post_init__(self) -> None:
        self._check_texts('names of submodules, such as "classifier"; merging none is always possible', str)

    @override
    def options(self, setting: Setting) -> Sequence[Any]:
        return ("", *self.values) if self.values else (setting.merged,)


def compression_named(text: Any) -> Compression:
    """Return the formats that a setting names, such as ``"int8"``, or ``"int8/bf16"`` for pushes and pulls.

    Raises:
        ConfigurationError: it is not a text, or names no format.
    """
    if not isinstance(text, str) or not text:
        raise ConfigurationError(
            f'space={{"wire": {text!r}}}: pass formats, such as "int8", or "int8/bf16" for each way'
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
        method: methods of exchange; empty for the method of the setting that a search starts from.
        wire: wire formats of pushes and answers; empty for that of this setting.
        overlap: whether exchanges may travel during the computation; empty for that of this setting.
        all_reduce: formats in which the members of a group may average their gradients, beside that of this setting.
        merged: submodules that several groups may merge; empty for that of this setting.

    Raises:
        ConfigurationError: a range is empty or out of bounds, or a method or format does not exist.
    """

    groups: tuple[int, ...]
    momentum: tuple[float, float] = (0.0, 0.95)
    lr: tuple[float, float] = (0.0, math.inf)
    rebalance: bool = True
    period: tuple[int, ...] = ()
    further: tuple[Dimension, ...] = ()
    method: tuple[str, ...] = ()
    wire: tuple[str, ...] = ()
    overlap: tuple[bool, ...] = ()
    all_reduce: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _ = self.dimensions  # each dimension checks its bounds

    @cached_property
    def dimensions(self) -> tuple[OwnDimension, ...]:
        """Return the dimensions that every run has."""
        own = Groups(self.groups), Momentum(self.momentum), LearningRate(self.lr), Period(self.period)
        return *own, *self.exchanges, AllReduceFormat(self.all_reduce), self.head

    @property
    def exchanges(self) -> tuple[ExchangeDimension, ...]:
        return MethodName(self.method), Wire(self.wire), Overlap(self.overlap)

    @property
    def head(self) -> MergedName:
        return MergedName(self.merged)

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        ranks: int,
        allowed: Callable[[int], bool] = lambda groups: True,
        momentum: float = 0.0,
    ) -> Space:
        """Build a space from a user's values, with defaults for the others.

        Args:
            given: any of the names in `Space`, with single values, lists or ranges; and user-defined dimensions.
            ranks: number of ranks.
            allowed: whether a number of groups is possible.
            momentum: the user's own momentum, which is within the bounds unless ``given`` excludes it.

        Raises:
            ConfigurationError: a name is not known, or a value is not possible.
        """
        further = tuple(each for each in given.values() if isinstance(each, Dimension))
        given = {name: value for name, value in given.items() if not isinstance(value, Dimension)}
        for name in given:
            if name not in _KNOWN:
                raise ConfigurationError(f"space={{{name!r}: ...}}: pass some of {', '.join(map(repr, _KNOWN))}")
        groups = _numbers("groups", given.get("groups", group_counts(ranks)), whole=True)
        if not all(1 <= number <= ranks for number in groups):
            raise ConfigurationError(f'space={{"groups": {groups}}}: pass whole numbers from 1 to {ranks}, the ranks')
        options: dict[str, Any] = {"momentum": (0.0, max(momentum, cls.momentum[1]))}
        for name, read in _KNOWN.items():
            if name in given and name != "groups":
                options[name] = read(name, given[name])
        return cls(tuple(sorted({1, *(g for g in groups if g == 1 or allowed(g))})), further=further, **options)

    def ways(self, start: Setting, suggested: Callable[[Setting], Setting]) -> list[Setting]:
        """Return one group as it is, and every number of groups with every way in which they may exchange.

        Each is repeated for every all-reduce format.

        Args:
            start: the setting that a search starts from, in one group.
            suggested: returns a setting with the momentum and learning rate that are expected to suit it.
        """
        found = [start]
        ways = product(*(each.options(start) for each in (*self.exchanges, self.head)))
        for method, wire, overlap, merged in ways:
            if not method:  # the cost of a user's own method is not known
                continue
            value = method_named(method)
            periods = (self.period or periods_up_to(c.LARGEST_PERIOD)) if hasattr(value, "period") else (1,)
            for groups in self.groups[1:]:
                if not _can_be(value, groups, wire, overlap):
                    continue
                like = replace(start, groups=groups, method=method, wire=wire, overlap=overlap, merged=merged)
                if merged and not (_is_known_merged(like) or (method, merged) == (start.method, start.merged)):
                    continue
                found += [suggested(replace(like, period=period)) for period in periods]
        formats = [each for each in self.all_reduce if each != start.all_reduce]
        return found + [replace(each, all_reduce=format_) for format_ in formats for each in found]

    def holds(self, setting: Setting) -> Setting:
        """Return a setting, moved to the nearest bounds."""
        for dimension in self.dimensions:
            setting = dimension.hold(setting)
        return setting


def _bounds(name: str, given: Any) -> tuple[float, float]:
    numbers = _numbers(name, given)
    return min(numbers), max(numbers)


def _any(name: str, given: Any) -> bool:
    values = _list(given)
    if not values or not all(isinstance(each, bool) for each in values):
        raise ConfigurationError(f'space={{"{name}": {given!r}}}: pass True, False or both')
    return any(values)


def _whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    return tuple(sorted(set(_numbers(name, given, whole=True))))


def _choices(name: str, given: Any) -> tuple[Any, ...]:
    values = tuple(dict.fromkeys(_list(given)))
    if not values:
        raise ConfigurationError(f"space={{{name!r}: {given!r}}}: nothing to choose from")
    return values


_KNOWN: dict[str, Callable[[str, Any], Any]] = {
    "groups": _whole_numbers,
    "momentum": _bounds,
    "lr": _bounds,
    "rebalance": _any,
    "period": _whole_numbers,
    **dict.fromkeys(("method", "wire", "overlap", "all_reduce", "merged"), _choices),
}
"""Readers of the user's values, by name."""


def periods_up_to(largest: int) -> tuple[int, ...]:
    """Return the powers of two up to a number."""
    return tuple(1 << power for power in range(largest.bit_length()))


def _can_be(method: Method, groups: int, wire: str, overlap: bool) -> bool:
    try:
        method.check(groups)
        if wire:
            compression_named(wire).check(method)
        if overlap:
            check_overlap(method)
    except ConfigurationError:
        return False
    return True


def _is_known_merged(setting: Setting) -> bool:
    """Return whether the cost in samples of a setting with a merged submodule is known.

    Each group's gradient steps a head. Where it steps the body, too, the setting is at most as stale as asynchronous
    SGD, which the prior covers.
    """
    return setting.updates_per_batch == setting.groups and not setting.overlap


def group_counts(ranks: int) -> list[int]:
    """Return the powers of two up to the number of ranks, and the number of ranks."""
    return sorted({2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks})


def checked_axis(dimension: Dimension, known: Any) -> Axis:
    """Return the axis of a user-defined dimension.

    Raises:
        ConfigurationError: the axis is invalid, or is a range although the run's value is a text.
    """
    axis, name = dimension.axis(known), dimension.name
    if isinstance(axis, list) and axis and all(map(is_plain, axis)):
        return axis
    is_pair = isinstance(axis, tuple) and len(axis) == 2 and all(isinstance(each, (int, float)) for each in axis)
    if is_pair and -math.inf < axis[0] < axis[1] < math.inf:
        value = known.spec.start.further_value(name)
        if not isinstance(value, str):
            return float(axis[0]), float(axis[1])
    raise ConfigurationError(
        f"space={{{name!r}: ...}}: its axis is {axis!r}; return a list of numbers, texts or True and False, or,"
        " if the run has a number, a tuple of the smallest and the largest"
    )


def is_plain(value: Any) -> bool:
    """Return whether a value arrives unchanged on other ranks and in a checkpoint."""
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def apply_further(dimensions: Sequence[Dimension], world: Any, setting: Setting) -> bool:
    """Apply the user-defined dimensions of a setting to a run, before its groups are formed.

    Returns:
        Whether groups have to be formed again.
    """
    wanted = dict(setting.further)
    changed = [each for each in dimensions if each.name in wanted and each.current(world) != wanted[each.name]]
    for dimension in changed:
        dimension.apply(world, wanted[dimension.name])
    return any(each.needs_regroup for each in changed)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _numbers(name: str, value: Any, whole: bool = False) -> list[Any]:
    values = _list(value)
    for each in values:
        good = isinstance(each, Integral) if whole else isinstance(each, Real) and math.isfinite(each)
        if isinstance(each, bool) or not good:
            raise ConfigurationError(
                f"space={{{name!r}: {value!r}}}: pass {'whole numbers' if whole else 'finite numbers'}, one or several"
            )
    if not values:
        raise ConfigurationError(f"space={{{name!r}: {value!r}}}: nothing to choose from; pass at least one number")
    return [plain(each) for each in values]
