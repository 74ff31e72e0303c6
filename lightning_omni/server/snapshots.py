"""Uploads and downloads of a consistent state of all optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_omni.errors import MalformedMessage, OmniError, ProtocolError
from lightning_omni.methods import REGISTRY, Method
from lightning_omni.methods.model.modules import ResolveModule
from lightning_omni.methods.model.server_optimizer import Resolve
from lightning_omni.server.epochs.validation import MOST_OPEN
from lightning_omni.server.parameters.served_parameters import ROOM, ServedParameters
from lightning_omni.server.parameters.store import ServedHead
from lightning_omni.server.run_context import RunContext
from lightning_omni.server.service import Out, Payload, Sender, Service, as_tensor
from lightning_omni.server.training import Training
from lightning_omni.topology import Topology
from lightning_omni.wire import messages as m
from lightning_omni.wire.codec import Packed, pack, unpack
from lightning_omni.wire.messages import SnapshotId


class SnapshotContents(NamedTuple):
    cut: SnapshotId
    packed: Packed
    buffer: Tensor


class Snapshots(Service):
    def __init__(self, run: RunContext, training: Training, resolve: Resolve, resolve_module: ResolveModule) -> None:
        self._roster, self._store, self._epochs = run.roster, run.store, run.epochs
        self._events, self._journal, self._replication = run.events, run.journal, run.replication
        self._training = training
        self._resolve = resolve
        self._resolve_module = resolve_module
        self._group_states: dict[int, Any] = {}
        self._versions: dict[int, SnapshotContents] = {}

    def form(self, topology: Topology, method: Method, message: m.FormGroups) -> None:
        self._group_states.clear()
        self._versions.clear()

    def evict(self, group: int, lost: bool) -> list[Out]:
        if lost:
            self._group_states.pop(group, None)
        return []

    def state(self) -> dict[str, Any]:
        return {"parts": [served.state() for served in self._store.all]}

    def load(self, state: dict[str, Any]) -> None:
        formed = self._roster.formed.message
        assert formed is not None
        method, groups = REGISTRY.from_wire(formed.method), self._roster.formed.history(len(formed.groups))
        self._store.hold([ServedParameters.from_state(part, method, groups, self._resolve) for part in state["parts"]])
        self._training.apply_settings(formed)

    def seed(self, sender: Sender, message: m.UploadWeights, payload: Payload) -> list[Out]:
        formed = self._roster.formed
        if formed.message is None:
            raise ProtocolError("form groups first")
        tree = unpack(message.packed, as_tensor(payload))
        method, groups = REGISTRY.from_wire(formed.message.method), self._roster.formed.alive
        try:
            self._store.hold([self._served_of(part, method, groups) for part in tree["parts"]])
        except OmniError:
            raise
        except Exception as error:  # torch raises various errors on invalid states
            raise MalformedMessage(f"not a seed: {type(error).__name__}: {error}") from error
        self._training.apply_settings(formed.message)
        for number in range(len(self._store.all)):
            self._events.seed(number, formed.groups, formed.message)
        self._journal.outdate()
        return [Out(sender.peer, m.DATA, m.WeightsUploaded())]

    def store_group_state(self, sender: Sender, message: m.GroupState, payload: Payload) -> list[Out]:
        # It is unpacked now and packed again for the snapshot, so it cannot contain anything that a snapshot must not.
        self._group_states[sender.group] = unpack(message.packed, as_tensor(payload).clone())
        return [Out(sender.peer, m.DATA, m.GroupStateStored())]

    def check_version(self, sender: Sender, message: m.TakeSnapshot) -> None:
        if self._replication.number == 0 and message.version > (last := self._epochs.validations.last):
            raise ProtocolError(f"there is no validation {message.version} yet; {last} were given to groups")

    def take(self, sender: Sender, message: m.TakeSnapshot, payload: Payload) -> list[Out]:
        self.check_version(sender, message)
        if not message.version:
            contents = self._contents(message.with_state)
        else:
            contents = self._version(message.version)
            contents = contents if message.with_state else _weights_of(contents)
        answer = m.Snapshot(cut=contents.cut, packed=contents.packed, nbytes=contents.buffer.numel())
        return [Out(sender.peer, m.DATA, answer, (contents.buffer,))]

    def release(self, sender: Sender, message: m.ReleaseVersion, payload: Payload) -> list[Out]:
        self._versions = {number: kept for number, kept in self._versions.items() if number > message.number}
        self._epochs.validations.save(message.number)
        self._journal.note(self._epochs.validations.save, message.number)
        return [Out(sender.peer, m.CONTROL, m.VersionReleased())]

    def _version(self, number: int) -> SnapshotContents:
        if 0 < number <= self._epochs.validations.saved:  # no other rank will request it
            return self._contents(with_state=True)
        if number not in self._versions:
            if number < 0 or len(self._versions) > MOST_OPEN:
                raise ProtocolError(f"the weights of validations {sorted(self._versions)} are kept, and no more")
            self._versions[number] = self._contents(with_state=True)
        return self._versions[number]

    def _contents(self, with_state: bool) -> SnapshotContents:
        parts: list[dict[str, Any]] = [served.master.snapshot() for served in self._store.all]
        if not with_state:
            parts = [{**part, "state": {}} for part in parts]
        tree: dict[str, Any] = {"parts": parts}
        if with_state:
            for part, served in zip(parts, self._store.all, strict=True):
                part["method"] = served.method_side.state()
            tree["groups"], self._group_states = self._group_states, {}  # used once, because later they are outdated
        return SnapshotContents(self._cut, *pack(tree))

    @property
    def _cut(self) -> SnapshotId:
        plan = self._epochs.plan
        return SnapshotId(
            clocks=tuple(served.master.clock for served in self._store.all),
            pushes=dict(self._training.handled),
            epoch=plan.epoch if plan is not None else -1,
            total=plan.total if plan is not None else 0,
            trained=self._epochs.trained_spans,
        )

    def _served_of(self, part: Any, method: Method, groups: Iterable[int]) -> ServedParameters:
        optimizer, weights, clock = part["optimizer"], part["weights"], int(part["clock"])
        if part.get("head") is not None:
            return ServedHead(optimizer, weights, clock, part["head"], groups, self._resolve, self._resolve_module)
        room, state = ROOM + int(part.get("room", 0)), part.get("method")
        return ServedParameters(optimizer, weights, clock, method, groups, self._resolve, state, room)


def _weights_of(contents: SnapshotContents) -> SnapshotContents:
    parts = unpack(contents.packed, contents.buffer)["parts"]
    return SnapshotContents(contents.cut, *pack({"parts": [{**part, "state": {}, "method": {}} for part in parts]}))
