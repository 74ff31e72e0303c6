"""GPU A-SGD: when do more asynchronous clients train faster, and what does a warm start do?

    python examples/studies/gpu_asgd.py            # about 4 minutes on two cores
    python examples/studies/gpu_asgd.py --quick    # a minute

After Paine, Jin, Yang, Lin, Huang 2013, "GPU Asynchronous Stochastic Gradient Descent to Speed Up Neural Network
Training", arXiv:1312.6186, who trained a convolutional network on ImageNet. Every client trains alone for n_sync
batches; then the server adds what has changed, and its weights overwrite the client's. Here a small network learns
Fashion-MNIST; times are those of GPUs that take 0.3 s for a batch, and of a server through which one client's weights
pass in 0.1 s each way. A warm start has the weights of half an epoch of one client, whose time does not count. Cold and
warm starts race for different accuracies, each against one client from the same start. Each setting has the best rate
of the same grid; one number compares at equal rates instead.

What to expect: from the warm start eight clients reach a speed-up of 1.7 to 2.6 over one (3.2 was published); but not
every added client helps. With n_sync of 1, two clients only make up for the exchange, which takes about as long as a
batch. With 5 and with 25, four clients are slower than two if each number may choose its rate: changes of all clients
add up, so the more clients, and the longer they train alone, the smaller the best rate. At equal rates, where one
client is limited by too small a rate, eight clients reach speed-ups of 2.5 to 6.6. From random weights more
clients do not help: steps of eight clients bring less there, or have to be smaller, and four or eight that train alone
for 25 batches never reach the target. Updates in lock-step (``warm_start=``) do not make up for that: the target is
reached when asynchrony begins, but with one step for all clients in a round, which takes them more than six times as
long as one client's batch, because all of them send at once over the card that they share. Every setting is simulated
once, with one seed: small differences mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comparison import (
    Finding,
    Images,
    Run,
    Stopwatch,
    best,
    caption,
    command_line,
    console,
    falls,
    load_images,
    network,
    new_figure,
    save_figure,
    sgd,
    show_findings,
    show_table,
    simulate_all,
)
from torch import nn

from lightning_omni.methods import Downpour
from lightning_omni.palette import FAINT, ONE_GROUP, line_styles, number_colours
from lightning_omni.simulator import Cluster, Jitter, Link
from lightning_omni.trace import Trace

N_SYNC = (1, 5, 25)
CLIENTS = (1, 2, 4, 8)
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
MOMENTUM = 0.9
BATCH_SIZE = 32
LOCK_STEPS = 150
"""Server updates in lock-step, where asynchrony begins with them (``warm_start=``)."""
TARGETS = {"warm": 0.85, "cold": 0.75, "lock-step": 0.75}
"""Test accuracies that are raced for from each start."""

STEP_SECONDS, JITTER = 0.3, 0.1
COPY_SECONDS, SERVER_SECONDS = 0.04, 0.1
"""Of all weights, one way: between GPU and host of a client, and through the server's network card."""

Setting = tuple[str, int, int]
"""Start, n_sync, clients."""


@dataclass(frozen=True)
class Started(Run):
    """A run that begins with given weights.

    Args:
        weights: by name; none for random ones.
    """

    weights: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """The network that the run begins with."""
        model = super().model()
        if self.weights:
            model.load_state_dict({name: torch.tensor(weight) for name, weight in self.weights.items()})
        return model


def cluster_of(clients: int) -> Cluster:
    """Equal clients around one server, whose card they share. No weights travel while they are copied."""
    nbytes = 4 * sum(parameter.numel() for parameter in network().parameters())
    return Cluster.even(
        clients,
        STEP_SECONDS / BATCH_SIZE,
        jitter=Jitter("lognormal", cv=JITTER),
        link=Link(latency=COPY_SECONDS),
        server=Link(nbytes / SERVER_SECONDS),
    )


def run_of(start: str, n_sync: int, clients: int, lr: float, epochs: int, weights: Mapping[str, Any]) -> Started:
    """One simulation; evaluated about every 50 batches of all clients together, whatever n_sync is."""
    in_lock_step = start == "lock-step"  # then an update is one batch of each client
    return Started(
        Downpour(n_push=n_sync, n_fetch=n_sync, send="updates", warm_start=LOCK_STEPS if in_lock_step else 0),
        clients,
        cluster_of(clients),
        partial(sgd, lr=lr, momentum=MOMENTUM),
        batch_size=BATCH_SIZE,
        epochs=epochs,
        evaluate_every=50 // (clients if in_lock_step else n_sync),
        target=TARGETS[start],
        weights=weights if start == "warm" else {},
    )


