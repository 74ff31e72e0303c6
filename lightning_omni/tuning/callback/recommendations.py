"""Advice to the user for the next run, computed beside the training, which does not wait for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from statistics import mean

from lightning_omni.tuning.callback.background import beside
from lightning_omni.tuning.callback.first_batches.timing import bytes_take_long
from lightning_omni.tuning.callback.run import TunedRun
from lightning_omni.tuning.search import Search
from lightning_omni.tuning.search.choice import gain_of_merging, gain_of_servers

_log = logging.getLogger(__name__)


class Advice:
    """The advice about changes that need a new run and would make it clearly faster, on rank 0.

    Computing it takes about as long as the choice itself, and the other ranks would wait for this one. So a thread
    computes it once nothing is timed any more, because it would disturb the timing.

    Args:
        run: the tuned run.
    """

    def __init__(self, run: TunedRun) -> None:
        self._run = run
        self._said: set[str] = set()
        self._asked: Search | None = None
        self._sought: Future[list[tuple[str, str]]] | None = None

    def seek(self, search: Search) -> None:
        """Request advice by a search."""
        for name in search.unseen_heads:
            self._info(
                name,
                f'space={{"merged": {name!r}}}: it is not merged, because it was not called exactly once in each step'
                " with tensors whose first dimension is the batch",
            )
        self._asked = search

    def batch_done(self) -> None:
        """Start the computation, or report its result, between batches that are not timed."""
        self._begin()
        if self._sought is not None and self._sought.done():
            self._report(self._sought)

    def ended(self) -> None:
        """Wait for the advice at the end of a successful run, and report it."""
        self._begin()
        if self._sought is not None:
            self._report(self._sought)

    def _begin(self) -> None:
        if self._asked is None or self._sought is not None:
            return
        plain, ways = self._asked.to_dict(), self._ways(self._asked)
        self._asked = None

        def find() -> list[tuple[str, str]]:
            copy = Search.from_dict(plain)  # this rank keeps using the original
            return [advice for way in ways if (advice := way(copy))]

        self._sought = beside(find)

    def _report(self, sought: Future[list[tuple[str, str]]]) -> None:
        self._sought = None
        try:
            found = sought.result()
        except Exception:  # a run must not end because advice is missing
            _log.warning("what would make a run like this faster could not be found out", exc_info=True)
            return
        for what, sentence in found:
            self._info(what, sentence)

    def _info(self, what: str, sentence: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._run.info(f"OmniTuner: {sentence}")

    def _ways(self, search: Search) -> list[Callable[[Search], tuple[str, str] | None]]:
        """Return functions that find advice; each returns a topic, which is reported once, and a sentence, or None."""
        server, options = self._run.world.server, self._run.world.options
        ways: list[Callable[[Search], tuple[str, str] | None]] = []
        if not (search.spec.space.merged or search.spec.start.merged):
            ways.append(_to_merge)
        if server.nodes > 1 and server.count == 1 and options.server.address is None:
            measured = search.measured[-1]
            if bytes_take_long(measured.reduce_per_byte * measured.nbytes, mean(measured.steps[0])):
                ways.append(lambda copy: _to_have_servers(copy, server.nodes))
        return ways


def _to_merge(search: Search) -> tuple[str, str] | None:
    found = gain_of_merging(search)
    if found is None:
        return None
    name = found.setting.merged
    sentence = (
        f"with {name} merged {found.why}; for that, pass"
        f' OmniTuner(space={{"merged": ["{name}"]}}), or OmniStrategy(merged="{name}")'
    )
    return name, sentence


def _to_have_servers(search: Search, nodes: int) -> tuple[str, str] | None:
    found = gain_of_servers(search, nodes)
    if found is None:
        return None
    sentence = f'with a parameter server on each node {found.why}; for that, pass OmniStrategy(server="per-node")'
    return "servers", sentence


__all__ = ["Advice"]
