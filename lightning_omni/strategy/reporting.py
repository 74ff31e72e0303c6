"""What is reported of a run: numbers while it runs and after it, from what the server last said."""

from __future__ import annotations

from lightning_omni.errors import OmniError
from lightning_omni.metrics import RunReport
from lightning_omni.optimizer import World
from lightning_omni.protocol import messages as m


class Reporting:
    """Keeps the server's last words, for a report after the server is gone."""

    def __init__(self) -> None:
        self._status: m.Status | None = None

    def begin(self) -> None:
        """Training begins."""
        self._status = None

    def keep(self, world: World) -> None:
        """This rank fails: what it has heard is all there will be."""
        if world.control is not None:
            self._status = world.control.status

    def ask(self, world: World) -> None:
        """Training has ended: asks the server for its last words."""
        if world.control is None:
            return
        try:
            self._status = world.control.request(m.AskStatus(), m.Status, timeout=5.0)
        except OmniError:
            self.keep(world)

    def report(self, world: World, bytes_per_step: float) -> RunReport:
        """The run in numbers.

        Args:
            world: this rank's.
            bytes_per_step: bytes that this rank exchanged for each batch.
        """
        status = (world.control.status if world.control else None) or self._status
        clock = status.clock if status else 0
        if status and not world.executor.exchanges:  # its groups are of the past, and some may be a tuner's
            clock = sum(part.replica.clock for part in world.parts if part.head is None)
            status = status if clock else None
        seen: tuple[int, ...] = status.staleness if status else ()
        return RunReport(
            updates=world.steps + clock,
            staleness_mean=sum(t * count for t, count in enumerate(seen)) / max(1, sum(seen)),
            staleness_max=max(0, len(seen) - 1),
            groups=len(status.groups) if status else len(world.topology.alive),
            group_size=max(len(members) for members in world.topology.groups),
            refused=status.refused if status else 0,
            ranks_lost=status.lost if status else (),
            bytes_per_step=bytes_per_step,
            head_time=status.head_time if status else 0.0,
            serve_time=status.serve_time if status else 0.0,
            total_momentum=status.total_momentum if status else None,
        )

    def warning(self, world: World) -> str:
        """A sentence, if groups never came to the end of a period and have trained for nothing; else nothing."""
        method, status = world.method, self._status
        if status is None or status.clock or not world.steps_at_worker or method.evaluated == "mean":
            return ""
        return (
            f"no group has exchanged anything with {method!r}, so the weights are those of the beginning: its period is"
            " longer than the run"
        )