def train_alone(images: Images) -> Trace:
    """A client alone for half an epoch: the warm start."""
    batches = len(images.train[0]) // BATCH_SIZE // 2
    run = run_of("cold", 1, 1, 0.01, epochs=1, weights={})
    return Run(run.method, 1, run.cluster, run.optimizer, BATCH_SIZE, updates=batches, evaluate_every=None).simulate(
        images
    )


# --- What came out ---------------------------------------------------------------------------------------------------


class Outcome:
    """Seconds to the target: of each setting with each learning rate, and with the best."""

    def __init__(self, traces: Mapping[tuple[Setting, float], Trace]) -> None:
        self.traces: dict[Setting, Trace] = {}
        self.rate: dict[Setting, float] = {}
        self.by_rate: dict[tuple[Setting, float], float] = {
            (setting, lr): _seconds(setting, trace) for (setting, lr), trace in traces.items()
        }
        for setting in dict.fromkeys(setting for setting, _ in traces):
            key = best({key: trace for key, trace in traces.items() if key[0] == setting}, partial(_seconds, setting))
            self.traces[setting], self.rate[setting] = traces[key], key[1]
        self.n_sync = tuple(dict.fromkeys(setting[1] for setting in self.traces if setting[2] > 1))
        self.clients = tuple(dict.fromkeys(setting[2] for setting in self.traces))

    def seconds(self, start: str, n_sync: int, clients: int) -> float:
        """With the best learning rate of the setting; infinite if none gets to the target."""
        setting = _setting(start, n_sync, clients)
        return self.by_rate[setting, self.rate[setting]]

    def speedup(self, start: str, n_sync: int, clients: int) -> float:
        """Over one client with its best learning rate; 0 if the target is never reached."""
        return _ratio(
            self.seconds("cold" if start == "lock-step" else start, 1, 1), self.seconds(start, n_sync, clients)
        )

    def speedup_at_equal_rate(self, start: str, n_sync: int, clients: int) -> float:
        """Over one client with the same learning rate, where that helps most."""
        alone, together = _setting(start, 1, 1), _setting(start, n_sync, clients)
        rates = [lr for setting, lr in self.by_rate if setting == together]
        return max(_ratio(self.by_rate[alone, lr], self.by_rate[together, lr]) for lr in rates)


def _setting(start: str, n_sync: int, clients: int) -> Setting:
    return (start, n_sync, clients) if clients > 1 else (start, 1, 1)  # alone, n_sync means nothing


def _seconds(setting: Setting, trace: Trace) -> float:
    seconds = trace.time_to("steady", TARGETS[setting[0]])
    return seconds if np.isfinite(seconds) else float("inf")


def _ratio(alone: float, together: float) -> float:
    return alone / together if np.isfinite(alone) and np.isfinite(together) else 0.0


def findings(out: Outcome) -> list[Finding]:
    """The paper's findings beside what came out."""
    most = out.clients[-1]
    several = [(n_sync, clients) for n_sync in out.n_sync for clients in out.clients[1:]]
    tuned = {pair: out.speedup("warm", *pair) for pair in several}
    equal = {pair: out.speedup_at_equal_rate("warm", *pair) for pair in several}
    by_n_sync = {n: [out.seconds("warm", n, clients) for clients in out.clients] for n in out.n_sync}
    return [
        Finding(
            "time to the target from a warm start, each setting with its best learning rate",
            "from a warm start more GPU clients give a clear speed-up, at all values of n_sync [Paine et al. 2013,"
            " Figure 3]",
            "\n".join(f"n_sync {n}: " + ", ".join(map(_told, seconds)) for n, seconds in by_n_sync.items())
            + f"\n(with {', '.join(map(str, out.clients))} clients)",
            [bool(np.isfinite(seconds).all()) and falls(seconds) for seconds in by_n_sync.values()],
        ),
        Finding(
            "the same, all clients with the learning rate of the single one",
            "from a warm start more GPU clients give a clear speed-up, at all values of n_sync [Paine et al. 2013,"
            " Figure 3]",
            "\n".join(
                f"n_sync {n}: " + ", ".join(f"{clients}: {equal[n, clients]:.1f}" for clients in out.clients[1:])
                for n in out.n_sync
            )
            + "\n(clients: speed-up over one, at the rate where that is most)",
            [falls(-speedup for speedup in (1.0, *(equal[n, c] for c in out.clients[1:]))) for n in out.n_sync],
        ),
        Finding(
            "largest speed-up over one client",
            "up to 3.2 [Paine et al. 2013]",
            f"{max(tuned.values()):.1f} times, each with its best learning rate;\n"
            f"{max(equal.values()):.1f} times at equal learning rates",
            [max(tuned.values()) >= 3.2, max(equal.values()) >= 3.2],
        ),
        Finding(
            f"{most} clients, cold start against warm start",
            "the cold start is a case of its own, studied apart from the warm one [Paine et al. 2013]; looked for here:"
            " it gains less from more clients",
            "\n".join(
                f"n_sync {n}: cold {_times(out.speedup('cold', n, most))}, warm {_times(tuned[n, most])},"
                f" cold with {LOCK_STEPS} updates in lock-step {_times(out.speedup('lock-step', n, most))}"
                for n in out.n_sync
            ),
            [out.speedup("cold", n, most) < tuned[n, most] for n in out.n_sync],
        ),
    ]


