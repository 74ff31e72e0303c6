"""A group's way to the parameter server and to other groups: the leader asks, and its group gets the answer."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_omni.errors import ConnectionLost, ProtocolError, Refused, UnsupportedError
from lightning_omni.methods import Exchange, Inbox, Publish, Pulled, ReadInbox, ReadPeer, Receive, SendPeer
from lightning_omni.optimizer.meshes import shown
from lightning_omni.optimizer.model_replica import Part
from lightning_omni.optimizer.place import Place
from lightning_omni.optimizer.together import Together
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, pack, unpack
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.group import Action, Ask, Heard, Said
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.requests import ByAggregator, Requests, alike
from lightning_omni.protocol.split import Split, is_elementwise
from lightning_omni.protocol.synchronization import BROUGHT_ELSEWHERE
from lightning_omni.protocol.transport import Address, Control, Data, Peers, PeersOfShares
from lightning_omni.protocol.wire_format import RAW, Memory, WireFormat, check_size, decode

_log = logging.getLogger(__name__)

PREFIX = 128
"""Bytes in front of the weights that a leader broadcasts to its group: what else the answer said."""
_NUMBERS = 96
"""Where among them the note lies, in bytes; whole numbers come before it."""
_LETTER = 1024
"""Bytes of a leader's note to its group that travel in one broadcast; longer ones take two."""
_STOPS = ("", "validate", "end", "skip")
_Answer = TypeVar("_Answer", bound=m.Message)


@dataclass
class Traffic:
    """What all exchanges of a run took so far.

    Attributes:
        seconds: time spent in them.
        moved: bytes of tensors to and from the server, or other groups; only the leader of a group moves any.
        shared: of these, bytes that lay in memory that leader and server share, and did not travel.
    """

    seconds: float = 0.0
    moved: int = 0
    shared: int = 0


class ServerSnapshot(NamedTuple):
    """Everything that the server holds, of one moment.

    Attributes:
        cut: which moment.
        parts: of each optimizer ``{"weights": {name: tensor}, "state": {...}, "clock": 0, "method": {...}}``.
        groups: of each group, the state that was gathered from it.
    """

    cut: Cut
    parts: Sequence[dict[str, Any]]
    groups: Mapping[int, Any]


