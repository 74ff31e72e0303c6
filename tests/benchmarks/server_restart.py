"""Kills the parameter server in the midst of an epoch, again and again: every run must go on, and finish.

    python tests/benchmarks/server_restart.py [--runs 20] [--both] [--method async_sgd] [--save-every 1] [--seed 0]

Each run trains 4 ranks in 2 groups for 2 epochs with a validation in mid-epoch. Every other run has a server that rank
0 starts, the others one that stands by itself (``lightning-omni serve --state``). The process that serves gets SIGKILL
at a random moment; with ``--both`` also the one that has forked a server that stands by itself, which is then started
again at once. A run counts if it ends with exit code 0, if every sample of every epoch was trained, and if nothing is
left running. Printed are the seconds until each rank has trained two batches more, or the run has ended (one group may
train what is left), and the updates that were lost.
(``restart_time.py`` measures how long training pauses, with processes that are started as a user starts them.)
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import ge
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from patience import SLOWER
from processes import Process
from runs import Running, free_port

from benchmarks.kills import EPOCHS, RANKS, SAMPLES, trained_samples

COMMAND = [sys.executable, "-c", "from lightning_omni.cli import main; raise SystemExit(main())"]
LISTENS = r"parameter server on (tcp://127\.0\.0\.1:\d+), key from"
GOES_ON = 2
"""Batches that each rank trains before it counts as going on."""
KILLED = "killed"
"""A file that says that the server was killed: on a busy machine, training may be over before anything was saved."""


@dataclass
class Death:
    """What came of one.

    Attributes:
        to_go_on: seconds until every rank had trained on, or the run had ended.
        lost: updates that were lost.
        problem: what is wrong; empty if nothing is.
    """

    to_go_on: float = float("nan")
    lost: int = -1
    problem: str = ""


def fit(method: str, save_every: float, **server: Any) -> dict[str, Any]:
    """The options of a run with batches of 30 ms each, which waits in its last epoch until the server was killed."""
    return {
        "data": {"samples": SAMPLES},
        "sleep": {str(rank): 0.03 for rank in range(RANKS)},
        "hold": {"epoch": EPOCHS - 1, "batch": 4, "until": KILLED},
        "strategy": {"groups": 2, "method": method, "server": {"save": save_every, **server}},
        "trainer": {"max_epochs": EPOCHS, "val_check_interval": 0.5},
    }


def batches(running: Running) -> list[int]:
    """How many batches each rank has trained."""
    counts = []
    for rank in range(RANKS):
        events = running.folder / f"events{rank}"
        text = events.read_text() if events.exists() else ""
        counts.append(sum(line.startswith("batch") for line in text.splitlines()))
    return counts


def wait_for(running: Running, condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is the case, or the run has ended, or time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or running.process.poll() is not None:
            return condition()
        time.sleep(0.02)
    return True


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_saved(server: int) -> bool:
    """Return whether a server has saved its state, beside the lock that it holds."""
    with suppress(OSError):  # it is gone
        for link in Path(f"/proc/{server}/fd").iterdir():
            file = Path(os.readlink(link))
            if file.name == "lock" and any(file.parent.glob("state-*")):
                return True
    return False


def kill_embedded(running: Running, both: bool) -> None:
    """The server dies that rank 0 has started, without the process that watches it."""
    os.kill(running.servers[-1], signal.SIGKILL)


class StandingServer:
    """A server that stands by itself and saves its state."""

    def __init__(self, stack: ExitStack, save_every: float) -> None:
        self.key = secrets.token_hex(32)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        where = ["--port", str(free_port()), "--state", f"{folder}/state", "--save-every", str(save_every)]
        self._command = [*COMMAND, "serve", *where]
        self._stack = stack
        self.start()

    def start(self) -> None:
        """Starts it, perhaps again."""
        self.process = Process(self._command, {"LIGHTNING_OMNI_KEY": self.key})
        self._stack.callback(self.process.kill)

    @property
    def serving(self) -> list[int]:
        """The process that serves."""
        return children(self.process.pid)

    def address(self) -> str:
        """Where it listens, when it does."""
        return str(self.process.expect(LISTENS, 150)[1])

    def die(self, both: bool) -> None:
        """It is killed; with the process that watches it, it is started again at once."""
        if not both:
            (serving,) = self.serving
            os.kill(serving, signal.SIGKILL)
            return
        os.kill(self.process.pid, signal.SIGKILL)
        self.start()


@contextmanager
def run_with(
    stands: bool, method: str, save_every: float
) -> Iterator[tuple[Running, Callable[[], bool], Callable[[bool], None]]]:
    """Yield a run, whether its server has saved its state, and what kills it (True: a standing one's watcher, too)."""
    with ExitStack() as stack:
        environment, strategy, server = {}, {}, None
        if stands:
            server = StandingServer(stack, save_every)
            strategy["address"], environment["LIGHTNING_OMNI_KEY"] = server.address(), server.key
        options = {"fits": [fit(method, save_every, **strategy)], "servers": 2}  # the second goes on for the first
        running = stack.enter_context(Running("groups.py", options, environment))
        if server is not None:
            yield running, lambda: any(map(has_saved, server.serving)), server.die
        else:
            yield running, lambda: any(map(has_saved, running.servers[-1:])), partial(kill_embedded, running)


def one_death(stands: bool, method: str, save_every: float, delay: float, both: bool = False) -> Death:
    """One run whose server dies so many seconds after first batches and save, with what watches it or alone."""
    death = Death()
    with run_with(stands, method, save_every) as (running, is_saved, kill):
        if not wait_for(running, lambda: all(batches(running)) and is_saved(), SLOWER * 120):
            return Death(problem=f"training never began:\n{running.output[-3000:]}")
        time.sleep(delay)
        before, began = batches(running), time.monotonic()
        kill(both)
        (running.folder / KILLED).touch()
        enough = [count + GOES_ON for count in before]
        trains_on = wait_for(running, lambda: all(map(ge, batches(running), enough)), SLOWER * 60)
        if trains_on or running.process.poll() is not None:
            death.to_go_on = time.monotonic() - began
        try:
            finished = running.wait(120)
        except AssertionError as error:
            return Death(problem=str(error))
        found = re.search(r"updates of its last save; at least (\d+) that came later", finished.output)
        death.lost = int(found[1]) if found else -1
        missing = [SAMPLES - len(each) for each in trained_samples(running.folder, ())]
        if finished.code or any(missing) or running.survivors or not found:
            death.problem = (
                f"exit code {finished.code}, samples missing {missing}, left running {len(running.survivors)}, back:"
                f" {bool(found)}\n{finished.output[-40000:]}"
            )
    return death


def main() -> int:
    """Runs and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--both", action="store_true", help="what watches a standing server is killed, too")
    parser.add_argument("--method", default="async_sgd")
    parser.add_argument("--save-every", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    deaths = []
    for number in range(1, arguments.runs + 1):
        stands, delay = number % 2 == 0, draw.uniform(0.2, 1.2)
        death = one_death(stands, arguments.method, arguments.save_every, delay, arguments.both)
        deaths.append(death)
        print(
            f"{number:3d} {'FAIL' if death.problem else 'ok  '} {'standing' if stands else 'embedded'} server killed"
            f" after {delay:.2f} s: went on after {death.to_go_on:.1f} s, {death.lost} updates lost {death.problem}",
            flush=True,
        )
    good = [death for death in deaths if not death.problem]
    times = [death.to_go_on for death in good if death.to_go_on == death.to_go_on] or [float("nan")]
    print(
        f"{len(good)} of {len(deaths)} runs finished with every sample trained; seconds to go on: median"
        f" {statistics.median(times):.1f}, most {max(times):.1f}; updates lost: most {max(d.lost for d in deaths)}"
    )
    return 0 if len(good) == len(deaths) else 1


if __name__ == "__main__":
    sys.exit(main())
