"""A fit that ends with an error on this rank: the report to other ranks, and whether the group joins again."""

from __future__ import annotations

from lightning_omni.errors import ConnectionLost, Evicted, OmniError, RankLost
from lightning_omni.runtime.loop_checks import place_of
from lightning_omni.strategy.grouping import Grouping
from lightning_omni.strategy.joining import Rejoining
from lightning_omni.strategy.optimizers import explain_unused
from lightning_omni.strategy.shared_parts import SharedParts
from lightning_omni.strategy.signals import end_in_one_line


class Failures:
    """The errors with which fits end on this rank.

    Attributes:
        at: where the fit has failed on this rank, which then skips barriers; or None.
    """

    def __init__(self, parts: SharedParts, grouping: Grouping, rejoining: Rejoining) -> None:
        self._parts, self._grouping, self._rejoining = parts, grouping, rejoining
        self.at: str | None = None

    def note(self, exception: BaseException) -> None:
        """Note an error that ends the fit, before callbacks receive it; prepare to rejoin if evicted or cut off.

        An agreed stop is not noted. If a callback raises another error, Lightning does not call the strategy's
        ``on_exception``.
        """
        if not self._ends_with_all(exception):
            self.at = place_of(exception)
            self._parts.world.explain(exception)
            self._rejoin_if_cut_off(exception)

    def explain(self, exception: BaseException) -> None:
        explain_unused(exception)
        if isinstance(exception, RankLost):
            end_in_one_line(exception)

    def report(self, exception: BaseException) -> None:
        """End this rank's run, and report its error to the others, after callbacks have received it.

        After an agreed stop the teardown ends the run.
        """
        parts = self._parts
        if self._ends_with_all(exception):
            parts.reporting.ask(self._parts.world)
        elif parts.current_world is not None:
            parts.reporting.keep(parts.world)
            if self.at is None:
                parts.world.explain(exception)
                self._rejoin_if_cut_off(exception)
            self._grouping.explain_take_over(exception)
            parts.world.fail(exception)
        elif self._parts.world_options.elastic.join:
            self._rejoin(exception, exception)
        elif parts.server_process is not None:
            parts.server_process.stop()
            parts.server_process = None

    def _ends_with_all(self, exception: BaseException) -> bool:
        return self._parts.signals.is_stopping and isinstance(exception, SystemExit)

    def _rejoin_if_cut_off(self, error: BaseException) -> None:
        world = self._parts.world
        if world.registration is not None:
            self._rejoin(error, (world.control.cause if world.control is not None else None) or error)

    def _rejoin(self, error: BaseException, reason: BaseException) -> bool:
        parts, strategy = self._parts, self._parts.strategy
        by_mistake = isinstance(reason, (Evicted, ConnectionLost)) and isinstance(error, Exception)
        if not by_mistake or parts.signals.is_told_to_end or strategy.local_rank:
            return False
        return self._rejoining.arm(error, reason, parts.world_options.elastic.max_rejoins, strategy.world_size)

    def start_again(self, error: OmniError) -> None:
        if self._rejoin(error, error):
            self._rejoining.start_again()
