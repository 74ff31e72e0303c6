"""The state machine that a server's process builds from its settings, with user-defined plugins."""

from __future__ import annotations

import math
import secrets
import time

from lightning_omni import methods
from lightning_omni.methods.model.master import resolver
from lightning_omni.methods.model.modules import module_resolver
from lightning_omni.server.core import ServerCore
from lightning_omni.server.event_log import RecordFile
from lightning_omni.transport import registry
from lightning_omni.transport.registry import Transport
from lightning_omni.transport.serving.process import ServerSettings
from lightning_omni.wire.formats.base import load_format


def load_plugins(settings: ServerSettings) -> list[type[Transport]]:
    """Import the user-defined methods, wire formats and transports of the run; return the transports."""
    for path in settings.methods:
        methods.load(path)
    for path in settings.wire_formats:
        load_format(path)
    return [registry.load(path) for path in settings.transports]


def core_from(settings: ServerSettings) -> ServerCore:
    """Return the state machine, in real time."""
    return ServerCore(
        bytes.fromhex(settings.key),
        secrets.token_bytes,
        heartbeat_timeout=settings.heartbeat_timeout,
        joined_heartbeat_timeout=settings.joined_heartbeat_timeout,
        join_timeout=settings.join_timeout,
        progress_timeout=math.inf if settings.progress_timeout is None else settings.progress_timeout,
        resolve=resolver(settings.allow_optimizers),
        resolve_module=module_resolver(settings.allow_modules),
        clock=time.monotonic,
        record=RecordFile(settings.record) if settings.record else None,
        servers=settings.servers,
        number=settings.number,
    )
