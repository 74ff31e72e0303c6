"""Two commits side by side: whether the golden cases give the same bits, and what each takes.

    OMP_NUM_THREADS=1 python tests/benchmarks/compare.py OLD [NEW] [--pairs 15] [--only simulator] [--real]

NEW is HEAD if it is left out. Both are checked out into a temporary directory, which is gone afterwards. Each runs
its own golden script: outcomes do not depend on names. Then both are timed in turns, and the medians of NEW over OLD
are printed with their quartiles and the 95 % interval of the geometric mean: seconds of processor time for one
simulated update, and for one push and pull at the server's state machine, with one large tensor and with many small
ones; and seconds of one step of a rank that exchanges with a server in another process. ``--real`` adds the figures of
step_time.py and transport.py of each commit. The exit code is 1 if a bit differs, and 2 if one of the commits cannot
be run.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = Path("tests", "golden", "record.py")
PAIRS, REAL_PAIRS = 15, 3
BEST_OF = 3
"""Runs of which the shortest counts: what else happens on a machine only ever adds."""
TENSORS = 50
"""Tensors of the models that ranks exchange, but for the smallest."""
FRESH = 3
"""Pairs after which both processes are started again: where memory happens to lie makes one faster throughout."""


class CannotRun(Exception):
    """A commit cannot be checked out or run; the message says why."""


# --- What is timed, in a process of either commit --------------------------------------------------------------------


def simulated_updates() -> Callable[[], float]:
    """Seconds of one simulated update of a small network, with 16 groups."""
    from golden.simulated import fractions, loss, sgd
    from torch import nn
    from torch.utils.data import TensorDataset

    from lightning_omni.simulator import Cluster, Computation, Jitter, Limits, Link, Workload, simulate

    data = TensorDataset(fractions(1, 512, 16).float(), fractions(2, 512, 4).float())
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    cluster = Cluster.even(16, jitter=Jitter("gamma", 0.3), link=Link(1e8, 1e-4), update_seconds=1e-5)
    updates = 300

    def once() -> float:
        began = time.process_time()
        simulate(
            "async_sgd",
            16,
            cluster,
            Workload(model, data, loss=loss, optimizer=sgd),
            batch_size=4,
            limits=Limits(updates=updates),
            computation=Computation(batched=False),
        )
        return (time.process_time() - began) / updates

    return once


def pushes(shapes: Mapping[str, tuple[int, ...]], count: int) -> Callable[[], float]:
    """Seconds of one push, with the answer's weights, at a server's state machine without sockets."""
    import torch
    from golden.served import Session, flat_bytes, weights_of

    from lightning_omni.methods.model.server_optimizer import describe, hyperparameters_of
    from lightning_omni.wire import messages as m

    session = Session(2)
    session.join_all()
    session.form("async_sgd", (0,), (1,))
    parameters = weights_of(0, shapes)
    optimizer = torch.optim.SGD(list(parameters.values()), lr=1e-3, momentum=0.9)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    session.seed({"optimizer": describe(optimizer, names), "weights": weights, "clock": 0})
    payload = torch.frombuffer(bytearray(flat_bytes(list(weights.values()))), dtype=torch.uint8)
    settings = tuple(hyperparameters_of(optimizer))
    core, clock, pushed = session.core, [0, 0], [0, 0]
    numbered = "sequence" in m.PushMessage.__struct_fields__  # an older commit's are not

    def once() -> float:
        began = time.process_time()
        for number in range(count):
            group = number % 2
            numbers: dict[str, Any] = {"incarnation": 1, "sequence": pushed[group] + 1} if numbered else {}
            push = m.PushMessage(
                optimizer=0, read_at=clock[group], present=(True,) * len(shapes), hyperparameters=settings, epoch=-1,
                trained=0, nbytes=payload.numel(),
                **numbers,
            )  # fmt: skip
            pushed[group] += 1
            peer = b"d%d" % group
            core.check_payload(peer, push)
            (out,) = core.receive(m.DATA, peer, push, payload, session.now)
            assert isinstance(out.message, m.Weights), out.message
            clock[group] = out.message.clock
            core.status_service.end()
        return (time.process_time() - began) / count

    return once


def exchanges(nbytes: int, count: int) -> Callable[[], float]:
    """Seconds of one step of a group of one rank, from the gradient to the weights, beside a group that rests."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    folder = tempfile.mkdtemp(prefix="omni-compare-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for rank in range(2):
        arguments = (rank, str(Path(folder, "store")), nbytes, count, theirs, os.getpid())
        context.Process(target=train, args=arguments, daemon=True).start()

    def once() -> float:
        ours.send("go")
        return float(ours.recv())

    return once


