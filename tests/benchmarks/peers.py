"""What users would take on slow or unequal hosts instead of `OmniTuner`: the peers that `tuned_hosts.py` compares.

Not a script. Hooks of DistributedDataParallel train with Lightning; the others bring a loop or an optimizer of their
own, and train in a plain loop here, with the same order of samples, devices and initial weights:

- ``rpc``: a parameter server by hand over torch.distributed.rpc, as in PyTorch's tutorials: gradients are pushed, the
  server steps, and its weights are the answer.
- ``torchft``: its LocalSGD or its DiLoCo (``pip install torchft``).
- ``hivemind``: its Optimizer (``pip install hivemind``).

The keywords of each are its settings, for ``tuned_hosts.py --options``. Copies are of the server's weights as rank 0
has last read them, and of the mean of all ranks' where each trains its own. Work is that of all processes of a host.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from slow_network_worker import COPY_EVERY
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import TCPStore, rpc  # type: ignore[attr-defined]  # the store is public, and documented
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.utils.data import DataLoader, DistributedSampler

HOOKS = ("powersgd", "post-local")
TIMEOUT = timedelta(seconds=120)
RPC_PORT, LIGHTHOUSE_PORT = 29511, 29512
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Hook:
    """What there is in torch for slow links: hooks of DistributedDataParallel.

    Args:
        told: the way, and its settings.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self._way, self._told = told["way"], told
        self._averager: Any = None
        # PowerSGD's hook starts collectives in callbacks; those of two buckets would overtake each other.
        self.options: dict[str, Any] = {"bucket_cap_mb": 64} if self._way == "powersgd" else {}

    def install(self, model: Any) -> None:
        """Registers the hook."""
        if self._way == "powersgd":
            state: Any = powerSGD_hook.PowerSGDState(None, self._told["rank"], start_powerSGD_iter=self._told["warmup"])
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._way == "post-local":
            self._averager = PeriodicModelAverager(self._told["period"], warmup_steps=self._told["warmup"])
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            state = post_localSGD_hook.PostLocalSGDState(None, alone, self._told["warmup"])
            model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)

    def stepped(self, model: Any) -> None:
        """An optimizer has stepped: post-local SGD averages weights now and then."""
        if self._averager is not None:
            self._averager.average_parameters(model.parameters())


# --- In a plain loop -------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """What a peer is given.

    Attributes:
        net: is trained.
        optimizer: makes the user's, for some parameters.
        rank: of this host.
        ranks: how many there are.
        address: of this host.
        store: that all of them reach.
        batch: samples of a rank's step.
    """

    net: nn.Sequential
    optimizer: Optimizers
    rank: int
    ranks: int
    address: str
    store: TCPStore
    batch: int

    def meet(self, where: str) -> None:
        """Waits for all of them."""
        self.store.add(where, 1)
        while self.store.add(where, 0) < self.ranks:
            time.sleep(0.02)


@dataclass
class Peer:
    """How a rank trains.

    Attributes:
        step: makes a step of the gradients in the model, what is exchanged included.
        together: steps from one exchange of all ranks to the next, after one of which all end; 0 if none waits.
        averaged: whether copies are of the mean of all ranks' weights, for each trains its own.
        stop: is called when the time is over, on rank 0.
    """

    step: Callable[[], Any]
    together: int = 0
    averaged: bool = True
    stop: Callable[[], Any] = lambda: None


class ParameterServer:
    """Weights, and an optimizer that steps with the mean of every so many gradients.

    Args:
        parameters: that are trained.
        optimizer: of these.
        batched: gradients of a step.
        dtype: in which weights are sent.
    """

    def __init__(
        self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, batched: int, dtype: torch.dtype
    ) -> None:
        self._parameters, self._optimizer, self._batched, self._dtype = parameters, optimizer, batched, dtype
        self._lock = threading.Lock()
        self._pushed = 0
        self._answer: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        for each in parameters:
            each.grad = torch.zeros_like(each)

    def push(self, gradients: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
        """Adds a rank's gradients; the weights after the step that they are in come when all of its have."""
        with self._lock:
            answer = self._answer
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient / self._batched
            self._pushed += 1
            if self._pushed >= self._batched:
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=False)
                self._reply()
        return answer

    def stop(self) -> None:
        """Answers at once from now on: training ends, and what a step waits for may not come."""
        with self._lock:
            self._batched = 1
            self._reply()

    def _reply(self) -> None:
        self._pushed = 0
        answer, self._answer = self._answer, torch.futures.Future()
        answer.set_result([each.detach().to(self._dtype, copy=True) for each in self._parameters])


SERVER: list[ParameterServer] = []
"""This process's, if it is one: what is called over RPC are functions of a module."""


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def push(gradients: list[Tensor]) -> torch.futures.Future[list[Tensor]]:
    """At the server: `ParameterServer.push`."""
    return SERVER[0].push(gradients)


