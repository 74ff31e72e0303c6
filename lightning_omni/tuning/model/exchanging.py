"""The pattern of exchanges as far as time depends on it: how often groups exchange, how many bytes, and who waits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_omni.checks import check_number, check_whole, keep_plain
from lightning_omni.errors import ConfigurationError
from lightning_omni.methods import Method, method_named
from lightning_omni.methods.overlap import check_overlap
from lightning_omni.serialization import Serializable
from lightning_omni.wire.compression import Compression
from lightning_omni.wire.formats.base import WireFormat
from lightning_omni.wire.layout import Layout, TensorSpec


@dataclass(frozen=True)
class ExchangePattern(Serializable):
    """The properties of a method, a wire format and an overlap that `Profile.predict` needs.

    Args:
        period: local steps of a group between two exchanges; None for the measured number.
        push: bytes of an exchange to the server; None for the measured number.
        pull: bytes of its answer; None for the measured number.
        barrier: whether each exchange waits for those of all other groups.
        delay: steps that a group makes during an exchange before it waits for the answer.
        peers: whether groups exchange with one another instead of with a server.
        dynamic: whether slow groups make fewer local steps, so that all reach a barrier at about the same time.

    Raises:
        ConfigurationError: a number is out of range.

    Example:
        A group sends one of four fragments every twelve steps, and waits for the answer after two more:

        >>> ExchangePattern.of("diloco:period=48,fragments=4,delay=2", nbytes=4_000_000)
        ExchangePattern(period=12, push=1000000, pull=1000000, barrier=True, delay=2, peers=False, dynamic=False)
    """

    period: int | None = None
    push: int | None = None
    pull: int | None = None
    barrier: bool = False
    delay: int = 0
    peers: bool = False
    dynamic: bool = False

    def __post_init__(self) -> None:
        keep_plain(self)
        if self.period is not None:
            check_whole("period", self.period, "local steps between two exchanges, 1 or more", low=1)
        for name in ("push", "pull"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "bytes of an exchange, 0 or more, or None", 0, below=math.inf)
        check_whole("delay", self.delay, "steps that an exchange is not waited for, 0 or more")
        if self.delay > (self.period or self.delay):
            raise ConfigurationError(
                f"delay={self.delay} with period={self.period}: an answer is waited for before the next exchange;"
                f" pass 0 to {self.period}"
            )
        if self.peers and self.barrier:
            raise ConfigurationError("peers=True with barrier=True: groups that read from peers do not wait for all")

    @classmethod
    def of(
        cls,
        method: str | Method,
        compression: str | WireFormat | Compression = "fp32",
        overlap: bool = False,
        nbytes: int | Layout = 0,
    ) -> ExchangePattern:
        """Return the pattern of a method.

        Args:
            method: the method or its name.
            compression: the formats in which tensors are sent, as in ``OmniStrategy(compression=...)``.
            overlap: whether an exchange travels while the group computes the next gradient.
            nbytes: bytes of the weights as float32, or their layout. With 0, bytes are as measured, in any format.

        Raises:
            ConfigurationError: the method or the wire format does not exist, or they do not work together.

        Example:
            >>> ExchangePattern.of("elastic_averaging:period=8", compression="bf16", nbytes=4_000_000)
            ExchangePattern(period=8, push=2000000, pull=4000000, barrier=False, delay=0, peers=False, dynamic=False)
            >>> ExchangePattern.of("hardsync", compression=Compression("int8", "bf16"), overlap=True, nbytes=4_096)
            ExchangePattern(period=1, push=1056, pull=2048, barrier=True, delay=1, peers=False, dynamic=False)
        """
        method = method_named(method) if isinstance(method, str) else method
        wire = Compression.of(compression).wire_format
        wire.check(method)
        if overlap:
            check_overlap(method)
        delay = getattr(method, "delay", int(overlap))
        if method.talks_to_peers:
            return cls._between_peers(method, wire, nbytes)
        # If pushes and pulls have different periods, each exchange carries its share of both.
        period = min(method.push_period, method.pull_period)
        push, pull = (
            round(_mean_bytes(each, nbytes, method.fragments) * period / every) if nbytes else None
            for each, every in ((wire.pushes, method.push_period), (wire.answers, method.pull_period))
        )
        dynamic = method.has_barrier and getattr(method, "dynamic_steps", False)
        return cls(period, push, pull, method.has_barrier, period if delay is None else delay, dynamic=dynamic)

    @classmethod
    def _between_peers(cls, method: Method, wire: WireFormat, nbytes: int | Layout) -> ExchangePattern:
        """Return the pattern between peers: a group waits for its reads, but not for its writes to another's inbox."""
        read = round(_mean_bytes(wire.pushes, nbytes, 1)) if nbytes else None
        is_waited_for = getattr(method, "kind", "pull") == "pull"
        return cls(method.push_period, 0, read if is_waited_for else 0, delay=0 if is_waited_for else 1, peers=True)


def _mean_bytes(wire_format: WireFormat, nbytes: int | Layout, fragments: int) -> float:
    whole = Layout((TensorSpec("weights", (-(-nbytes // 4),), "float32"),)) if isinstance(nbytes, int) else nbytes
    parts = [whole.fragment(number, fragments) for number in range(fragments)] if fragments > 1 else [whole]
    return sum(wire_format.sizes(part)[1] for part in parts) / fragments