def train(rank: int, store: str, nbytes: int, count: int, asked: Any, parent: int) -> None:
    """A rank of that run, which ends with its parent."""
    import torch
    import torch.distributed as dist

    from lightning_omni import OmniOptimizer, World, WorldOptions

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(2, options=WorldOptions(groups=2))
    tensors = 1 if nbytes < TENSORS * 4 else TENSORS
    model = torch.nn.ParameterList([torch.zeros(nbytes // 4 // tensors) for _ in range(tensors)])
    world.wrapper.broadcast_initial(model)
    optimizer = OmniOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), world)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with world.training():
        while rank == 0:
            try:
                asked.recv()
            except EOFError:  # the parent ends
                os._exit(0)
            began = time.perf_counter()
            for _ in range(count):
                optimizer.step()
            asked.send((time.perf_counter() - began) / count)
        threading.Event().wait()


MEASURES: dict[str, Callable[[], Callable[[], float]]] = {
    "simulator, an update": simulated_updates,
    "server, a push of 1 MB": lambda: pushes({"weight": (512, 512)}, 100),
    "server, a push of 200 tensors": lambda: pushes({f"weight {place}": (4,) for place in range(200)}, 60),
    "rank, an exchange of 4 bytes": lambda: exchanges(4, 200),
    "rank, an exchange of 1 MB": lambda: exchanges(1_000_000, 100),
    "rank, an exchange of 100 MB": lambda: exchanges(100_000_000, 3),
}


def serve_measures() -> None:
    """For each name of a measure that comes in, the seconds that it takes; in a process of one commit."""
    import torch

    torch.set_num_threads(1)
    ready: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            ready[name] = MEASURES[name]()
            ready[name]()  # memory is found, and modules are imported
        sys.stdout.write(f"{min(ready[name]() for _ in range(BEST_OF))}\n")
        sys.stdout.flush()


# --- The two commits -------------------------------------------------------------------------------------------------


def git(*arguments: str) -> str:
    """What git says.

    Raises:
        CannotRun: it refuses.
    """
    ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise CannotRun(f"git {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout.strip()


def commit_of(name: str) -> str:
    """The commit of that name.

    Raises:
        CannotRun: there is none.
    """
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except CannotRun as error:
        raise CannotRun(f"{name!r} is no commit of {ROOT}; pass one that git log shows") from error


@contextmanager
def checked_out(commits: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """A worktree of each commit, by the same names; gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="omni-compare-") as folder:
        trees = {name: Path(folder, name) for name in commits}
        try:
            for name, commit in commits.items():
                git("worktree", "add", "--detach", "--quiet", str(trees[name]), commit)
            yield trees
        finally:
            for tree in trees.values():
                if tree.exists():
                    git("worktree", "remove", "--force", str(tree))
            git("worktree", "prune")


def environment(tree: Path) -> dict[str, str]:
    """Of a process that imports the package of this tree."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def python(tree: Path, *arguments: str) -> str:
    """What a Python program prints that imports the package of a tree.

    Raises:
        CannotRun: it fails.
    """
    ran = subprocess.run(
        [sys.executable, *arguments], env=environment(tree), cwd=tree, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        said = ran.stderr.strip().splitlines() or ["(it said nothing)"]
        raise CannotRun(f"{' '.join(arguments)} with the package of {tree.name}: {said[-1]}")
    return ran.stdout


def check_package(tree: Path) -> None:
    """Raises `CannotRun` unless the package that is imported is that of the tree."""
    where = python(tree, "-c", "import lightning_omni; print(lightning_omni.__file__)").strip()
    if tree.resolve() not in Path(where).resolve().parents:
        raise CannotRun(f"lightning_omni is imported from {where} rather than from {tree}")


class Timed:
    """A process that times one commit, whenever it is asked.

    It runs this script or, where what that drives has other names in the commit, the commit's own.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._own = tree / "tests" / "benchmarks" / Path(__file__).name
        self._is_own = False
        self._process = self._start(Path(__file__).resolve())

    def _start(self, script: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), "--serve-measures"],
            env=environment(self._tree), cwd=self._tree, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Timed:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds(self, measure: str) -> float:
        """The time of a measure.

        Raises:
            CannotRun: the commit cannot be timed so.
        """
        line = self._ask(measure)
        if not line and self._own.exists() and not self._is_own:
            self._process.communicate()
            self._is_own, self._process = True, self._start(self._own)
            line = self._ask(measure)
        if not line:
            _, errors = self._process.communicate()
            said = errors.strip().splitlines() or ["(it said nothing)"]
            raise CannotRun(f"{measure} with the package of {self._tree.name}: {said[-1]}")
        return float(line)

    def _ask(self, measure: str) -> str:
        """Its answer; empty if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{measure}\n")
            self._process.stdin.flush()
            return self._process.stdout.readline()
        except BrokenPipeError:
            return ""


# --- Comparing -------------------------------------------------------------------------------------------------------


def different_bits(trees: Mapping[str, Path]) -> tuple[list[str], int]:
    """Return a line for each golden case that gives other bits, and the number of cases."""
    found = {name: golden_cases(tree) for name, tree in trees.items()}
    lines = [f"{name}: in one of the two only" for name in sorted(found["old"].keys() ^ found["new"].keys())]
    for name in sorted(found["old"].keys() & found["new"].keys()):
        old, new = found["old"][name], found["new"][name]
        if old != new:
            bits = {**old["bits"], **new["bits"]}
            parts = [part for part in sorted(bits) if old["bits"].get(part) != new["bits"].get(part)]
            order = " (another order, or other counts)" if old["order"] != new["order"] else ""
            lines.append(f"{name}: {', '.join(parts) or 'numbers'}{order}")
    return lines, len({**found["old"], **found["new"]})


def golden_cases(tree: Path) -> dict[str, Any]:
    """Return the outcomes of the golden cases of a tree."""
    if not (tree / GOLDEN).exists():
        raise CannotRun(f"one of the two commits has no {GOLDEN}")
    cases: dict[str, Any] = json.loads(python(tree, str(tree / GOLDEN), "--print"))["cases"]
    return cases


def in_turns(pairs: int) -> Iterator[tuple[str, str]]:
    """Who is first, pair by pair."""
    for number in range(pairs):
        yield ("old", "new") if number % 2 == 0 else ("new", "old")


def times(trees: Mapping[str, Path], measures: list[str], pairs: int) -> Iterator[tuple[str, float]]:
    """Measure by measure and pair by pair, the time of ``new`` over that of ``old``."""
    for begun in range(0, pairs, FRESH):
        with ExitStack() as stack:
            timed = {name: stack.enter_context(Timed(tree)) for name, tree in trees.items()}
            for measure in measures:
                for turn in in_turns(min(FRESH, pairs - begun)):
                    seconds = {name: timed[name].seconds(measure) for name in turn}
                    yield measure, seconds["new"] / seconds["old"]


def figures_of(step_time: str, transport: str) -> dict[str, float]:
    """The figures that the two scripts print."""
    found: dict[str, float] = {}
    ratios = re.findall(r"^ratio ([\d.]+),", step_time, re.MULTILINE)
    found |= {f"step_time.py, {name}": float(value) for name, value in zip(_RATIOS, ratios, strict=True)}
    size = ""
    for line in transport.splitlines():
        if begins := re.match(r"([\d.]+ MB), ", line):
            size = begins[1]
        elif way := re.match(r"  (ipc|TCP|TCP with CURVE)\s+([\d.]+) ms", line):
            found[f"transport.py, {size} over {way[1]}"] = float(way[2])
    return found


_RATIOS = ("groups=1 over DDP", "beside a slow group over alone")


def spread(ratios: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return low, middle, high


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    off = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(middle - off), math.exp(middle + off)


def compare(arguments: argparse.Namespace) -> int:
    """Compares and prints; returns the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    console = Console()
    commits = {"old": commit_of(arguments.old), "new": commit_of(arguments.new)}
    measures = [name for name in MEASURES if arguments.only in name]
    repeats = [] if arguments.repeats is None else ["--repeats", str(arguments.repeats)]
    ratios: dict[str, list[float]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(*columns, console=console, transient=True))
        steps = 2 + 2 * len(measures) * arguments.pairs + (4 * REAL_PAIRS if arguments.real else 0)
        task = bar.add_task("golden cases", total=steps)
        trees = stack.enter_context(checked_out(commits))
        for tree in trees.values():
            check_package(tree)
        changed, count = different_bits(trees)
        bar.advance(task, 2)
        bar.update(task, description="times")
        for measure, ratio in times(trees, measures, arguments.pairs):
            ratios.setdefault(measure, []).append(ratio)
            bar.advance(task, 2)
        for turn in in_turns(REAL_PAIRS if arguments.real else 0):
            bar.update(task, description="real processes")
            found: dict[str, dict[str, float]] = {}
            for name in turn:
                said = []
                for script in ("step_time.py", "transport.py"):
                    path = trees[name] / "tests" / "benchmarks" / script
                    said.append(python(trees[name], str(path), *repeats))
                    bar.advance(task)
                found[name] = figures_of(*said)
            for figure, value in found["new"].items():
                ratios.setdefault(figure, []).append(value / found["old"][figure])
    for line in changed:
        console.print(f"other bits: {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{count - len(changed)} of {count} golden cases give the same bits", highlight=False)
    title = f"{commits['new'][:9]} over {commits['old'][:9]}"
    table = Table("time", "new / old", "quartiles", "95 %", "pairs", title=title)
    for measure, values in ratios.items():
        low, middle, high = spread(values)
        least, most = interval(values)
        table.add_row(
            measure, f"{middle:.3f}", f"{low:.3f} and {high:.3f}", f"{least:.3f} to {most:.3f}", str(len(values))
        )
    if ratios:
        console.print(table)
    return int(bool(changed))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, as git knows it")
    parser.add_argument("new", nargs="?", default="HEAD", help="another one (HEAD)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"repeats of each time, 0 for bits alone ({PAIRS})")
    parser.add_argument("--only", default="", help="only times with this in their name")
    parser.add_argument("--real", action="store_true", help="also step_time.py and transport.py of each (many minutes)")
    parser.add_argument(
        "--repeats", type=int, help="of those two scripts; as many as they make by themselves if left out"
    )
    arguments = parser.parse_args()
    if arguments.pairs < 0:
        parser.error(f"--pairs {arguments.pairs}: pass 1 or more, or 0 to compare bits alone")
    if not any(arguments.only in name for name in MEASURES):
        parser.error(f"--only {arguments.only!r}: pass a part of one of {', '.join(map(repr, MEASURES))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was checked out is removed then, too
    try:
        return compare(arguments)
    except CannotRun as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve-measures"]:
        serve_measures()
    else:
        sys.exit(main())