def stop() -> None:
    """At the server: `ParameterServer.stop`."""
    SERVER[0].stop()


def _join_rpc(name: str, rank: int, ranks: int) -> None:
    """Over TCP alone: between processes of a machine TensorPipe copies memory, which no emulated link limits."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{RPC_PORT}",
        rpc_timeout=TIMEOUT.total_seconds(),
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=ranks + 1, rpc_backend_options=options)


def _serve(net: nn.Module, optimizer: Optimizers, ranks: int, batched: int, dtype: torch.dtype) -> None:
    """The server's process."""
    torch.set_num_threads(1)
    parameters = list(net.parameters())
    SERVER.append(ParameterServer(parameters, optimizer(parameters), batched, dtype))
    _join_rpc("server", ranks, ranks)
    threading.Event().wait()


@contextmanager
def parameter_server(host: Host, batched: int = 1, bits: int = 32) -> Iterator[Peer]:
    """A parameter server on the first host, in a process of its own.

    Args:
        host: this one.
        batched: gradients that the server waits for before it steps; with 1 training is asynchronous.
        bits: of each number sent, 32 or 16.
    """
    dtype = {32: torch.float32, 16: torch.float16}[bits]
    parameters = list(host.net.parameters())
    server = None
    if host.rank == 0:
        arguments = host.net, host.optimizer, host.ranks, batched, dtype
        server = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
        server.start()
    _join_rpc(f"rank{host.rank}", host.rank, host.ranks)

    def step() -> None:
        gradients = [each.grad.to(dtype) for each in parameters if each.grad is not None]
        weights = rpc.rpc_sync("server", push, args=(gradients,))
        with torch.no_grad():
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.copy_(value)

    yield Peer(step, averaged=False, stop=partial(rpc.rpc_sync, "server", stop))
    if server is not None:
        server.kill()
    rpc.shutdown(graceful=False)


@contextmanager
def torchft(
    host: Host,
    sync_every: int = 8,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
    outer_lr: float = 0.0,
    outer_momentum: float = 0.9,
) -> Iterator[Peer]:
    """torchft's LocalSGD, or its DiLoCo if there is an outer rate; each rank is a replica group.

    Args:
        host: this one.
        sync_every: steps between two averages of a weight.
        fragments: of the model, 1 or 2 (convolutions, and the rest), averaged in turn.
        delay: steps that an average may take while training goes on.
        alpha: how much of their own progress ranks keep then.
        outer_lr: of DiLoCo's outer SGD with Nesterov's momentum.
        outer_momentum: likewise.
    """
    try:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo, LocalSGD
    except ImportError as error:
        raise ImportError("--ways torchft needs torchft: pip install torchft") from error
    lighthouse = None
    if host.rank == 0:
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=host.ranks)
    host.meet("lighthouse")
    store = TCPStore(host.address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=host.net.load_state_dict,
        state_dict=host.net.state_dict,
        min_replica_size=host.ranks,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host.address,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"host{host.rank}",
        hostname=host.address,
        init_sync=False,
    )
    optimizer = host.optimizer(host.net.parameters())
    local: AbstractContextManager[Any]
    if outer_lr:
        parts = [host.net] if fragments == 1 else [host.net[:6], host.net[6:]]
        momentum = {"momentum": outer_momentum, "nesterov": outer_momentum > 0}
        outer = [torch.optim.SGD(each.parameters(), outer_lr, **momentum) for each in parts]  # type: ignore[arg-type]
        delayed = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        local = DiLoCo(manager, parts, optimizer, outer, sync_every, **delayed)
    else:
        local = LocalSGD(manager, host.net, optimizer, sync_every)
    with local:
        yield Peer(optimizer.step, together=sync_every // fragments)
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


@contextmanager
def hivemind(
    host: Host,
    period: int = 8,
    local: bool = True,
    delayed: bool = False,
    bits: int = 16,
    matchmaking: float = 1.0,
    timeout: float = 10.0,
    averaged: bool = True,
) -> Iterator[Peer]:
    """hivemind's Optimizer.

    Args:
        host: this one.
        period: steps of all ranks from one exchange to the next, as part of the target batch size.
        local: whether ranks step by themselves and average weights beside it; or gradients are averaged.
        delayed: whether gradients' averages are applied when they come, a step late.
        bits: of each number sent, 32, 16 or 8.
        matchmaking: seconds in which ranks find each other.
        timeout: seconds that an average may take.
        averaged: whether copies are of the mean of all ranks' weights, which no rank has, or of rank 0's.
    """
    try:
        import hivemind
    except ImportError as error:
        raise ImportError("--ways hivemind needs hivemind: pip install hivemind") from error
    compression = {
        32: hivemind.compression.NoCompression,
        16: hivemind.compression.Float16Compression,
        8: hivemind.compression.Uniform8BitQuantization,
    }[bits]()
    # Nothing looks for a way out of the emulated network.
    inside = {"use_relay": False, "use_auto_relay": False, "nat_port_map": False, "auto_nat": False}
    others = [] if host.rank == 0 else host.store.get("first").decode().split()
    table = hivemind.DHT(
        host_maddrs=[f"/ip4/{host.address}/tcp/0"], initial_peers=others, start=True, startup_timeout=60, **inside
    )
    if host.rank == 0:
        host.store.set("first", " ".join(str(each) for each in table.get_visible_maddrs()))
    optimizer = hivemind.Optimizer(
        dht=table,
        run_id="tuned_hosts",
        batch_size_per_step=host.batch,
        target_batch_size=host.batch * host.ranks * period,
        params=list(host.net.parameters()),
        optimizer=host.optimizer,
        use_local_updates=local,
        delay_grad_averaging=delayed,
        delay_optimizer_step=delayed,
        grad_compression=compression,
        state_averaging_compression=compression,
        matchmaking_time=matchmaking,
        averaging_timeout=timeout,
        averager_opts={"target_group_size": host.ranks, "request_timeout": matchmaking / 2},
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5, "max_refresh_period": 1.0},
        verbose=True,
    )
    yield Peer(optimizer.step, averaged=averaged)
    optimizer.shutdown()
    table.shutdown()