class Channel:
    """What a rank exchanges with the server and with other groups. Every rank of a group makes the same calls.

    Args:
        place: this rank's, in the run.

    Attributes:
        traffic: what all exchanges took so far.
        synchronizations: synchronization points so far, since the server was joined.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.traffic = Traffic()
        self.synchronizations = 0
        self._requests: Requests | None = None
        self._peers: Peers | None = None
        self._under_way: dict[int, Ask] = {}
        self._travels: Ask | None = None
        self._arrived: dict[int, list[tuple[m.Weights, Tensor]]] = {}

    # --- Server -------------------------------------------------------------------------------------------------------

    def do(self, index: int, action: Action) -> Any:
        """Does what the group's core says, for one optimizer, and returns the answer to its need.

        Raises:
            NonFiniteGradients: the server refused too many pushes in a row.
        """
        match action:
            case Ask(waits=False):
                return self.send(action)
            case Ask():
                return self.ask_weights(action)
            case Receive():
                return self.receive(index)
            case Publish():
                return self.publish(index, action.tensors)
            case SendPeer():
                return self.send_peer(index, action.group, action.tensors)
            case ReadPeer():
                return self.read_peer(index, action.group)
            case ReadInbox():
                return self.read_inbox(index)
        raise TypeError(f"nothing is to be done for {action!r}")

    def ask_weights(self, ask: Ask) -> Pulled:
        """Pushes or fetches for this group, and hears the server's answer."""
        self.send(ask)
        return self.receive(ask.optimizer)

    def send(self, ask: Ask) -> None:
        """Says to the server what is asked of it, and does not wait. `receive` hears the answer.

        Of a group one exchange travels at a time: that of another optimizer is waited for.
        """
        part = self._place.parts[ask.optimizer]
        if self._place.share is not None:
            ask = self._as_all_say(ask)
        if self._place.speaks:
            with self.timed():
                requests = self._free_connections()
                requests.send(self._said(ask, part, requests.count), self._rooms(ask, part, requests.count))
            self._travels = ask
        self._under_way[ask.optimizer] = ask

    def _as_all_say(self, ask: Ask) -> Ask:
        """An ask of which each member says its part: what the leader has measured, and of the data it alone speaks."""
        need = ask.need
        if isinstance(need, Exchange) and need.note:
            note = msgspec.msgpack.decode(self.tell_group(msgspec.msgpack.encode(need.note)), type=float)
            ask = ask._replace(need=msgspec.structs.replace(need, note=note))
        return ask if self._place.is_leader else ask._replace(epoch=-1, trained=0)

    def receive(self, index: int) -> Pulled:
        """The answer to what was sent last for an optimizer; every member of the group gets it.

        Raises:
            NonFiniteGradients: the server refused too many pushes in a row.
        """
        ask, part = self._under_way.pop(index), self._place.parts[index]
        layout = part.replica.layout.fragment(ask.fragment, self._place.method.fragments)
        memory = self._memory(part)[: PREFIX + (layout.nbytes if ask.pulls else 0)]
        return self._share(ask, layout, memory)

    def _room(self, ask: Ask, part: Part) -> Tensor | None:
        """Memory for the tensors of an answer, as they travel. For leaders."""
        if not ask.pulls:
            return None
        layout = part.replica.layout.fragment(ask.fragment, self._place.method.fragments)
        if (answers := self._answers(ask)) != RAW:
            part.coded = part.coded or Memory(self._empty)
            return part.coded.room(answers.sizes(layout)[1])
        if not ask.waits:  # while the group trains on, its weights are compared with those that came last
            part.into, part.spare = part.spare, part.into
        return self._memory(part)[PREFIX : PREFIX + layout.nbytes]

    def _answers(self, ask: Ask) -> WireFormat:
        return self._place.core.wire_format.answers if isinstance(ask.need, Exchange) else RAW

    def finish_exchanges(self) -> None:
        """What is under way comes to its end, and the method applies the answer. On every rank of the group."""
        for index in list(self._under_way):
            self._place.core.apply_answer(index, self.receive(index))

    def _said(self, ask: Ask, part: Part, servers: int) -> list[Said]:
        memories = part.outs(servers, self._empty)
        if servers == 1:
            return [self._place.core.say(ask, part.replica.layout, memories[0])]
        return self._place.core.say_parts(ask, self._split(part, servers), memories)

    def _rooms(self, ask: Ask, part: Part, servers: int) -> Sequence[Tensor | None] | None:
        """Memory for the tensors of the answers of all servers, as they travel. For leaders."""
        room = self._room(ask, part)
        if servers == 1:
            return [room]
        if room is None or self._answers(ask) != RAW:
            return None
        return self._split(part, servers).fragment(ask.fragment, self._place.method.fragments).memories(room)

    def _split(self, part: Part, servers: int) -> Split:
        """How the parameters of an optimizer are divided over the servers."""
        layout = part.replica.layout
        if part.split is None or part.split.layout is not layout or len(part.split.shares) != servers:
            at_servers = None if self._place.steps_here(part) else part.optimizer
            part.split = Split.of(layout, servers, is_elementwise(self._place.method, at_servers))
        return part.split

    def fetch(self, index: int) -> Pulled:
        """The server's weights for this group, which its method did not ask for."""
        return self.ask_weights(self._place.core.fetch(index))

    def snapshot(self, with_state: bool = True, version: int = 0) -> ServerSnapshot:
        """Everything that the server holds, as of one moment, or what this rank has of it. For ranks that speak.

        Args:
            with_state: also what optimizers and methods remember, and the gathered states of groups.
            version: number of a validation: the moment at which this was first asked for that one. 0 is now.
        """
        requests, take = self._free_connections(), m.TakeSnapshot(with_state=with_state, version=version)
        heard = requests.exchange([Said(take)] * requests.count, m.Snapshot)
        first, *others = (unpack(answer.packed, payload, copy=True) for answer, payload in heard)
        cut, parts = heard[0][0].cut, first["parts"]
        if others:
            if any(answer.cut.pushes != cut.pushes for answer, _ in heard):
                raise ProtocolError("servers that hold a share each have given snapshots of different moments")
            parts = [
                self._whole(part, [tree["parts"][index] for tree in (first, *others)])
                for index, part in enumerate(self._place.parts)
            ]
        return ServerSnapshot(cut, parts, first.get("groups", {}))

    def _whole(self, part: Part, shares: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the servers hold of an optimizer, each its share, put together."""
        if part.head is not None:  # the server that coordinates holds all of it
            return shares[0]
        split = self._split(part, len(shares))
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
        """Hands weights and optimizers over, to each server its share. By the recorder.

        Args:
            parts: of each optimizer, as `lightning_omni.protocol.snapshots.Snapshots.seed` takes them.
        """
        requests = self._free_connections()
        parts = [self._cut_again(self._place.parts[index], part, requests.count) for index, part in enumerate(parts)]
        said = []
        for server in range(requests.count):
            tree = [
                part if requests.count == 1 else self._share_of(self._place.parts[index], part, server, requests.count)
                for index, part in enumerate(parts)
            ]
            packed, buffer = pack({"parts": tree})
            said.append(Said(m.Seed(packed=packed, nbytes=buffer.numel()), buffer))
        requests.exchange(said, m.Seeded)

    def _cut_again(self, part: Part, seed: dict[str, Any], servers: int) -> dict[str, Any]:
        """What an optimizer's servers are handed; a checkpoint may have fragments as other servers have cut them."""
        if seed.get("method") is None or part.head is not None or self._place.share is not None:
            return seed
        split = self._split(part, servers) if servers > 1 else Split.whole(part.replica.layout)
        return {**seed, "method": split.recut(seed["method"])}

    def store_group_state(self, packed: Packed, buffer: Tensor) -> None:
        """What this group alone knows, or what this rank has of it, becomes part of the next snapshot."""
        message = m.GroupState(packed=packed, nbytes=buffer.numel())
        self._free_connections().own.exchange(message, m.GroupStateStored, buffer)

    def _share_of(self, part: Part, seed: dict[str, Any], server: int, servers: int) -> dict[str, Any]:
        """What one of several servers is handed of an optimizer; of a merged head, the one that coordinates all."""
        if part.head is not None:
            if server == 0:
                return seed
            empty = Split.of(Layout(()), servers, elementwise=True)
            optimizer = None if self._place.steps_at_worker else empty.described(seed["optimizer"], server)
            return {**seed, "optimizer": optimizer, "weights": {}, "head": None}
        split = self._split(part, servers)
        weights = split.parts(list(seed["weights"].values()))[server]
        names = [spec.name for spec in split.shares[server].specs]
        method = seed.get("method")
        return {
            **seed,
            "optimizer": split.described(seed["optimizer"], server),
            "weights": dict(zip(names, weights, strict=True)),
            "method": None if method is None else split.tree_parts(method)[server],
        }

    def ask(self, message: m.Message, expect: type[_Answer], payload: Tensor | None = None) -> tuple[_Answer, Tensor]:
        """Asks the server on the data channel, the one that coordinates if there are several.

        Returns:
            The answer and its payload, uint8.
        """
        return self._free_connections().coordinator.exchange(message, expect, payload)

    def bring(self, data: bytes) -> None:
        """Bytes that the control channel does not take; what is said there next is about them. For every rank."""
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.ask(m.Bring(nbytes=payload.numel()), m.Brought, payload)

    def synchronize(self, what: str, payload: bytes) -> list[tuple[int, bytes]]:
        """Bytes of every live rank; ``what`` is the same on all. All ranks call it, or wait for it."""
        assert self._place.control is not None
        brought = len(payload) > m.LARGEST_INLINE
        message = m.Contribute(number=self.synchronizations, what=what, brought=brought)
        self.synchronizations += 1
        gathered, parts = self._contribute(self._place.control, message, payload)
        if gathered.collect:
            _, payload_of_all = self.ask(m.Collect(number=gathered.number), m.Collected)
            parts = [part.numpy().tobytes() for part in payload_of_all.split(list(gathered.sizes))]
        return list(zip(gathered.ranks, parts, strict=True))

    def _contribute(self, control: Control, message: m.Contribute, payload: bytes) -> tuple[m.Gathered, list[bytes]]:
        timeout = self._place.options.timeout.total_seconds()
        while message.brought:
            self.bring(payload)
            try:
                return control.request_payload(message, m.Gathered, timeout=timeout)
            except Refused as no:
                if no.code != BROUGHT_ELSEWHERE:  # to a server that is gone
                    raise
        return control.request_payload(message, m.Gathered, payload, timeout=timeout)

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Whole numbers of every live rank, in rank order."""
        return [json.loads(text) for _, text in self.synchronize("numbers", json.dumps(numbers).encode())]

    def store_run_state(self, packed: Packed, buffer: Tensor) -> None:
        """What a group that joins from here on is given beside the weights. By the recorder, when groups have parted.

        Where its members hold something together, each stores its share with its own server, and the recorder last.

        Args:
            packed: the tree without its tensors, and ...
            buffer: ... these: see `lightning_omni.protocol.codec.pack`.
        """
        message = m.StoreRunState(packed=packed, nbytes=buffer.numel())
        self._free_connections().own.exchange(message, m.RunStateStored, buffer)

    def read_run_state(self, share: bool = False) -> dict[str, Any]:
        """What was stored for groups that join.

        Args:
            share: reads what a member of the recorder's group has stored with this rank's own server.
        """
        requests = self._free_connections()
        connection = requests.own if share else requests.coordinator
        answer, payload = connection.exchange(m.ReadRunState(), m.StoredRunState)
        tree: dict[str, Any] = unpack(answer.packed, payload, copy=True)
        return tree

    # --- Peers --------------------------------------------------------------------------------------------------------

    def connect_peers(self) -> None:
        """New groups stand: where the method has them talk to each other, leaders say where they listen."""
        self._close_peers()
        if not self._place.method.talks_to_peers or self._place.is_synchronous:
            return
        assert self._place.control is not None
        mine = b""
        if self._place.speaks:
            self._peers = self._listen(self._place.control)
            address = self._place.server.published(self._peers.address)
            mine = msgspec.json.encode((self._share_number, Address(self._place.group, address)))
        said = self.synchronize("peers", mine)
        if self._peers is not None:
            others = [msgspec.json.decode(payload, type=tuple[int, Address]) for _, payload in said if payload]
            alike = [other for share, other in others if share == self._share_number]
            self._peers.connect({other.group: other for other in alike if other.group != self._place.group})

    @property
    def _share_number(self) -> int:
        return self._place.share[0] if self._place.share is not None else 0

    def _listen(self, control: Control) -> Peers:
        """This rank's way to other groups: of a leader, or of a member to those that have the same share."""

        def is_lost(group: int) -> bool:
            return group not in self._place.live_groups

        peers = control.listen(
            [part.replica.layout for part in self._place.parts],
            is_lost,
            everywhere=not self._place.server.is_on_this_node_only,
            wire_format=self._place.core.wire_format.pushes,
        )
        if self._place.share is None:
            return peers
        if not isinstance(peers, PeersOfShares):
            peers.close()
            raise UnsupportedError(
                f"{shown(self._place.options.inside)} and method={type(self._place.method).__name__}: with this"
                " transport= only leaders speak to other groups, and each member has a share of the model; leave"
                ' transport= out, or use a method that exchanges with the server, as "local_sgd"'
            )
        return Together(peers, self._place.group, self._largest_of_replica, is_lost)

    def _largest_of_replica(self, numbers: Sequence[int]) -> list[int]:
        groups = self._place.process_groups
        return groups.largest(numbers, self._place.holder_group)

    def grow_peers(self, index: int, layout: Layout) -> None:
        """One optimizer's weights have another layout from now on; what peers have sent in the old one is gone."""
        if self._peers is not None:
            self._peers.grow(index, layout)

    def publish(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Other groups may read these weights."""
        if self._peers is not None:
            self._peers.publish(index, tensors)

    def send_peer(self, index: int, group: int, tensors: Sequence[Tensor]) -> None:
        """Weights for another group's inbox."""
        if self._peers is not None:
            with self.timed():
                self._peers.send(group, index, tensors)

    def read_peer(self, index: int, group: int) -> Sequence[Tensor] | None:
        """What another group has published."""

        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            theirs = self._peers.read(group, index)
            return theirs, int(theirs is not None)

        return self._share_tensors(self._place.parts[index], read)[0]

    def read_inbox(self, index: int) -> Inbox:
        """What other groups have sent."""

        def read() -> tuple[Sequence[Tensor] | None, int]:
            assert self._peers is not None
            inbox = self._peers.read_inbox(index)
            return inbox.total, inbox.count

        return Inbox(*self._share_tensors(self._place.parts[index], read))

    # --- Inside the group ---------------------------------------------------------------------------------------------

    def broadcast_in_group(self, memory: Tensor) -> None:
        """From the leader to its group."""
        if len(self._place.members) == 1:
            return
        self._broadcast(memory, self._place.compute_group)

    def broadcast_to_replicas(self, memory: Tensor) -> None:
        """From the rank that speaks for a share of the model to those of its group that have the same share."""
        if self._place.replicas > 1:
            self._broadcast(memory, self._place.replica_group)

    def _broadcast(self, memory: Tensor, group: Any) -> None:
        """From the first rank of a process group."""
        shared = memory.to(self._place.device) if self._place.device.type != "cpu" else memory
        dist.broadcast(shared, group=group, group_src=0)
        if shared is not memory:
            memory.copy_(shared)

    def tell_group(self, note: bytes) -> bytes:
        """A note from the leader to its group, which is what every member gets."""
        if len(self._place.members) == 1:
            return note
        return _told(note if self._place.is_leader else None, self.broadcast_in_group)

    def tell_replicas(self, tree: Any) -> Any:
        """Plain data and tensors of the rank that speaks for a share of the model, at all that have the same share."""
        if self._place.replicas == 1:
            return tree
        packed, buffer = pack(tree if self._place.speaks else {})
        mine = msgspec.msgpack.encode((packed, buffer.numel())) if self._place.speaks else None
        packed, size = msgspec.msgpack.decode(_told(mine, self.broadcast_to_replicas), type=tuple[Packed, int])
        flat = buffer if self._place.speaks else torch.empty(size, dtype=torch.uint8)
        if size:
            self.broadcast_to_replicas(flat)
        return tree if self._place.speaks else unpack(packed, flat, copy=True)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts time and bytes as those of exchanges."""
        began, requests, peers = time.perf_counter(), self._requests, self._peers
        moved, shared = (requests.moved, requests.shared) if requests is not None else (0, 0)
        between = peers.moved if peers is not None else 0
        yield
        self.traffic.seconds += time.perf_counter() - began
        if self._requests is not None:
            self.traffic.moved += self._requests.moved - moved
            self.traffic.shared += self._requests.shared - shared
        if peers is not None:
            self.traffic.moved += peers.moved - between

    def warn_of_refusal(self, applied: bool, in_row: int) -> None:
        """Warns of the first of what was not finite."""
        if not applied and in_row == 1:
            _log.warning(
                "group %d made a push that is not finite; it was refused, and the weights did not change",
                self._place.group,
            )

    def _share(self, ask: Ask, layout: Layout, memory: Tensor) -> Pulled:
        """The leader hears the server's answer; its group gets it.

        Args:
            ask: what was asked.
            layout: of the tensors that come.
            memory: for what is said, and for them.
        """
        part = self._place.parts[ask.optimizer]
        by_member, own_clock = self._place.share is not None, -1
        coded = self._coded(ask, layout)
        letter = memory if coded is None else part.handed.room(PREFIX + coded.nbytes)
        prefix, numbers = letter[:_NUMBERS].view(torch.int64), letter[_NUMBERS:PREFIX].view(torch.float64)
        with self.timed():
            if self._place.speaks:
                answer = self._hear(
                    ask, layout, memory[PREFIX:], None if coded is None else coded.parts(letter[PREFIX:])
                )
                prefix[:9] = torch.tensor(
                    [
                        answer.clock,
                        answer.staleness,
                        int(answer.applied),
                        answer.refused_in_row,
                        answer.progress,
                        _STOPS.index(answer.stop),
                        int(answer.repeated),
                        answer.validations,
                        answer.groups,
                    ]
                )
                numbers[0], own_clock = answer.note, answer.clock
            self.broadcast_in_group(letter[:PREFIX] if by_member else letter)
            if by_member and ask.pulls:
                self.broadcast_to_replicas(memory[PREFIX:])
            if coded is not None:
                coded.decode(letter[PREFIX:], memory[PREFIX:], part)
        if by_member and self._place.speaks and own_clock != int(prefix[0]):
            raise ProtocolError(
                f"servers have applied {own_clock} and {int(prefix[0])} updates to the shares of a group"
            )
        clock, staleness, applied, refused, progress, stop, repeated, *counts = prefix[:9].tolist()
        if staleness >= 0:
            part.staleness[staleness] += 1
        heard = Heard(staleness, bool(applied), progress, _STOPS[stop], bool(repeated), refused, *counts)
        tensors = layout.views(memory[PREFIX:]) if ask.pulls else ()
        pulled = self._place.core.hear(heard, tensors, clock, float(numbers[0]), ask.fragment)
        self.warn_of_refusal(heard.applied, refused)
        return pulled

    def _coded(self, ask: Ask, layout: Layout) -> CodedAnswer | None:
        """The answer as the whole group gets it, where it travels in fewer bytes than its tensors have."""
        answers = self._answers(ask)
        if answers == RAW or not ask.pulls or len(self._place.members) == 1 or self._place.share is not None:
            return None
        assert self._place.control is not None
        coded = CodedAnswer(answers, self._divided(ask, layout, self._place.control.shards))
        return coded if coded.are_sizes_known and coded.nbytes < layout.nbytes else None

    def _divided(self, ask: Ask, layout: Layout, servers: int) -> Split:
        """How the tensors of an answer are divided over the servers."""
        if servers == 1:
            return Split.whole(layout)
        return self._split(self._place.parts[ask.optimizer], servers).fragment(
            ask.fragment, self._place.method.fragments
        )

    def _hear(self, ask: Ask, layout: Layout, into: Tensor, coded: Sequence[Tensor] | None) -> m.Weights:
        """The server's answer. For leaders.

        Args:
            ask: what was asked.
            layout: of the tensors that come.
            into: memory for them, as the layout has it.
            coded: memory for each server's part of them, as they travel, in place of ``into``; or None.
        """
        answers = self._answers(ask)
        is_flat = answers == RAW or not ask.pulls
        requests, part = self._servers(), self._place.parts[ask.optimizer]
        split = self._divided(ask, layout, requests.count)
        if ask.optimizer in self._arrived:
            heard = self._arrived.pop(ask.optimizer)
        else:
            self._travels = None
            heard = requests.receive(m.Weights, split.memories(into) if is_flat and ask.pulls else None)
        payloads = [payload for _, payload in alike(heard)]
        if not is_flat:
            for payload, share in zip(payloads, split.shares, strict=True):
                check_size(answers, payload.numel(), share)
        if coded is not None:
            for memory, payload in zip(coded, payloads, strict=True):
                memory.copy_(payload)
        elif ask.pulls:
            if not is_flat:
                payloads = _decoded(answers, payloads, split, part)
            split.write(into, payloads)
        return heard[0][0]

    def _share_tensors(
        self, part: Part, read: Callable[[], tuple[Sequence[Tensor] | None, int]]
    ) -> tuple[Sequence[Tensor] | None, int]:
        """The leader reads something, and a count, or each rank that speaks for a share; others like it get both."""
        by_member = self._place.share is not None
        listeners = self._place.replicas if by_member else len(self._place.members)
        broadcast = self.broadcast_to_replicas if by_member else self.broadcast_in_group
        with self.timed():
            tensors, count = read() if self._place.speaks else (None, 0)
            if listeners == 1:
                return tensors, count
            memory = self._memory(part)
            prefix, views = memory[:_NUMBERS].view(torch.int64), part.replica.layout.views(memory[PREFIX:])
            if self._place.speaks:
                prefix[0] = count
                for view, tensor in zip(views, tensors or (), strict=False):
                    view.copy_(tensor)
            broadcast(memory[:PREFIX])
            count = int(prefix[0])
            if count:
                broadcast(memory)
            return (views if count else None), count

    def _memory(self, part: Part) -> Tensor:
        nbytes = PREFIX + part.replica.layout.nbytes
        if part.into is None or part.into.numel() != nbytes:
            part.into = self._empty(nbytes)
        return part.into

    def _empty(self, nbytes: int) -> Tensor:
        assert self._place.control is not None
        return self._place.control.empty(nbytes)

    # --- Connections --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all connections; the next exchange makes new ones."""
        self._under_way.clear()
        self._arrived.clear()
        self._travels = None
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        self._close_peers()

    def _warn_of_aggregator(self, error: ConnectionLost) -> None:
        _log.warning("group %d pushes directly to the parameter server from now on: %s", self._place.group, error)

    def _close_peers(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    @property
    def is_free(self) -> bool:
        """Whether the server answers at once: what is asked while an exchange is under way waits for its answer."""
        return self._travels is None

    def _free_connections(self) -> Requests:
        """The data connections, with nothing under way: the answer to what was sent is waited for, and kept."""
        requests = self._servers()
        if self._travels is not None:
            ask, self._travels = self._travels, None
            self._arrived[ask.optimizer] = requests.receive(m.Weights)
        return requests

    def _servers(self) -> Requests:
        if self._requests is None:
            assert self._place.control is not None
            timeout, by_member = self._place.options.timeout.total_seconds(), self._place.share is not None
            largest = self._largest_in_replica if by_member else int
            self._requests = Requests(self._connect(self._place.control, timeout), by_member, largest)
        return self._requests

    def _largest_in_replica(self, number: int) -> int:
        return self._largest_of_replica([number])[0]

    def _connect(self, control: Control, timeout: float) -> list[Data]:
        """To all servers that hold a share each; or to the one, by way of an aggregator if there is one."""
        if self._place.share is not None:
            return control.attach_all(timeout, self._place.share[0])
        connections = control.attach_all(timeout)
        if len(connections) == 1 and (aggregator := control.attach_aggregator(timeout)) is not None:
            return [ByAggregator(connections[0], aggregator, self._warn_of_aggregator)]
        return connections


def _told(note: bytes | None, broadcast: Callable[[Tensor], None]) -> bytes:
    """A note at all ranks of a process group.

    Args:
        note: on the rank that tells it; None on the others.
        broadcast: from that rank to the others.
    """
    letter = torch.zeros(8 + _LETTER, dtype=torch.uint8)
    if note is not None:
        beginning = torch.frombuffer(bytearray(note[:_LETTER]), dtype=torch.uint8)
        letter[:8].view(torch.int64)[0] = len(note)
        letter[8 : 8 + beginning.numel()] = beginning
    broadcast(letter)
    size = int(letter[:8].view(torch.int64)[0])
    if size <= _LETTER:
        return letter[8 : 8 + size].numpy().tobytes()
    long = torch.zeros(size, dtype=torch.uint8)
    if note is not None:
        long.copy_(torch.frombuffer(bytearray(note), dtype=torch.uint8))
    broadcast(long)
    return long.numpy().tobytes()


@dataclass(frozen=True)
class CodedAnswer:
    """Tensors that a leader hands on to its group as they came, so that they cross its links in as few bytes.

    Attributes:
        answers: how they became bytes.
        split: how they are divided over the servers.
    """

    answers: WireFormat
    split: Split

    @cached_property
    def _bounds(self) -> list[tuple[int, int]]:
        return [self.answers.sizes(share) for share in self.split.shares]

    @property
    def are_sizes_known(self) -> bool:
        """Whether they are before the tensors come."""
        return all(smallest == largest for smallest, largest in self._bounds)

    @cached_property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(_aligned(largest) for _, largest in self._bounds)

    def parts(self, coded: Tensor) -> list[Tensor]:
        """What each server has sent, in memory of so many bytes."""
        places = accumulate((_aligned(largest) for _, largest in self._bounds), initial=0)
        return [coded[place : place + largest] for place, (_, largest) in zip(places, self._bounds, strict=False)]

    def decode(self, coded: Tensor, into: Tensor, part: Part) -> None:
        """The tensors, in flat memory as the layout has it."""
        self.split.write(into, _decoded(self.answers, self.parts(coded), self.split, part))


def _aligned(nbytes: int) -> int:
    """So many bytes or a few more, so that numbers of any kind may follow."""
    return -(-nbytes // 8) * 8


def _decoded(answers: WireFormat, payloads: Sequence[Tensor], split: Split, part: Part) -> list[Tensor]:
    """The tensors of each server's part, as its share of the layout has them."""
    shares = zip(payloads, split.shares, part.backs(len(payloads)), strict=True)
    return [decode(answers, payload, share, memory) for payload, share, memory in shares]
