"""Groups that join one run on their own, under random faults: is nothing lost, and how long does training stand still?

A supervisor starts a standing server and as many groups as are asked for, each a process of its own, and starts one
again that has ended before the run, as torchrun with --max-restarts, SLURM with --requeue or a pod would. Faults come
at random, in equal parts of each kind, from a seed:

    kill        SIGKILL
    leave       SIGTERM: the group leaves in good order
    freeze      SIGSTOP, for longer than the server's heartbeat time-out, and SIGCONT
    cut         the link of a group's host carries nothing, for longer than the heartbeat time-out, and then again
    server      SIGKILL to the process that serves; the one that watches it forks another one
    command     only with --kinds: SIGKILL to both, and the command is started again, which imports torch

    python tests/benchmarks/faults.py --groups 4 --minutes 5 --faults 40 --seed 1

prints: how the last groups and the server ended; the longest time between two batches of any group; samples of an epoch
that no group has trained; goodput, and where the other time went; processes and files that are left; and the accuracy
beside that of a run that was left alone (--alone measures that, too).

Goodput is useful time over the time that groups were up. Useful are the seconds of a batch (--step), for each batch of
an epoch once, however often its samples were trained. A group is up from the start of its process to its end, without
the seconds for which it was frozen or cut off, which no software could use; the time to evict it, to rejoin and to
start is not left out. A batch sleeps for what is left of --step when the seconds that it computes here are taken off. A
start takes 4 s of a core: with four groups, two cores carry that for steps of 0.5 s, if nothing else runs on them.

--spare leaves some groups alone; what these and the server hold early and late in the run is shown (without "server"
among the --kinds it is one process): an hour of groups that come and go beside one that stays is

    python tests/benchmarks/faults.py --groups 4 --minutes 60 --faults 120 --kinds kill leave freeze cut --spare 1 \\
        --epochs 1000 --patience 0 --step 0.5

--peer trains the same with Lightning's DDP instead, for --minutes: torchrun is started again when a rank has ended, and
goes on from the last checkpoint, of which there is one in --save-every seconds. (With --max-restarts of its own the new
ranks do not find each other by gloo.) Compare it with the same --kinds and --patience 0:

    python tests/benchmarks/faults.py --groups 4 --minutes 10 --faults 33 --kinds kill leave freeze --step 0.5 \\
        --epochs 1000 --patience 0 [--peer]

Where this user may make network namespaces (Linux; root, or a system that allows user namespaces) the server and every
group has a host of its own, as ``examples/studies/emulated_network.py`` makes them. Elsewhere all are on one; no link
is cut.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "studies"))

from emulated_network import Hosts, Network, NoNamespacesError, with_own_network  # noqa: E402

KINDS = ("kill", "leave", "freeze", "server", "cut", "command")
ON_RANKS = ("kill", "leave", "freeze")
"""What may happen to a rank of DDP: it has no server, and all of its ranks are on one host here."""
SILENCE = 5.0
"""Seconds of silence after which the server evicts a group."""
AWAY = 9.0
"""Seconds that a group stays frozen, or a link cut."""
PORT = 5555
"""Of the server, where it has a host of its own."""
SAMPLES, BATCH = 2048, 16


# --- A group ---------------------------------------------------------------------------------------------------------


def train(folder: Path, epochs: int, step: float, more: argparse.Namespace) -> None:
    """One group, which joins whatever run there is."""
    log = (folder / f"trained-{os.getpid()}").open("a", buffering=1)

    def note(kind: str, *more: Any) -> None:
        log.write(json.dumps([kind, time.time(), *more]) + "\n")

    note("started")
    import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    strategy: Any
    if more.peer:
        strategy, devices, resumes = "ddp", int(os.environ["WORLD_SIZE"]), "last"
        every = max(1, round(more.save_every / step))
    else:
        from lightning_omni import OmniStrategy

        strategy, devices, resumes, every = OmniStrategy(), 1, None, None

    logging.basicConfig(format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES + 1024, 16, generator=generator)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))
    with torch.no_grad():
        for each in teacher.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
        y = teacher(x).argmax(1)
    data = TensorDataset(x[:SAMPLES], y[:SAMPLES], torch.arange(SAMPLES))
    held_out = TensorDataset(x[SAMPLES:], y[SAMPLES:])

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 6))
            self.computed = 0.0
            """Seconds of this processor in the batch before: a part of those of the emulated device."""

        def on_train_batch_start(self, *_: Any) -> None:
            note("begun")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(max(0.0, step - self.computed))
            self.began = time.process_time()  # without what it sleeps, or is stopped
            # A restarted DDP draws its epoch's samples from the first: what counts is that so many were trained.
            first = (self.trainer.global_step * devices + self.global_rank) * BATCH
            self.samples = list(range(first, first + BATCH)) if more.peer else batch[2].tolist()
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.computed = time.process_time() - self.began
            # Before the push: a group may die after its push has come, which then counts.
            note("trained", self.current_epoch, self.samples)

        def on_train_batch_end(self, *_: Any) -> None:
            note("answered")

        def on_validation_start(self) -> None:
            note("validates")

        def on_fit_end(self) -> None:
            note("ended")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
            steps = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), "interval": "step"}
            ]

    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[
            pl.callbacks.ModelCheckpoint(folder / "checkpoints", monitor="accuracy", mode="max", save_last=True)
            if not more.peer
            else pl.callbacks.ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=every),
            *([pl.callbacks.EMAWeightAveraging(decay=0.9)] if more.average else []),
        ],
        val_check_interval=more.validate_every,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loaders = DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(held_out, batch_size=64)
    trainer.fit(Net(), *loaders, ckpt_path=resumes)
    (folder / f"ended-{os.getpid()}").write_text(str(float(trainer.callback_metrics["accuracy"])))


# --- The supervisor --------------------------------------------------------------------------------------------------


class Fleet:
    """A server and the groups of a run; a group that ends before the run does is started again.

    Args:
        folder: of all that they write.
        args: of the command.
        hosts: the server's and one for each group; None if all are on this one.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, hosts: Hosts | None) -> None:
        self.folder, self._hosts, self._spared = folder, hosts, args.spare
        (folder / "tmp").mkdir()
        self._env = {
            **os.environ,
            "LIGHTNING_OMNI_KEY": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        self._member = [sys.executable, "-W", "ignore", __file__, "--member", str(folder)]
        self._member += ["--epochs", str(args.epochs), "--step", str(args.step)]
        self._member += ["--validate-every", str(args.validate_every)]
        self._member += ["--save-every", str(args.save_every)]
        self._member += ["--average"] if args.average else []
        self._serve = [sys.executable, "-m", "lightning_omni", "serve", "--once", *self._address()]
        self._serve += ["--heartbeat-timeout", str(SILENCE), "--state", str(folder / "state")]
        self._serve += ["--save-every", f"{args.save_every:g}s"]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.members: dict[int, subprocess.Popen[bytes] | Worker] = {}
        """By number of their places; where groups have hosts of their own, that of the host."""
        self.codes: Counter[int] = Counter()
        self.lives: list[tuple[int, float, float]] = []
        """Process, begin and end of each group."""
        self.absences: list[tuple[int, float, float]] = []
        """Process, begin and end of the times for which a group was frozen or cut off."""
        self._left: dict[int, tuple[int, float]] = {}
        self._logs = itertools.count()
        self._began: dict[int, float] = {}
        self.away: dict[int, str] = {}
        """Places whose group is frozen or cut off, and which of both."""

    def begin(self, groups: int) -> None:
        """The server comes up, and then the groups."""
        log = self.folder / "server.log"
        self.server = self._start(self._serve, log.name)
        deadline = time.monotonic() + 60
        while not (found := re.search(r"tcp://\S+(?=,)", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        self._env["LIGHTNING_OMNI_SERVER"] = found[0]
        for place in range(1, groups + 1):
            self._add(place)

    def _address(self) -> list[str]:
        if self._hosts is not None:
            return ["--host", self._hosts.addresses[0], "--port", str(PORT)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return ["--port", str(free.getsockname()[1])]

    def _add(self, place: int) -> None:
        """A group comes."""
        self.members[place] = self._start(self._member, f"group-{next(self._logs)}.log", place)
        self._began[place] = time.time()

    @property
    def at_work(self) -> list[int]:
        """Places whose group is neither frozen nor cut off, nor to be spared."""
        places = [place for place, member in self.members.items() if member.poll() is None]
        return [place for place in places if place not in self.away and place > self._spared]

    def disturb(self, place: int, kind: str) -> None:
        """Something happens to a group."""
        if kind in ("freeze", "cut"):
            self.away[place] = kind
            self._left[place] = self.members[place].pid, time.time()
        if kind == "cut":
            assert self._hosts is not None
            self._hosts.cut(place)
        else:
            signals = {"kill": signal.SIGKILL, "leave": signal.SIGTERM, "freeze": signal.SIGSTOP}
            os.kill(self.members[place].pid, signals[kind])

    def bring_back(self, place: int) -> None:
        """A group that was frozen or cut off is so no more."""
        pid, since = self._left.pop(place)
        if place in self.members and self.members[place].pid == pid:  # else it has ended meanwhile
            self.absences.append((pid, since, time.time()))
        if self.away.pop(place) == "cut":
            assert self._hosts is not None
            self._hosts.mend(place)
        elif place in self.members and self.members[place].poll() is None:
            os.kill(self.members[place].pid, signal.SIGCONT)

    def kill_server(self, whole: bool) -> bool:
        """The server dies, with the process that watches it or alone. Returns whether there was one to kill."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        serving = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        if whole:
            self.server.kill()
        else:
            for pid in serving:
                os.kill(pid, signal.SIGKILL)
        return whole or bool(serving)

    def poll(self, restart: bool = True) -> bool:
        """What has ended before the run is counted, and started again. Returns whether the run goes on."""
        if self.server.poll() not in (None, 0):
            self.server = self._start(self._serve, "server.log")
        goes_on = self.server.poll() is None
        for place, member in list(self.members.items()):
            if (code := member.poll()) is not None:
                del self.members[place]
                self.codes[code] += 1
                self.lives.append((member.pid, self._began[place], time.time()))
                if restart and goes_on and code != 0:
                    self._add(place)
        return goes_on

    def used(self) -> dict[str, dict[str, int]]:
        """What the server and the groups that are spared hold now, and what is in the system's shared memory."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        serving = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        spared = [place for place in range(1, 1 + self._spared) if place in self.members]
        processes = [("server", pid) for pid in serving[:1]]
        processes += [(f"group {place}", self.members[place].pid) for place in spared]
        used = {"/dev/shm": {"files": sum(1 for _ in Path("/dev/shm").iterdir())}}
        for name, pid in processes:
            with suppress(OSError, AttributeError):
                found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                assert found is not None
                used[name] = {"MB": int(found[1]) // 1024, "files": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())}
        return used

    def leavings(self) -> tuple[list[int], list[str]]:
        """Sessions of which a process is left, and files that are neither logs nor results."""
        sessions = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                sessions.add(int(stat.read_text().rpartition(")")[2].split()[3]))
        folders = self.folder / "tmp", self.folder / "state"
        files = [str(path.relative_to(self.folder)) for folder in folders for path in folder.rglob("*")]
        files = [file for file in files if "torchinductor" not in file and file != "state/lock"]  # torch's, and empty
        return sorted(sessions.intersection(process.pid for process in self._processes)), files

    def close(self) -> None:
        """What is left is killed; groups that did not end in time were up until now."""
        self.lives += [(member.pid, self._began[place], time.time()) for place, member in self.members.items()]
        self.members.clear()
        for process in self._processes:
            process.kill()  # does nothing to one that was waited for
            process.wait()

    def _start(self, command: Sequence[str], log: str, place: int = 0) -> subprocess.Popen[bytes]:
        here, env = command, self._env
        if self._hosts is not None:
            here, env = self._hosts.inside(place, command), {**env, "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / log).open("ab") as output:
            process = subprocess.Popen(
                here, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._processes.append(process)
        return process


class Worker:
    """A process that torchrun has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None as long as it lives, as of `subprocess.Popen`."""
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return None if state != "Z" else 1
        return 1


class Restarted(Fleet):
    """The ranks of Lightning's DDP, which are started again, all of them, when one has ended."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        super().__init__(folder, args, None)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
        torchrun += ["--monitor-interval", "0.1", "--nproc-per-node", str(args.groups)]
        self._serve = [*torchrun, *self._member[3:], "--peer"]

    def begin(self, groups: int) -> None:
        """The command starts all ranks."""
        self.server = self._start(self._serve, "group-0.log")

    def poll(self, restart: bool = True) -> bool:
        """A device is a rank's until another process takes its place. Returns whether the run goes on: it does."""
        if self.server.poll() is not None:
            self.server = self._start(self._serve, "group-0.log")
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children")
        for pid in children.read_text().split() if children.exists() else []:
            with suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for place in (1 + int(each[11:]) for each in variables if each.startswith(b"LOCAL_RANK=")):
                    self._take(place, Worker(int(pid)))
        return True

    def close(self) -> None:
        """torchrun ends its ranks; what is left is killed."""
        self.server.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.server.wait(15)
        for worker in self.members.values():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        super().close()

    def _take(self, place: int, worker: Worker) -> None:
        before, now = self.members.get(place), time.time()
        if before is None or before.pid != worker.pid:
            if before is not None:
                self.lives.append((before.pid, self._began[place], now))
            self.members[place], self._began[place] = worker, now


@contextmanager
def network(groups: int) -> Iterator[Hosts | None]:
    """A host for the server and one for each group, where this user may have them."""
    try:
        hosts = Hosts(Network(sites=(1 + groups,))).__enter__()
    except NoNamespacesError as error:
        print(f"no link is cut: {error}", flush=True)
        yield None
        return
    try:
        yield hosts
    finally:
        hosts.__exit__(None, None, None)


def disturbed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A run under faults; what came of it."""
    if args.peer:
        return _disturbed(folder, args, Restarted(folder, args), [kind for kind in args.kinds if kind in ON_RANKS])
    with network(args.groups) as hosts:
        possible = [kind for kind in args.kinds if kind != "cut" or hosts is not None]
        return _disturbed(folder, args, Fleet(folder, args, hosts), possible)


def _disturbed(folder: Path, args: argparse.Namespace, fleet: Fleet, possible: Sequence[str]) -> dict[str, Any]:
    chance = random.Random(args.seed)
    kinds = [possible[number % len(possible)] for number in range(args.faults)]
    chance.shuffle(kinds)
    moments = sorted(chance.uniform(10, 60 * args.minutes) for _ in kinds)
    began, done, back = time.monotonic(), Counter[str](), list[tuple[float, int]]()
    used = list[dict[str, dict[str, int]]]()
    log = (folder / "faults.log").open("a", buffering=1)
    try:
        fleet.begin(args.groups)
        while fleet.poll():
            now = time.monotonic() - began
            if now > 60 * args.minutes + args.patience:
                break
            if args.spare and now > 10 * (1 + len(used)):
                used.append(fleet.used())
            for due, place in [each for each in back if each[0] <= now]:
                back.remove((due, place))
                fleet.bring_back(place)
            if moments and moments[0] <= now:
                moments.pop(0)
                free = fleet.at_work
                place = chance.choice(free) if free else 0
                if kinds[-1] in ("server", "command"):
                    if not fleet.kill_server(whole=kinds[-1] == "command"):
                        continue
                elif len(free) + args.spare > 1:
                    fleet.disturb(place, kinds[-1])
                    if place in fleet.away:
                        back.append((now + AWAY, place))
                else:
                    continue
                done[kinds[-1]] += 1
                print(f"{time.time():.1f} {kinds.pop()} {place}", file=log)
            time.sleep(0.1)
        for place in list(fleet.away):
            fleet.bring_back(place)
        deadline = time.monotonic() + min(30, args.patience)
        while fleet.members and time.monotonic() < deadline:
            fleet.poll(restart=False)
            time.sleep(0.1)
        server = fleet.server.poll()
        left, files = fleet.leavings()
    finally:
        fleet.close()
    said = {"faults": dict(done), "left": left, "files": files, "server": server, "codes": dict(fleet.codes)}
    return {**said, "used": growth(used), **read(folder, args, fleet.lives, fleet.absences)}


def growth(used: Sequence[dict[str, dict[str, int]]]) -> dict[str, str]:
    """How much of what was held after a tenth of the run, and at its end: medians over a tenth of it."""
    tenth = len(used) // 10
    if not tenth:
        return {}
    early, late = used[tenth : 2 * tenth], used[-tenth:]
    kinds = {(name, kind) for each in early for name, held in each.items() for kind in held}
    medians = {
        (name, kind): [statistics.median(each[name][kind] for each in part if name in each) for part in (early, late)]
        for name, kind in sorted(kinds)
        if all(any(name in each for each in part) for part in (early, late))
    }
    return {f"{name}, {kind}": f"{first:g} to {last:g}" for (name, kind), (first, last) in medians.items()}


Event = list[Any]
"""What happened in a group, when, and more of a trained batch: its epoch and its samples."""


def spent(
    lives: dict[int, list[Event]], step: float, absences: Sequence[tuple[int, float, float]]
) -> defaultdict[str, float]:
    """Where the time of groups went: seconds by what they did.

    Args:
        lives: what happened in each process.
        step: seconds of a batch.
        absences: process, begin and end of the times that are not counted.
    """
    seconds = defaultdict[str, float](float)
    for pid, life in lives.items():
        epochs = [event[2] if event[0] == "trained" else None for event in life]
        epoch = -1
        for number, (before, after) in enumerate(itertools.pairwise(life), 1):
            took = after[1] - before[1]
            for _, begin, end in (each for each in absences if each[0] == pid):
                took -= max(0.0, min(end, after[1]) - max(begin, before[1]))
            if after[0] == "started" and before[0] != "launched":  # again, in the same process
                what = "rejoining"
            elif after[0] == "gone":
                what = "ending" if before[0] == "ended" else "what was under way at a fault"
            elif before[0] in ("launched", "started"):
                what = "starting"
            elif after[0] == "trained":
                seconds["computing"] += step
                took -= step
                what, epoch = "the rest of batches", after[2]
            else:
                following = next((each for each in epochs[number:] if each is not None), epoch)
                is_between = "validates" in (before[0], after[0]) or following != epoch or after[0] == "ended"
                what = "validation and epoch ends" if is_between else "the rest of batches"
            seconds[what] += took
    return seconds


def events(file: Path) -> list[Event]:
    """What a group has written down; its last line may be missing in part."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("]")]


def read(
    folder: Path, args: argparse.Namespace, known: Sequence[tuple[int, float, float]], absences: Sequence[Any]
) -> dict[str, Any]:
    """What became of a run.

    Args:
        folder: in which the groups have written down what they did.
        args: of the command.
        known: process, begin and end of each group.
        absences: the same of the times for which one was frozen or cut off.
    """
    lives = {
        pid: [["launched", began], *events(folder / f"trained-{pid}"), ["gone", ended]] for pid, began, ended in known
    }
    lines = [event for life in lives.values() for event in life if event[0] == "trained"]
    seconds = spent(lives, args.step, absences)
    times = sorted(at for _, at, _, _ in lines)
    trained = Counter((epoch, sample) for _, _, epoch, samples in lines for sample in samples)
    all_samples = {(epoch, sample) for epoch in range(args.epochs) for sample in range(SAMPLES)}
    gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
    longest, until = max(gaps, default=(0.0, 0.0))
    faults = [line.split() for line in (folder / "faults.log").read_text().splitlines()]
    accuracies = [float(file.read_text()) for file in folder.glob("ended-*")]
    useful = len(trained) / BATCH * args.step
    seconds["training what had been trained"] = seconds.pop("computing") - useful
    up = useful + sum(seconds.values())
    return {
        "seconds": times[-1] - times[0] if times else 0.0,
        "standstill": longest,
        "after": [kind for at, kind, _ in faults if float(at) <= until][-2:],
        "missing": len(all_samples - set(trained)),
        "twice": sum(count - 1 for count in trained.values()),
        "goodput": useful / up,
        "else": {what: round(each / up, 3) for what, each in sorted(seconds.items(), key=lambda item: -item[1])},
        "failures": sum(file.read_text(errors="replace").count("Traceback") for file in folder.glob("group-*.log")),
        "accuracy": statistics.median(accuracies) if accuracies else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=5.0, help="faults come for so long")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds after the last fault")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a batch")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:-1], help="what happens")
    parser.add_argument("--validate-every", type=float, default=1.0, help="part of an epoch")
    parser.add_argument("--spare", type=int, default=0, help="groups to which nothing happens; what they hold is shown")
    parser.add_argument("--save-every", type=float, default=2.0, help="seconds between two saves of the server's state")
    parser.add_argument("--peer", action="store_true", help="DDP that torchrun starts again, instead")
    parser.add_argument("--average", action="store_true", help="with EMAWeightAveraging")
    parser.add_argument("--alone", action="store_true", help="also a run without faults")
    parser.add_argument("--keep", type=Path, help="where logs stay")
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member is not None:
        train(args.member, args.epochs, args.step, args)
        return
    with suppress(NoNamespacesError):
        with_own_network()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # cleaned up as after Ctrl-C
    for faults in (args.faults, 0) if args.alone else (args.faults,):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) if args.keep is None else args.keep / f"{faults}-faults"
            folder.mkdir(parents=True, exist_ok=True)
            args.faults = faults
            said = disturbed(folder, args)
        print(
            f"{args.groups} {'ranks of DDP' if args.peer else 'groups'}, seed {args.seed},"
            f" {said['faults'] or 'no faults'}: exit codes {said['codes']},"
            f" {said['failures']} tracebacks,"
            f" of the server {said['server']}, {len(said['left'])} processes and {len(said['files'])} files left"
            f" {said['files'][:3] or ''}, {said['seconds']:.0f} s, longest standstill {said['standstill']:.1f}"
            f" s after {said['after']}, {said['missing']} samples missing, {said['twice']} trained more than once,"
            f" goodput {said['goodput']:.2f} (the rest: {said['else']}), accuracy {said['accuracy']:.3f}"
            f"{', held early and late: ' + str(said['used']) if said['used'] else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
