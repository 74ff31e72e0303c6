"""What the servers hold of a run as a whole: read as of one moment, handed over, and stored for groups that join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_omni.errors import ProtocolError
from lightning_omni.optimizer.model_replica import Part
from lightning_omni.optimizer.place import Place
from lightning_omni.protocol import messages as m
from lightning_omni.protocol.codec import Packed, pack, unpack
from lightning_omni.protocol.cut import Cut
from lightning_omni.protocol.group import Outgoing
from lightning_omni.protocol.layout import Layout
from lightning_omni.protocol.requests import Requests
from lightning_omni.protocol.split import Split


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


class ServerStore:
    """Reads and writes what the servers hold, each its share. For ranks that speak.

    Args:
        place: this rank's, in the run.
        connections: gives those to the servers, with nothing under way.
    """

    def __init__(self, place: Place, connections: Callable[[], Requests]) -> None:
        self._place, self._connections = place, connections

    def snapshot(self, with_state: bool = True, version: int = 0) -> ServerSnapshot:
        """Everything that the server holds, as of one moment, or what this rank has of it. For ranks that speak.

        Args:
            with_state: also what optimizers and methods remember, and the gathered states of groups.
            version: number of a validation: the moment at which this was first asked for that one. 0 is now.
        """
        requests, take = self._connections(), m.TakeSnapshot(with_state=with_state, version=version)
        answers = requests.exchange([Outgoing(take)] * requests.count, m.Snapshot)
        first, *others = (unpack(answer.packed, payload, copy=True) for answer, payload in answers)
        cut, parts = answers[0][0].cut, first["parts"]
        if others:
            if any(answer.cut.pushes != cut.pushes for answer, _ in answers):
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
        split = self._place.split_of(part, len(shares))
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
        requests = self._connections()
        parts = [self._cut_again(self._place.parts[index], part, requests.count) for index, part in enumerate(parts)]
        seeds = []
        for server in range(requests.count):
            tree = [
                part if requests.count == 1 else self._share_of(self._place.parts[index], part, server, requests.count)
                for index, part in enumerate(parts)
            ]
            packed, buffer = pack({"parts": tree})
            seeds.append(Outgoing(m.Seed(packed=packed, nbytes=buffer.numel()), buffer))
        requests.exchange(seeds, m.Seeded)

    def _cut_again(self, part: Part, seed: dict[str, Any], servers: int) -> dict[str, Any]:
        """What an optimizer's servers are handed; a checkpoint may have fragments as other servers have cut them."""
        if seed.get("method") is None or part.head is not None or self._place.share is not None:
            return seed
        split = self._place.split_of(part, servers) if servers > 1 else Split.whole(part.replica.layout)
        return {**seed, "method": split.recut(seed["method"])}

    def store_group_state(self, packed: Packed, buffer: Tensor) -> None:
        """What this group alone knows, or what this rank has of it, becomes part of the next snapshot."""
        message = m.GroupState(packed=packed, nbytes=buffer.numel())
        self._connections().own.exchange(message, m.GroupStateStored, buffer)

    def _share_of(self, part: Part, seed: dict[str, Any], server: int, servers: int) -> dict[str, Any]:
        """What one of several servers is handed of an optimizer; of a merged head, the one that coordinates all."""
        if part.head is not None:
            if server == 0:
                return seed
            empty = Split.of(Layout(()), servers, elementwise=True)
            optimizer = None if self._place.steps_at_worker else empty.described(seed["optimizer"], server)
            return {**seed, "optimizer": optimizer, "weights": {}, "head": None}
        split = self._place.split_of(part, servers)
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
        """What a group that joins from here on is given beside the weights. By the recorder, when groups have parted.

        Where its members hold something together, each stores its share with its own server, and the recorder last.

        Args:
            packed: the tree without its tensors, and ...
            buffer: ... these: see `lightning_omni.protocol.codec.pack`.
        """
        message = m.StoreRunState(packed=packed, nbytes=buffer.numel())
        self._connections().own.exchange(message, m.RunStateStored, buffer)

    def read_run_state(self, share: bool = False) -> dict[str, Any]:
        """What was stored for groups that join.

        Args:
            share: reads what a member of the recorder's group has stored with this rank's own server.
        """
        requests = self._connections()
        connection = requests.own if share else requests.coordinator
        answer, payload = connection.exchange(m.ReadRunState(), m.StoredRunState)
        tree: dict[str, Any] = unpack(answer.packed, payload, copy=True)
        return tree