PEERS: dict[str, Callable[..., AbstractContextManager[Peer]]] = {
    "rpc": parameter_server,
    "torchft": torchft,
    "hivemind": hivemind,
}


class Shared:
    """Memory that hosts share, for there is no network in it: each rank's weights, and when to stop.

    Args:
        path: of a file.
        net: that is trained.
        ranks: how many train it.
    """

    def __init__(self, path: str, net: nn.Module, ranks: int) -> None:
        self._net = net
        self._values = torch.from_file(path, shared=True, size=ranks * self._own().numel() + 1)
        self._weights = self._values[:-1].view(ranks, -1)

    def leave(self, rank: int) -> None:
        """This rank's weights, now."""
        self._weights[rank] = self._own()

    def mean(self) -> Tensor:
        """Of all ranks' weights."""
        return self._weights.mean(0)

    def of(self, rank: int) -> Tensor:
        """A copy of a rank's weights."""
        return self._weights[rank].clone()

    @property
    def last(self) -> int:
        """Step after which all stop; 0 while none is known."""
        return int(self._values[-1])

    @last.setter
    def last(self, step: int) -> None:
        self._values[-1] = step

    def _own(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self._net.parameters()])


def seconds_of_session() -> float:
    """Processor time of this session: of its processes that live, and of children that these have waited for."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == os.getsid(0):
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def train(told: dict[str, Any], problem: Any, device: Any, ranks: int) -> dict[str, Any]:
    """A host's part of a training without Lightning; the result is that of `tuned_hosts.train`."""
    rank = int(os.environ["RANK"])
    net, shared = problem.net, Shared(told["own"], problem.net, ranks)
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, rank == 0, TIMEOUT)
    sgd = partial(torch.optim.SGD, lr=told["lr"], momentum=told["momentum"])
    host = Host(net, sgd, rank, ranks, os.environ["HOST_ADDRESS"], store, problem.batch)
    sampler = DistributedSampler[Any](problem.data, ranks, rank, seed=told["seed"])
    batches = DataLoader(problem.data, batch_size=problem.batch, sampler=sampler)
    copies: list[tuple[float, Tensor]] = []
    steps = 0
    with PEERS[told["way"]](host, **told["options"]) as peer:
        shared.leave(rank)
        host.meet("start")
        began, working = time.perf_counter(), seconds_of_session()
        for batch in _endless(batches, sampler):
            net.zero_grad()
            device.loss(net, batch).backward()
            peer.step()
            steps += 1
            shared.leave(rank)
            now = time.perf_counter() - began
            if rank == 0 and steps % COPY_EVERY == 0:
                copies.append((now, shared.mean() if peer.averaged else shared.of(rank)))
            if rank == 0 and now > told["limit"] and not shared.last and steps % max(1, peer.together) == 0:
                shared.last = steps + peer.together
                peer.stop()
            if shared.last and (steps >= shared.last or not peer.together):
                break
        working = seconds_of_session() - working
        host.meet("end")
    result: dict[str, Any] = {"work": working / steps, "steps": steps, "chosen": str(told["options"]), "tuning": 0.0}
    if rank == 0:
        result["seconds"], result["steps"] = problem.reached(copies)
    return result


def _endless(batches: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from batches
        epoch += 1
