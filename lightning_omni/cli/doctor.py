"""The checks of a connection from this machine to a server; each succeeds, warns, or fails with a remedy."""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lightning_omni.checks import counted
from lightning_omni.cli.console import CommandOutput
from lightning_omni.errors import ConfigurationError, OmniError, Refused
from lightning_omni.transport.zeromq.addresses import EVERYWHERE, check_address, directory_of, is_private
from lightning_omni.transport.zeromq.keys import check_encryption, default_path, is_open_to_others, load_key
from lightning_omni.transport.zeromq.observer import Observer
from lightning_omni.transport.zeromq.server import versions
from lightning_omni.wire import messages as m
from lightning_omni.wire.formats import wire_named
from lightning_omni.wire.layout import Layout, TensorSpec

CONNECT_TIME = 5.0
"""Seconds in which a port must accept a connection."""
PROBES = 20
"""Number of small requests, whose median time is the latency."""
SECONDS = 0.7
"""Least duration of the measurement in each direction."""
UNDER_WAY = {"to": 192, "from": 8}
"""Pieces that travel at a time, 6 to 8 MB in total: fewer than the server queues, and enough for most links."""
WIRES = ("fp32", "bf16", "int8", "topk:0.01")
"""Wire formats for which the time of an exchange is predicted."""
_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}
_WIDEST_STEP = len("bandwidth from it")
_ALIKE = {"torch": 2, "lightning-omni": 3}
"""Number of leading parts of a version that should agree on both sides."""


class Failed(Exception):
    """The failure of a check that later ones require."""


class Checkup:
    def __init__(self, output: CommandOutput) -> None:
        self._print, self.wait_for = output
        self._remedies: list[str] = []
        self._expected: list[str] = []
        self.has_failed = False

    def found(self, step: str, what: str) -> None:
        self._show("ok", step, what)

    def warn(self, step: str, what: str, remedy: str) -> None:
        self._show("warning", step, what)
        self._remedies.append(f"{step}: {remedy}")

    def fail(self, step: str, what: str, remedy: str) -> Failed:
        self._show("failed", step, what)
        self.has_failed = True
        self._remedies.append(f"{step}: {remedy}")
        return Failed()

    def expect(self, sentence: str) -> None:
        self._expected.append(sentence)

    def _show(self, kind: str, step: str, what: str) -> None:
        mark, style = _MARKS[kind]
        row = Table(Column(width=1), Column(width=_WIDEST_STEP), Column(), show_header=False, show_edge=False)
        row.add_row(Text(mark, style), Text(step), Text(what))
        self._print(row)

    def sentences(self) -> Iterator[Text]:
        yield from (Text.from_markup(f"[yellow]do:[/yellow] {escape(each)}") for each in self._remedies)
        yield from map(Text, self._expected)


def examine(checkup: Checkup, address: str, key_file: Path | None, mb: float, encryption: str) -> None:
    """Check the connection step by step; ``mb`` is the model's size in MB."""
    check_encryption(encryption)
    with contextlib.suppress(Failed):
        key = _key(checkup, key_file)
        host, port = _address(checkup, address)
        if host:
            _port(checkup, "control port", host, port)
        observer = _observer(checkup, address, key, encryption)
        try:
            checkup.wait_for("the server to say what it is")
            server = observer.describe()
            _versions(checkup, server)
            if host:
                _port(checkup, "data port", host, server.data_port)
            _run(checkup, observer)
            _measure(checkup, observer, server, mb)
        except OmniError as error:
            checkup.fail("server", str(error), "look at its log; if it has ended, start it again")
        finally:
            observer.close()


# --- Steps -----------------------------------------------------------------------------------------------------------


def _key(checkup: Checkup, key_file: Path | None) -> bytes:
    try:
        key = load_key(key_file)
    except ConfigurationError as error:
        raise checkup.fail("key", str(error), "copy the server's key file here, or set LIGHTNING_OMNI_KEY") from None
    if is_open_to_others(key_file):
        file = key_file or default_path()
        checkup.warn("key", f"{file} can be read or written by other users of this machine", f"chmod 600 {file}")
    else:
        checkup.found("key", f"{8 * len(key)} bits from {key_file or 'the environment or the default file'}")
    return key


def _address(checkup: Checkup, address: str) -> tuple[str, int]:
    """Return host and port; no host for sockets in a directory."""
    try:
        check_address(address, address)
    except ConfigurationError as error:
        raise checkup.fail("address", str(error), "pass what lightning-omni serve has printed") from None
    if is_private(address):
        if not directory_of(address).is_dir():
            raise checkup.fail(
                "address", f"there is no directory {directory_of(address)}", "run this where the server is"
            )
        checkup.found("address", "sockets in a directory of this machine: no network in between")
        return "", 0
    parts = urlsplit(address)
    checkup.wait_for(f"a name server that knows {parts.hostname}")
    host, port = parts.hostname or "", parts.port or 0
    if host in EVERYWHERE:
        raise checkup.fail(
            "address", f"{host} is every interface of the server's machine", "pass that machine's address"
        )
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise checkup.fail(
            "address",
            f"{host}: {error.strerror}",
            "pass an IP address, or give this machine a name server that knows it",
        ) from None
    checkup.found("address", ", ".join(sorted(found)))
    return host, port


