"""A group's exchanges with the server, whose answers all members get."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lightning_omni.errors import ProtocolError, Refused
from lightning_omni.group.core import Action, Outgoing, ServerRequest
from lightning_omni.methods import Exchange, Publish, Pulled, ReadInbox, ReadPeer, Receive, SendPeer
from lightning_omni.runtime.group_exchange import EncodedAnswer, GroupBroadcast, PeerExchange
from lightning_omni.runtime.model.replica import PREFIX, Part
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.runtime.timing import Clock, clock_of
from lightning_omni.transport.connections import Answer, Requests, check_alike
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.formats.base import RAW, check_size
from lightning_omni.wire.layout import Layout
from lightning_omni.wire.messages import SnapshotId
from lightning_omni.wire.messages.collectives import UPLOADED_ELSEWHERE
from lightning_omni.wire.partition import Partition

# --- State of the run that the servers hold ---------------------------------------------------------------------------


class ServerSnapshot(NamedTuple):
    """A consistent state of all servers.

    Attributes:
        parts: for each optimizer ``{"weights": {name: tensor}, "state": {...}, "clock": 0, "method": {...}}``.
        groups: for each group, the state gathered from it since the last snapshot with states.
    """

    cut: SnapshotId
    parts: Sequence[dict[str, Any]]
    groups: Mapping[int, Any]


class ServerStore:
    """The access to the servers' state on ranks that exchange with them."""

    def __init__(self, parallel: ParallelState, connections: Callable[[], Requests]) -> None:
        self._parallel, self._connections = parallel, connections

    def snapshot(self, with_state: bool = True, version: int = 0) -> ServerSnapshot:
        """Return a consistent state of the servers, or this rank's share of it.

        With ``with_state`` it has those of optimizers, methods and groups; ``version`` is as in `TakeSnapshot`.
        """
        requests, take = self._connections(), m.TakeSnapshot(with_state=with_state, version=version)
        answers = requests.exchange([Outgoing(take)] * requests.count, m.Snapshot)
        first, *others = (unpack(answer.packed, payload, copy=True) for answer, payload in answers)
        cut, parts = answers[0][0].cut, first["parts"]
        if others:
            if any(answer.cut.pushes != cut.pushes for answer, _ in answers):
                raise ProtocolError("servers that hold a partition each have given snapshots of different moments")
            parts = [
                self._whole(part, [tree["parts"][index] for tree in (first, *others)])
                for index, part in enumerate(self._parallel.parts)
            ]
        return ServerSnapshot(cut, parts, first.get("groups", {}))

    def _whole(self, part: Part, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
        split = self._parallel.split_of(part, len(shares))
        weights = split.merged([list(share["weights"].values()) for share in shares])
        whole = {
            **shares[0],
            "weights": dict(zip(part.replica.parameters, weights, strict=True)),
            "state": split.merged_tree([share["state"] for share in shares]),
        }
        if "method" in whole:
            whole["method"] = split.merged_tree([share["method"] for share in shares])
        return whole

    def seed(self, parts: Sequence[dict[str, Any]]) -> None:
        """Send weights and optimizers to the servers, to each its share. Ranks call it if `World.owns_state`.

        ``parts`` are those of `Snapshots.seed`.
        """
        requests = self._connections()
        splits = [self._parallel.split_of(part, requests.count) for part in self._parallel.parts]
        for split, seed in zip(splits, parts, strict=False):
            if seed.get("method") is not None and self._parallel.share is None:
                split.check_fragments(seed["method"])
        seeds = []
        for server in range(requests.count):
            tree = [
                part if requests.count == 1 else self._share_of(splits[index], part, server)
                for index, part in enumerate(parts)
            ]
            packed, buffer = pack({"parts": tree})
            seeds.append(Outgoing(m.UploadWeights(packed=packed, nbytes=buffer.numel()), buffer))
        requests.exchange(seeds, m.WeightsUploaded)

    def store_group_state(self, packed: Packed, buffer: Tensor) -> None:
        message = m.GroupState(packed=packed, nbytes=buffer.numel())
        self._connections().own.exchange(message, m.GroupStateStored, buffer)

    @staticmethod
    def _share_of(split: Partition, seed: dict[str, Any], server: int) -> dict[str, Any]:
        weights = split.parts(list(seed["weights"].values()))[server]
        names = [spec.name for spec in split.shares[server].specs]
        method = seed.get("method")
        return {
            **seed,
            "optimizer": split.described(seed["optimizer"], server),
            "weights": dict(zip(names, weights, strict=True)),
            "method": None if method is None else split.tree_parts(method)[server],
        }

    def store_run_state(self, packed: Packed, buffer: Tensor) -> None:
        """Store the state beside the weights for groups that join. The recorder calls it while groups compute.

        Where members hold the model together, each stores its share at its own server, and the recorder last.
        """
        message = m.StoreRunState(packed=packed, nbytes=buffer.numel())
        self._connections().own.exchange(message, m.RunStateStored, buffer)

    def read_run_state(self, share: bool = False) -> dict[str, Any]:
        """Return the stored state for groups that join; with ``share``, the share at this rank's own server."""
        requests = self._connections()
        connection = requests.own if share else requests.coordinator
        answer, payload = connection.exchange(m.ReadRunState(), m.StoredRunState)
        tree: dict[str, Any] = unpack(answer.packed, payload, copy=True)
        return tree


# --- Exchanges --------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


class Route(NamedTuple):
    """The way of one kind of request to the servers and back.

    Attributes:
        of: the layout of all parameters and the `ParallelState.generation` for which it was found.
        split: division of all parameters over the servers.
        part: division of the requested fragment.
        coded: the encoded answer; None if the tensors are received as they are.
        is_passed_on: whether it is broadcast to the group as received, and not its tensors.
    """

    of: tuple[Layout, int]
    split: Partition
    part: Partition
    pulls: bool
    coded: EncodedAnswer | None
    is_passed_on: bool


class Traffic:
    """The time and bytes of this rank's exchanges in a run; ``clock`` is of the weights' device.

    Attributes:
        spans: start and end on the device of exchanges that `seconds` has not added yet.
        moved: bytes of tensors to and from the server or other groups; only ranks that exchange move any.
        shared: the part of them that rank and server passed in shared memory.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._seconds, self.moved, self.shared = 0.0, 0, 0
        self.spans: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> float:
        """Return the time spent in exchanges, after waiting for the device to end the last one."""
        while self.spans:
            self._seconds += self.clock.wait(*self.spans.pop())
        return self._seconds


class ServerExchange:
    """A rank's exchanges with the server and with other groups. Every rank of a group makes the same calls.

    Attributes:
        synchronizations: number of the run's next collective of all live ranks.
    """

    def __init__(self, parallel: ParallelState) -> None:
        self._parallel = parallel
        self.traffic = Traffic(clock_of(parallel.device))
        self.synchronizations = 0
        self.members = GroupBroadcast(parallel)
        self.peers = PeerExchange(parallel, self.members, self.synchronize, self.timed)
        self.store = ServerStore(parallel, self._free_connections)
        self._requests: Requests | None = None
        self._routes: dict[tuple[int, int | None, type, bool], Route] = {}
        self._under_way: dict[int, tuple[ServerRequest, Route]] = {}
        self._travels: ServerRequest | None = None
        self._arrived: dict[int, list[tuple[m.Weights, Tensor]]] = {}

    # --- Server -------------------------------------------------------------------------------------------------------

    def do(self, index: int, action: Action) -> Any:
        """Perform an action of the group's core for one optimizer, and return the answer.

        Raises:
            NonFiniteGradients: the server refused too many of the group's pushes in a row.
            OmniError: the connection or this rank's run has ended.
        """
        match action:
            case ServerRequest(waits=False):
                return self.send(action)
            case ServerRequest():
                return self.ask_weights(action)
            case Receive():
                return self.receive(index)
            case Publish():
                return self.peers.publish(index, action.tensors)
            case SendPeer():
                return self.peers.send(index, action.group, action.tensors)
            case ReadPeer():
                return self.peers.read(index, action.group)
            case ReadInbox():
                return self.peers.read_inbox(index)
        raise TypeError(f"nothing is to be done for {action!r}")

    def ask_weights(self, ask: ServerRequest) -> Pulled:
        self.send(ask)
        return self.receive(ask.optimizer)

    def send(self, ask: ServerRequest) -> None:
        """Send a request to the server without waiting for its answer, which `receive` returns.

        A group has one exchange in flight: the answer to another optimizer's request is received first, and kept.
        """
        parallel, part, route = self._parallel, self._parallel.parts[ask.optimizer], self._route(ask)
        if parallel.share is not None:
            ask = self._part_of_member(ask)
        if parallel.exchanges:
            with self.timed():
                requests = self._free_connections()
                memories = part.outs(len(route.split.shares))
                requests.send(parallel.core.send(ask, route.split, memories), self._rooms(ask, part, route))
            self._travels = ask
        self._under_way[ask.optimizer] = ask, route

    def _route(self, ask: ServerRequest) -> Route:
        parallel, key = self._parallel, (ask.optimizer, ask.fragment, type(ask.need), ask.pulls)
        of = parallel.parts[ask.optimizer].replica.layout
        route = self._routes.get(key)
        if route is None or route.of[0] is not of or route.of[1] != parallel.generation:
            split = parallel.split_of(parallel.parts[ask.optimizer], parallel.servers)
            part = split.fragment(ask.fragment, parallel.method.fragments)
            answers = parallel.core.wire_format.answers if isinstance(ask.need, Exchange) and ask.pulls else RAW
            coded = None if answers == RAW else EncodedAnswer(answers, part)
            is_passed_on = coded is not None and len(parallel.members) > 1 and coded.is_small
            route = self._routes[key] = Route((of, parallel.generation), split, part, ask.pulls, coded, is_passed_on)
        return route

    def _part_of_member(self, ask: ServerRequest) -> ServerRequest:
        """Return this member's request, with the leader's note; only the leader reports on leases."""
        need = ask.need
        if isinstance(need, Exchange) and need.note:
            note = msgspec.msgpack.decode(self.members.broadcast_bytes(msgspec.msgpack.encode(need.note)), type=float)
            ask = ask._replace(need=msgspec.structs.replace(need, note=note))
        return ask if self._parallel.is_leader else ask._replace(epoch=-1, trained=0)

    def receive(self, index: int) -> Pulled:
        """Return the server's answer on all members of the group, with tensors on the device of the weights."""
        ask, route = self._under_way.pop(index)
        parallel, part, answer = self._parallel, self._parallel.parts[ask.optimizer], None
        layout, coded, by_member = route.part.layout, route.coded, parallel.share is not None
        letter = self.members.letter(part)[: PREFIX + (layout.nbytes if route.pulls else 0)]
        prefix, weights, payloads = letter[:PREFIX], letter[PREFIX:], None
        with self.timed():
            if parallel.exchanges:
                answer, payloads = self._receive(ask, route, weights)
                if parallel.is_leader and len(parallel.members) > 1:
                    prefix.copy_(_prefix_of(answer))
            if coded is not None and payloads is not None and not route.is_passed_on:
                coded.decode(payloads, weights, part.handed)
            self.members.broadcast(prefix if by_member or route.is_passed_on else letter)
            over = self.members.broadcast_to_replicas if by_member else self.members.broadcast
            if coded is not None and route.is_passed_on:
                coded.decode(payloads, weights, part.handed, over)
            elif by_member and route.pulls:
                over(weights)
        told = answer if answer is not None and parallel.is_leader else _read(prefix)
        if by_member and answer is not None and answer.clock != told.clock:
            raise ProtocolError(
                f"servers have applied {answer.clock} and {told.clock} updates to the shares of a group"
            )
        if told.staleness >= 0:
            part.staleness[told.staleness] += 1
        pulled = parallel.core.receive(told, layout.views(weights) if route.pulls else ())
        self.warn_of_refusal(told.applied, told.refused_in_row)
        return pulled

    def _rooms(self, ask: ServerRequest, part: Part, route: Route) -> Sequence[Tensor | None] | None:
        """Return memory for all servers' answers, encoded or not; None if it is allocated when they arrive."""
        if not route.pulls:
            return None
        if route.coded is not None:
            if len(route.part.shares) > 1:
                return None
            return [part.coded.room(route.coded.answers.sizes(route.part.layout)[1])]
        if not ask.waits and self._parallel.device.type == "cpu":
            # Meanwhile the group trains, and its weights are compared with the last answer's.
            part.swap()
        return route.part.memories(part.memory()[PREFIX:])

    def finish_exchanges(self) -> None:
        """Wait for the exchanges in flight, and let the method apply the answers. All members call it."""
        for index in list(self._under_way):
            self._parallel.core.apply_answer(index, self.receive(index))

    def read_weights(self) -> None:
        for index, part in enumerate(self._parallel.parts):
            part.replica.load(self.ask_weights(self._parallel.core.fetch(index)))

    def ask(self, message: m.Message, expect: type[Answer], payload: Tensor | None = None) -> tuple[Answer, Tensor]:
        """Send a message to the coordinating server, on the data connection; return its answer and payload, uint8."""
        return self._free_connections().coordinator.exchange(message, expect, payload)

    def bring(self, data: bytes) -> None:
        """Upload bytes for the next control message, which are too large for its channel."""
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.ask(m.Upload(nbytes=payload.numel()), m.Uploaded, payload)

    def synchronize(self, what: str, payload: bytes) -> list[tuple[int, bytes]]:
        """Return the number and the bytes of each live rank, in rank order. All live ranks call it.

        ``what`` describes the collective, the same on all ranks.
        """
        brought = len(payload) > m.LARGEST_INLINE
        message = m.Contribute(number=self.synchronizations, what=what, uploaded=brought, where=self._parallel.where())
        self.synchronizations += 1
        gathered, parts = self._contribute(message, payload)
        if gathered.must_download:
            _, payload_of_all = self.ask(m.Download(number=gathered.number), m.Downloaded)
            parts = [part.numpy().tobytes() for part in payload_of_all.split(list(gathered.sizes))]
        return list(zip(gathered.ranks, parts, strict=True))

    def _contribute(self, message: m.Contribute, payload: bytes) -> tuple[m.Gathered, list[bytes]]:
        control, timeout = self._parallel.joined, self._parallel.options.timeout.total_seconds()
        while message.uploaded:
            self.bring(payload)
            try:
                return control.request_payload(message, m.Gathered, timeout=timeout)
            except Refused as no:
                if no.code != UPLOADED_ELSEWHERE:  # otherwise the server that had the payload is gone
                    raise
        return control.request_payload(message, m.Gathered, payload, timeout=timeout)

    def gather(self, numbers: list[int]) -> list[list[int]]:
        return [json.loads(text) for _, text in self.synchronize("numbers", json.dumps(numbers).encode())]

    # --- Inside the group ---------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self) -> Iterator[None]:
        requests, between, began = self._requests, self.peers.moved, self.traffic.clock.mark()
        moved, shared = (requests.moved, requests.shared) if requests is not None else (0, 0)
        yield
        self.traffic.spans.append((began, self.traffic.clock.mark()))
        if self._requests is not None:
            self.traffic.moved += self._requests.moved - moved
            self.traffic.shared += self._requests.shared - shared
        self.traffic.moved += self.peers.moved - between

    def warn_of_refusal(self, applied: bool, in_row: int) -> None:
        if not applied and in_row == 1:
            _log.warning(
                "group %d made a push that is not finite; it was refused, and the weights did not change",
                self._parallel.group,
            )

    def _receive(self, ask: ServerRequest, route: Route, into: Tensor) -> tuple[m.Weights, Sequence[Tensor] | None]:
        part, split, coded = self._parallel.parts[ask.optimizer], route.part, route.coded
        flat = None
        if route.pulls and coded is None:
            flat = part.memory()[PREFIX:]
        if ask.optimizer in self._arrived:
            received = self._arrived.pop(ask.optimizer)
        else:
            received = self._receive_travelling(None if flat is None else split.memories(flat))
        check_alike(received)
        payloads = [payload for _, payload in received]
        if coded is not None:
            for payload, share in zip(payloads, split.shares, strict=True):
                check_size(coded.answers, payload.numel(), share)
            return received[0][0], payloads
        if flat is not None:
            split.write(flat, payloads)
            if not into.is_cpu:
                into.copy_(flat[: split.layout.nbytes])
        return received[0][0], None

    # --- Connections --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._under_way.clear()
        self._arrived.clear()
        self._travels = None
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        self.peers.close()
        for part in self._parallel.parts:
            part.release()

    def _free_connections(self) -> Requests:
        requests = self._servers()
        if self._travels is not None:
            optimizer = self._travels.optimizer
            self._arrived[optimizer] = self._receive_travelling()
        return requests

    def _receive_travelling(self, into: Sequence[Tensor | None] | None = None) -> list[tuple[m.Weights, Tensor]]:
        asked, self._travels = self._travels, None
        try:
            return self._servers().receive(m.Weights, into)
        except (KeyboardInterrupt, SystemExit):
            self._travels = asked  # the answer is still to come, before that to any other request
            raise

    def _servers(self) -> Requests:
        if self._requests is None:
            timeout, by_member = self._parallel.options.timeout.total_seconds(), self._parallel.share is not None
            share = None if self._parallel.share is None else self._parallel.share[0]
            self._requests = Requests(self._parallel.joined.attach_all(timeout, share), by_member)
        return self._requests


def _prefix_of(answer: m.Weights) -> Tensor:
    """Return an answer's message, of at most 227 bytes, after its length."""
    data = m.encode(answer)
    return torch.frombuffer(bytearray([len(data), *data.ljust(PREFIX - 1)]), dtype=torch.uint8)


def _read(prefix: Tensor) -> m.Weights:
    length, *data = prefix.tolist()
    answer: m.Weights = m.decode(bytes(data[:length]), at="rank", channel=m.DATA)
    return answer