def _told(seconds: float) -> str:
    return f"{seconds:.0f} s" if np.isfinite(seconds) else "never"


def _times(speedup: float) -> str:
    return f"speed-up of {speedup:.1f}" if speedup else "never there"


def draw(out: Outcome, found: list[Finding], images: Images, path: Path) -> None:
    """Speed-ups from a warm start, tuned and not; courses from both starts."""
    figure, ((tuned, equal), (warm, cold)) = new_figure(2, 2)
    colours = number_colours(out.n_sync)
    styles = dict(zip(out.n_sync, line_styles(list(colours.values())), strict=True))
    for n_sync in out.n_sync:
        for axes, speedup in ((tuned, out.speedup), (equal, out.speedup_at_equal_rate)):
            speedups = [1.0, *(speedup("warm", n_sync, clients) for clients in out.clients[1:])]
            axes.plot(out.clients, speedups, label=f"n_sync {n_sync}", **styles[n_sync])
            axes.set(xlabel="clients", ylabel="speed-up over one client")
    settings = [(1, 1), *((n_sync, out.clients[-1]) for n_sync in out.n_sync)]
    for axes, starts in ((warm, ("warm",)), (cold, ("cold", "lock-step"))):
        for start in starts:
            for n_sync, clients in settings if start != "lock-step" else settings[1:]:
                setting = _setting(start, n_sync, clients)
                course, whose = out.traces[setting].evaluated, f"{clients} clients, n_sync {n_sync}"
                axes.plot(
                    course["time"],
                    course["steady"],
                    "--" if start == "lock-step" else "-",
                    color=ONE_GROUP if clients == 1 else colours[n_sync],
                    marker="." if len(course["time"]) < 30 else "",  # a run of one evaluation is a point
                    label=f"{start}: {whose if clients > 1 else 'one client'}, lr {out.rate[setting]:g}",
                )
        axes.axhline(TARGETS[starts[0]], color=FAINT, label="target")
        axes.set(xlabel="virtual time / s", ylabel="test accuracy")
    for axes, finding in zip((tuned, equal, warm, cold), found, strict=True):
        caption(axes, finding)
        axes.legend(fontsize="x-small")
    save_figure(figure, f"GPU A-SGD ({images.source})", path)


def main() -> None:
    """Simulate, show, and draw."""
    arguments = command_line(__doc__, "gpu_asgd.png").parse_args()
    stopwatch, images = Stopwatch(), load_images()
    is_quick, epochs = arguments.quick, 3
    n_syncs = N_SYNC[1:2] if is_quick else N_SYNC
    sizes = CLIENTS[::3] if is_quick else CLIENTS
    rates = RATES[1:] if is_quick else RATES
    settings: list[Setting] = [(start, 1, 1) for start in ("warm", "cold")]
    settings += [(start, n, clients) for start in ("warm", "cold") for n in n_syncs for clients in sizes[1:]]
    settings += [("lock-step", n, sizes[-1]) for n in n_syncs]
    alone = train_alone(images)
    runs = {
        (setting, lr): run_of(*setting, lr, epochs, alone.weights)
        for setting in sorted(settings, key=lambda setting: setting[1])  # longest first
        for lr in rates
    }
    out = Outcome(simulate_all(runs, images, "GPU A-SGD", arguments.processes))
    rows = [
        (
            start,
            str(n_sync) if clients > 1 else "",
            str(clients),
            f"{TARGETS[start]:.1%}",
            _told(out.seconds(start, n_sync, clients)),
            f"{out.rate[start, n_sync, clients]:g}" if out.speedup(start, n_sync, clients) else "-",
            f"{out.speedup(start, n_sync, clients):.1f}" if out.speedup(start, n_sync, clients) else "-",
            f"{out.traces[start, n_sync, clients].mean_staleness:.1f}",
        )
        for start, n_sync, clients in settings
    ]
    columns = ("start", "n_sync", "clients", "target", "seconds to it", "learning rate", "speed-up", "staleness")
    show_table(f"{images.source}; the warm start has {alone.evaluated['accuracy'][-1]:.1%}", columns, rows)
    found = findings(out)
    show_findings("GPU asynchronous SGD", found)
    draw(out, found, images, arguments.out)
    console.print(f"{len(runs)} simulations in {stopwatch}")


if __name__ == "__main__":
    main()