def _port(checkup: Checkup, step: str, host: str, port: int) -> None:
    checkup.wait_for(f"{host}:{port} to take a connection, up to {CONNECT_TIME:.0f} s")
    began = time.perf_counter()
    try:
        with socket.create_connection((host, port), CONNECT_TIME) as wire:
            took, own = time.perf_counter() - began, str(wire.getsockname()[0])
    except ConnectionRefusedError:
        raise checkup.fail(
            step,
            f"{host}:{port} refuses connections",
            "start lightning-omni serve there with its IP address as --host (the default is loopback), and with"
            f" --port and --data-port; or a firewall rejects port {port}",
        ) from None
    except (TimeoutError, OSError) as error:
        raise checkup.fail(
            step,
            f"{host}:{port} does not answer: {error}",
            f"open port {port} in the firewalls between this machine and the server's (serve has --port and"
            " --data-port), and see that the address is the one that is reachable from here",
        ) from None
    checkup.found(step, f"{host}:{port} in {1000 * took:.1f} ms, from {own}")


def _observer(checkup: Checkup, address: str, key: bytes, encryption: str) -> Observer:
    checkup.wait_for("a parameter server to shake hands, up to 10 s")
    try:
        observer = Observer(address, key, encryption)
    except Refused as no:
        remedies = {
            "key": "copy the server's key file here, or set LIGHTNING_OMNI_KEY to its key; and --encryption as serve's",
            "version": "install the same version of lightning-omni on both sides",
            "malformed": "pass the address that lightning-omni serve has printed",
        }
        raise checkup.fail("handshake", str(no), remedies.get(no.code, "look at the server's log")) from None
    except OmniError as error:
        remedy = "something else listens there, or the server hangs: look at its log"
        raise checkup.fail("handshake", str(error), remedy) from None
    secured = "encrypted (CURVE)" if encryption == "curve" and not is_private(address) else "not encrypted"
    checkup.found("handshake", f"both sides hold the key; protocol {m.VERSION}; {secured}")
    return observer


def _versions(checkup: Checkup, server: m.ServerDescription) -> None:
    here, there = versions(), server.versions
    names = ("lightning-omni", "torch", "pytorch-lightning", "lightning", "python")
    text = "; ".join(
        f"{name} {here.get(name, '-')}"
        + f" (server {there[name]})" * (there.get(name, here.get(name)) != here.get(name))
        for name in names
        if name in here
    )
    other = [
        name
        for name, parts in _ALIKE.items()
        if name in there and here.get(name, "").split(".")[:parts] != there[name].split(".")[:parts]
    ]
    if other:
        checkup.warn("versions", text, f"install the same {' and '.join(other)} on both sides")
    else:
        checkup.found("versions", text)


def _run(checkup: Checkup, observer: Observer) -> None:
    checkup.wait_for("the overview of the run")
    seen = observer.overview()
    if seen.over:
        checkup.warn(
            "run", f"{seen.run} is over: {seen.over}", "start the server again, or wait until its ranks are gone"
        )
    elif seen.run:
        what = f"{counted(len(seen.groups), 'group')}, {counted(len(seen.live), 'rank')}"
        checkup.found("run", f"{seen.run}: {what}")
    else:
        checkup.found("run", "none: the server waits for ranks")


def _measure(checkup: Checkup, observer: Observer, server: m.ServerDescription, mb: float) -> None:
    checkup.wait_for(f"{PROBES + 1} answers, for the latency")
    observer.echo()
    latency = statistics.median(observer.echo().times[0] for _ in range(PROBES))
    checkup.found("latency", f"{1000 * latency:.2f} ms there and back, through the server's loop")
    piece = secrets.token_bytes(m.LARGEST_INLINE)
    rates = {}
    for way, payload, back in (("to", piece, 0), ("from", b"", m.LARGEST_ECHO)):
        size = len(payload) or back
        least = UNDER_WAY[way] * size / 1e6
        checkup.wait_for(f"{least:.0f} MB to travel {way} the server, for {SECONDS:g} s at least")
        measured = observer.echo(payload, back, UNDER_WAY[way], SECONDS)
        rates[way] = measured.rate * size
        most = UNDER_WAY[way] * size / max(latency, 1e-9)
        at_least = "at least " if rates[way] > 0.7 * most else ""
        checkup.found(f"bandwidth {way} it", f"{at_least}{rates[way] / 1e6:.0f} MB/s ({8e-9 * rates[way]:.2f} Gbit/s)")
    _expect(checkup, server, latency, rates["to"], rates["from"], mb)


def _expect(checkup: Checkup, server: m.ServerDescription, latency: float, to: float, back: float, mb: float) -> None:
    layout = Layout((TensorSpec("parameters", (max(1, int(mb * 1e6 / 4)),), "float32"),))
    whole = layout.nbytes
    seconds = {name: latency + wire_named(name).sizes(layout)[1] / to + whole / back for name in WIRES}
    text = ", ".join(f"{name} {taken:.2g} s" for name, taken in seconds.items())
    checkup.expect(
        f"A model of {mb:g} MB: an exchange (push and answer) takes {text}, by compression=. With local steps"
        ' (method="local_sgd:period=16") there is one in so many steps; overlap=True hides it if a step takes longer.'
    )
    checkup.expect(
        f"A group that joins reads {whole / 1e6:.0f} MB of weights, {whole / back:.2g} s. All groups share the server's"
        f" link: {min(to, back) / whole:.3g} exchanges a second at most, as measured by one connection; a run that"
        " trains meanwhile had its part of it."
    )
    silence, joined = server.heartbeat_timeout, server.joined_heartbeat_timeout
    where = f" ({joined:g} s where groups join on their own)" if joined not in (0, silence) else ""
    progress = "never" if server.progress_timeout == float("inf") else f"after {server.progress_timeout:g} s"
    checkup.expect(
        f"The server evicts a group after {silence:g} s of silence{where}, and one that gets nothing done"
        f" {progress}. If it dies, "
        + (
            f"ranks look for it for {server.reconnect_timeout:g} s."
            if server.reconnect_timeout
            else "the run ends: start it with --state."
        )
    )
