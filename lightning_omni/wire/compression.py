"""The argument ``compression``: the formats of pushes, of pulls, and of averages inside a group."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_omni.checks import check_kind
from lightning_omni.errors import ConfigurationError
from lightning_omni.wire.all_reduce import EXACT, AllReduce, all_reduce_of
from lightning_omni.wire.formats import PerDirection, TopK, wire_of
from lightning_omni.wire.formats.base import RAW, WireFormat, to_wire


@dataclass(frozen=True)
class Compression:
    """The formats in which a run sends tensors. A text or `WireFormat` in its place is the format of pushes.

    The formats of pushes and pulls are ``"fp32"``, uncompressed; ``"bf16"`` or ``"fp16"``, half the bytes; ``"int8"``,
    about a quarter; ``"topk:0.01"``, the largest hundredth of the elements with their positions; or a value such as
    `lightning_omni.wire.formats.Int8`. With one group, ``push`` and ``pull`` have no effect.

    Args:
        push: format of pushes, whose residual is added to the group's next push; and of weights sent to other groups.
        pull: format of the server's answers.
        all_reduce: format in which the members of a group average their gradients: ``"fp32"``, as
            DistributedDataParallel does; ``"bf16"`` or ``"fp16"``; ``"powersgd:4"``, each matrix of gradients as the
            product of two with 4 columns, with error feedback; or a value such as
            `lightning_omni.wire.all_reduce.PowerSGD`.

    Raises:
        ConfigurationError: a format is unknown, or ``pull`` is a top-k format.

    Example:
        >>> Compression(push="int8", pull="bf16")
        Compression(push='int8', pull='bf16', all_reduce='fp32')
        >>> Compression(pull=8)
        Traceback (most recent call last):
        lightning_omni.errors.ConfigurationError: Compression(pull=8): pass a name such as "int8", or a value as Int8()
    """

    push: str | WireFormat = "fp32"
    pull: str | WireFormat = "fp32"
    all_reduce: str | AllReduce = "fp32"

    def __post_init__(self) -> None:
        for way in ("push", "pull"):
            wanted = 'a name such as "int8", or a value as Int8()'
            check_kind(f"Compression({way}", getattr(self, way), (str, WireFormat), wanted)
        wanted = 'a name such as "powersgd:4", or a value such as PowerSGD(rank=4)'
        check_kind("Compression(all_reduce", self.all_reduce, (str, AllReduce), wanted)
        if isinstance(wire_of(self.pull), TopK):
            raise ConfigurationError(
                f"Compression(pull={self.pull!r}): answers are not added up, and what one leaves out the next does not"
                ' bring; pass "bf16", "fp16" or "int8"'
            )
        self.wire_format  # noqa: B018 - raises the error of a name that does not exist
        self.all_reduce_format  # noqa: B018

    @classmethod
    def of(cls, given: str | WireFormat | Compression) -> Compression:
        """Return the formats for a user's argument, which may be the format of pushes alone.

        Raises:
            ConfigurationError: it is no format.
        """
        wanted = 'a name such as "int8", or formats such as Compression(push="int8", pull="bf16")'
        check_kind("compression", given, (str, WireFormat, Compression), wanted)
        return given if isinstance(given, Compression) else cls(push=given)

    @property
    def wire_format(self) -> WireFormat:
        """Return the format of pushes and pulls as one value."""
        push, pull = wire_of(self.push), wire_of(self.pull)
        return push if pull == RAW else PerDirection(push=to_wire(push), pull=to_wire(pull))

    @property
    def all_reduce_format(self) -> AllReduce:
        """Return the all-reduce format as a value."""
        return all_reduce_of(self.all_reduce)

    @property
    def features(self) -> dict[str, str]:
        """Return the features of `lightning_omni.combinations` in use, each as the user wrote it."""
        used = {
            "lossy": (self.wire_format != RAW, self.given),
            "lossy_pull": (self.wire_format.answers != RAW, self.given),
            "topk": (isinstance(self.wire_format.pushes, TopK), self.given),
            "all_reduce": (self.all_reduce_format != EXACT, f"Compression(all_reduce={self.all_reduce!r})"),
        }
        return {name: given for name, (is_used, given) in used.items() if is_used}

    @property
    def given(self) -> str:
        """Return the argument as a user writes it, for messages."""
        if self == Compression(self.push) and isinstance(self.push, str):
            return f'compression="{self.push}"'
        names = ("push", "pull", "all_reduce")
        values = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != "fp32"]
        return f"compression=Compression({', '.join(values)})"
