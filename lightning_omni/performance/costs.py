"""What training costs, part by part, where that is known: `Profile.of` predicts from it as from measured steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lightning_omni.checks import check_number
from lightning_omni.errors import ConfigurationError
from lightning_omni.serialization import Serializable


@dataclass(frozen=True)
class Costs(Serializable):
    """Seconds, of equal ranks that do not scatter. ``exchange``, ``serve`` and ``link`` are those of one server.

    Args:
        per_sample: forward and backward pass of a sample on one rank.
        overhead: what a step costs a rank whatever its samples.
        allreduce: bringing a gradient through a rank's link; a ring of k ranks moves 2 (k - 1) / k of it.
        allreduce_latency: of each of the 2 (k - 1) messages of a ring.
        exchange: a push and the answer to it, as a group without rivals sees them.
        serve: of this, the server's own arithmetic, one push after the other.
        link: of this, the time of a push on the server's link, by itself; its answer takes as long the other way.
        head_per_sample: of each sample of a group's batch, in exclusive access to a merged head.
        nbytes: bytes of one exchange, one way; 0 if unknown.
        period: local steps between two exchanges, H.
        servers: that hold a share of the weights each; every one takes its share of ``serve`` and ``link``.
        per_node: whether they are one on each node, so that a share of each exchange crosses no link.

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
        # 0.3 is enough for 0.1 and twice 0.1, which are a little more in binary.
        if (parts := self.serve + 2 * self.link) > self.exchange and not math.isclose(parts, self.exchange):
            raise ConfigurationError(
                f"exchange={self.exchange}: serve, and link both ways, are parts of it; pass {parts:g} or more"
            )
        if self.link and not self.nbytes:
            raise ConfigurationError(f"link={self.link}: pass nbytes= as well, the bytes that take so long")
