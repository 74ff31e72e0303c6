"""Hosts with links of a chosen speed, on one machine, for studies of slow networks.

Not a script. Each host is a network namespace of Linux with an address of its own, joined to the others by virtual
Ethernet; ``tc`` limits the speed of its link, or of its site's, in each direction. Nothing of it is visible from
outside, and nothing is left behind, however the script ends: a namespace lives as long as the process that holds it,
and that process ends with this one, as do the processes that were started on hosts. A user who is not root gets the
rights in a user namespace, where the system allows one (`with_own_network`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SUBNET = "10.77.0"
BURST = 32_768
"""Bytes that a link carries at once when it was idle: little against a model, and more than the largest packet."""
LARGEST_PACKET = 16_384
QUEUE = "50ms"
"""How long a packet waits at most for its link, before it is lost and sent again."""
CONGESTION = ("cubic", "reno")
"""How TCP finds out what a link carries: Linux's default, whatever this machine's is, for it changes what is measured.
Where many send to one at once, `bbr` leaves a quarter of a slow link unused. Some systems keep cubic from namespaces;
reno is always allowed, and on links as short as these does the same."""
PATIENCE = 10.0
"""Seconds for a command that sets something up."""


class NoNamespacesError(OSError):
    """This machine, or this user, cannot make network namespaces; the message says why."""


@dataclass(frozen=True)
class Network:
    """Which hosts there are, and how fast their links are.

    Args:
        sites: number of hosts at each site.
        host_mbit: what each host's link carries, in megabits a second in each direction; None limits nothing. Several
            are of the hosts in their order.
        site_mbit: likewise for each site's link to the others.
    """

    sites: tuple[int, ...] = (4,)
    host_mbit: float | tuple[float | None, ...] | None = None
    site_mbit: float | None = None

    @property
    def size(self) -> int:
        """Number of hosts."""
        return sum(self.sites)

    def mbit_of(self, host: int) -> float | None:
        """What one host's link carries."""
        return self.host_mbit[host] if isinstance(self.host_mbit, tuple) else self.host_mbit


@dataclass(frozen=True)
class Traffic:
    """Bytes over a link since it was made, headers of packets counted."""

    sent: int
    received: int


