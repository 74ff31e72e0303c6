"""The known costs of each part of training; `Profile.of` predicts from them as from measured steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.serialization import Serializable


@dataclass(frozen=True)
class Costs(Serializable):
    """The known costs in seconds, for equal ranks without jitter.

    ``exchange``, ``serve`` and ``link`` are those of one server.

    Args:
        per_sample: forward and backward pass of a sample on one rank.
        overhead: part of a rank's step that does not depend on its samples.
        allreduce: a gradient on a rank's link; a ring of k ranks takes 2 (k - 1) / k of it.
        allreduce_latency: each of the 2 (k - 1) messages of a ring.
        exchange: a push and its answer, for a group that does not wait for other groups.
        serve: part of ``exchange`` in which the server computes; pushes queue for it.
        link: part of ``exchange`` in which a push is on the server's link; its answer takes as long the other way.
        head_per_sample: exclusive access to a merged head, per sample of a group's batch.
        nbytes: bytes of one exchange, one way; 0 if unknown.
        period: local steps between two exchanges, H.
        servers: number of servers, each with a partition of the parameters, of ``serve`` and of ``link``.
        per_node: whether each node runs one server, so that a share of each exchange crosses no link.

    Raises:
        ConfigurationError: a number is out of range.
    """

    per_sample: float
    overhead: float = 0.0
    allreduce: float = 0.0
    allreduce_latency: float = 0.0
    exchange: float = 0.0
    serve: float = 0.0
    link: float = 0.0
    head_per_sample: float = 0.0
    nbytes: int = 0
    period: int = 1
    servers: int = 1
    per_node: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name == "per_node":
                continue
            least = int(each.name in ("period", "servers"))
            check_number(each.name, getattr(self, each.name), f"a number, {least} or more", least, below=math.inf)
        if self.per_sample + self.overhead <= 0:
            raise ConfigurationError("per_sample=0: pass the seconds of a sample, or overhead= of a step")
        # Rounding must not matter: in binary, 0.1 + 2 * 0.1 is slightly more than 0.3.
        if (parts := self.serve + 2 * self.link) > self.exchange and not math.isclose(parts, self.exchange):
            raise ConfigurationError(
                f"exchange={self.exchange}: serve, and link both ways, are parts of it; pass {parts:g} or more"
            )
        if self.link and not self.nbytes:
            raise ConfigurationError(f"link={self.link}: pass nbytes= as well, the bytes that take so long")
