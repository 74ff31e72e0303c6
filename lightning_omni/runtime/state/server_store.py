"""The state that the servers hold of a run as a whole: consistent snapshots, seeds, and state for joining groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_omni.errors import ProtocolError
from lightning_omni.group.core import Outgoing
from lightning_omni.runtime.model.replica import Part
from lightning_omni.runtime.parallel_state import ParallelState
from lightning_omni.transport.requests import Requests
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.messages import SnapshotId
from lightning_omni.wire.partition import Split


class ServerSnapshot(NamedTuple):
    """A consistent state of all servers.

    Attributes:
        cut: the counts that describe the state.
        parts: for each optimizer ``{"weights": {name: tensor}, "state": {...}, "clock": 0, "method": {...}}``.
        groups: for each group, the state that was gathered from it.
    """

    cut: SnapshotId
    parts: Sequence[dict[str, Any]]
    groups: Mapping[int, Any]


class ServerStore:
    """The access to the state that the servers hold, each its share, on ranks that exchange with them."""

    def __init__(self, parallel: ParallelState, connections: Callable[[], Requests]) -> None:
        self._parallel, self._connections = parallel, connections

    def snapshot(self, with_state: bool = True, version: int = 0) -> ServerSnapshot:
        """Return a consistent state of the servers, or this rank's share of it.

        Args:
            with_state: whether to include the states of optimizers and methods, and the gathered states of groups.
            version: number of a validation, for the state at the first request with that number; 0 for the current one.
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
        """Send weights and optimizers to the servers, to each its share. The recorder calls it.

        Args:
            parts: for each optimizer, as `lightning_omni.server.snapshots.Snapshots.seed` takes them.
        """
        requests = self._connections()
        parts = [self._cut_again(self._parallel.parts[index], part, requests.count) for index, part in enumerate(parts)]
        seeds = []
        for server in range(requests.count):
            tree = [
                part
                if requests.count == 1
                else self._share_of(self._parallel.parts[index], part, server, requests.count)
                for index, part in enumerate(parts)
            ]
            packed, buffer = pack({"parts": tree})
            seeds.append(Outgoing(m.UploadWeights(packed=packed, nbytes=buffer.numel()), buffer))
        requests.exchange(seeds, m.WeightsUploaded)

    def _cut_again(self, part: Part, seed: dict[str, Any], servers: int) -> dict[str, Any]:
        """Return a seed in the fragments of the present servers; a checkpoint may have those of others."""
        if seed.get("method") is None or self._parallel.share is not None:
            return seed
        split = self._parallel.split_of(part, servers) if servers > 1 else Split.whole(part.replica.layout)
        return {**seed, "method": split.recut(seed["method"])}

    def store_group_state(self, packed: Packed, buffer: Tensor) -> None:
        """Store the state that only this group has, or this rank's share of it, for the next snapshot."""
        message = m.GroupState(packed=packed, nbytes=buffer.numel())
        self._connections().own.exchange(message, m.GroupStateStored, buffer)

    def _share_of(self, part: Part, seed: dict[str, Any], server: int, servers: int) -> dict[str, Any]:
        """Return one server's share of an optimizer's seed."""
        split = self._parallel.split_of(part, servers)
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
        """Store the state beside the weights for groups that join. The recorder calls it when groups separate.

        Where its members hold the model together, each stores its share at its own server, and the recorder last.
        """
        message = m.StoreRunState(packed=packed, nbytes=buffer.numel())
        self._connections().own.exchange(message, m.RunStateStored, buffer)

    def read_run_state(self, share: bool = False) -> dict[str, Any]:
        """Return the stored state for groups that join.

        Args:
            share: whether to read the share that a member of the recorder's group has stored at this rank's own server.
        """
        requests = self._connections()
        connection = requests.own if share else requests.coordinator
        answer, payload = connection.exchange(m.ReadRunState(), m.StoredRunState)
        tree: dict[str, Any] = unpack(answer.packed, payload, copy=True)
        return tree