class Hosts:
    """The hosts of a network, while it is entered as a context.

    Attributes:
        network: as given.
        addresses: each host's, in their order.

    Example::

        with Hosts(Network(sites=(2, 2), site_mbit=100)) as hosts:
            process = hosts.start(0, [sys.executable, "train.py"])
            process.wait(60)
            print(hosts.traffic(0).sent, "bytes left host 0")
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.addresses = [f"{SUBNET}.{number + 1}" for number in range(network.size)]
        self._stack = ExitStack()
        self._hub: subprocess.Popen[bytes]
        self._hosts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a process on a host; it is killed, with all that it has started, when the context is left.

        It is also killed when the thread that calls this ends, so that a script that is killed leaves none.

        Args:
            host: number of the host.
            command: program and arguments.
            environment: variables besides those of this process.
            options: for ``subprocess.Popen``.
        """
        # torch's gloo looks its own host name up, which no namespace has an address for.
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", **(environment or {})}
        tied = self.inside(host, ["setpriv", "--pdeathsig", "KILL", "--", *command])
        process = subprocess.Popen(tied, env=variables, start_new_session=True, **options)
        self._stack.callback(_kill, process)
        return process

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """What runs a command on a host, in the process that is started with it; ending it is then the caller's."""
        return ["nsenter", f"--target={self._hosts[host].pid}", "--net", "--", *command]

    def cut(self, host: int) -> None:
        """A host's link carries nothing from now on."""
        _in(self._hub, "ip", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """A link that was cut carries again."""
        _in(self._hub, "ip", "link", "set", f"port{host}", "up")

    def traffic(self, host: int) -> Traffic:
        """What a host's link has carried."""
        return _traffic(self._hosts[host], "eth0")

    def site_traffic(self, site: int) -> Traffic:
        """What a site's link to the others has carried, as the site sees it."""
        seen = _traffic(self._hub, f"up{site}")  # from the switch between the sites
        return Traffic(seen.received, seen.sent)

    def _build(self) -> None:
        if sys.platform != "linux":
            raise NoNamespacesError("hosts are emulated with network namespaces, which only Linux has")
        for program in ("ip", "tc", "nsenter", "setpriv", "unshare"):
            if shutil.which(program) is None:
                raise NoNamespacesError(f"{program} is not installed: packages iproute2 and util-linux have it")
        self._hub = self._hold()
        _in(self._hub, "ip", "link", "add", "between", "type", "bridge")
        _in(self._hub, "ip", "link", "set", "between", "up")
        numbers = iter(range(self.network.size))
        for site, count in enumerate(self.network.sites):
            _in(self._hub, "ip", "link", "add", f"site{site}", "type", "bridge")
            _in(self._hub, "ip", "link", "set", f"site{site}", "up")
            _in(self._hub, "ip", "link", "add", f"up{site}", "type", "veth", "peer", "name", f"down{site}")
            self._join(f"up{site}", "between")
            self._join(f"down{site}", f"site{site}")
            for end in (f"up{site}", f"down{site}"):
                _limit(self._hub, end, self.network.site_mbit)
            for _ in range(count):
                self._add_host(next(numbers), site)

    def _add_host(self, number: int, site: int) -> None:
        holder = self._hold()
        self._hosts.append(holder)
        here, there = f"port{number}", "eth0"
        _in(self._hub, "ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(holder.pid))
        self._join(here, f"site{site}")
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        _in(holder, "sh", "-c", " || ".join(f"echo {name} >{setting}" for name in CONGESTION))
        _in(holder, "ip", "link", "set", "lo", "up")
        _in(holder, "ip", "address", "add", f"{self.addresses[number]}/24", "dev", there)
        _in(holder, "ip", "link", "set", there, "up")
        _limit(self._hub, here, self.network.mbit_of(number))
        _limit(holder, there, self.network.mbit_of(number))

    def _join(self, end: str, bridge: str) -> None:
        _in(self._hub, "ip", "link", "set", end, "master", bridge, "up")

    def _hold(self) -> subprocess.Popen[bytes]:
        """A process in a network namespace of its own, which ends when this one does: then its input ends."""
        process = subprocess.Popen(["unshare", "--net", "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._stack.callback(_release, process)
        ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + PATIENCE
        while process.poll() is None and os.readlink(f"/proc/{process.pid}/ns/net") == ours:
            if time.monotonic() > deadline:
                raise NoNamespacesError(f"no network namespace within {PATIENCE:g} s")
            time.sleep(1e-3)
        if process.poll() is not None:
            raise NoNamespacesError("no network namespaces for this user: run the script as root")
        return process


def with_own_network() -> None:
    """Makes sure that this process may make network namespaces; who is not root starts the script again as who may.

    Raises:
        NoNamespacesError: the system allows none.
    """
    if sys.platform == "linux" and os.geteuid() != 0:
        probe = ["unshare", "--user", "--map-root-user", "--net", "true"]
        if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, timeout=PATIENCE).returncode:
            raise NoNamespacesError("this user may make no network namespaces here: run the script as root")
        _again()


def _again() -> NoReturn:
    os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--", sys.executable, *sys.argv])


def _in(holder: subprocess.Popen[bytes], *command: str) -> str:
    """Runs a command in a namespace and returns what it prints."""
    inside = ["nsenter", f"--target={holder.pid}", "--net", "--", *command]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _limit(holder: subprocess.Popen[bytes], device: str, mbit: float | None) -> None:
    """What leaves by this device is no more than that."""
    if mbit is None:
        return
    _in(holder, "ip", "link", "set", device, "gso_max_size", str(LARGEST_PACKET))
    rate = ["rate", f"{mbit * 1e6:.0f}bit", "burst", str(BURST), "latency", QUEUE]
    _in(holder, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)


def _traffic(holder: subprocess.Popen[bytes], device: str) -> Traffic:
    for line in Path(f"/proc/{holder.pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            fields = counts.split()
            return Traffic(sent=int(fields[8]), received=int(fields[0]))
    raise LookupError(device)


def _kill(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE)


def _release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(PATIENCE)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Within it, what this machine cannot do ends the script with a sentence, not a traceback, and so does Ctrl-C.

    SIGTERM leaves the contexts of the script, so that its files are removed, too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except NoNamespacesError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from None
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        raise SystemExit(128 + signal.SIGINT) from None
