"""Addresses of sockets, and the private directory that holds the sockets of a run on one node.

The server locks the directory while it lives, and removes it; if it is killed, a rank that ends does, or the next
server that starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from lightning_omni.errors import ConfigurationError, ConnectionLost

PREFIX = "lightning-omni-"
CONTROL, DATA, MEMORY = "control", "data", "memory"
_HOST = re.compile(r"[^\W_][\w-]*(\.[\w-]+)*\.?|(?=.*:)[0-9a-f:.]+(%[\w.-]+)?", re.ASCII | re.IGNORECASE)
"""A name, an IPv4 or an IPv6 address."""
EVERYWHERE = "0.0.0.0", "::"
"""The addresses of all interfaces of a machine."""
_SCHEME, _TCP = "ipc://", "tcp://"
_LONGEST_NAME = "peer-65535-0123abcd"
_NEW = ".new-"


class PrivateDirectory:
    """A directory of mode 0700 for one server, locked by the process that creates it.

    Args:
        base: parent directory; None takes the first of the temporary directory, ``$XDG_RUNTIME_DIR`` and ``/tmp`` in
            which sockets can be created.
        at: directory of an earlier server that is gone; the new server takes it over.
    """

    def __init__(self, base: Path | None = None, at: Path | None = None) -> None:
        self.path, self._lock = _make(base) if at is None else _take(at)

    def address(self, name: str) -> str:
        return f"{_SCHEME}{self.path}/{name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def is_offered() -> bool:
    import zmq

    return bool(zmq.has("ipc"))


def is_private(address: str) -> bool:
    return address.startswith(_SCHEME)


def directory_of(address: str) -> Path:
    return Path(address.removeprefix(_SCHEME)).parent


def sibling(address: str, name: str) -> str:
    return f"{address.rpartition('/')[0]}/{name}"


def remove_if_abandoned(address: str) -> None:
    if is_private(address):
        _remove_if_abandoned(directory_of(address))


def check_address(address: str, given: str = "") -> None:
    """Raise `ConfigurationError` unless the address reads ``tcp://host:port`` or ``ipc:///path``.

    ``given`` is the argument with the address, for the message.
    """
    if not _is_address(address):
        meant = f', here "{_TCP}{address}"' if _is_address(f"{_TCP}{address}") else ""
        raise ConfigurationError(
            f'{given or f"server={address!r}"}: pass the address of a running server as "{_TCP}host:port"{meant}'
        )


def _is_address(address: str) -> bool:
    if is_private(address):
        return address.startswith(f"{_SCHEME}/")  # a path may contain any characters
    try:
        parts = urlsplit(address)
        good = not (parts.query or parts.fragment or parts.username or " " in address)
        is_host = _HOST.fullmatch(parts.hostname or "") is not None
        return good and parts.scheme == "tcp" and is_host and bool(parts.port) and not parts.path
    except ValueError:
        return False


def data_address(control: str, port: int) -> str:
    """Return the address of a server's data socket.

    Example:
        >>> data_address("tcp://10.0.0.1:5555", 5556), data_address("ipc:///tmp/a/control", 0)
        ('tcp://10.0.0.1:5556', 'ipc:///tmp/a/data')
    """
    if is_private(control):
        return sibling(control, DATA)
    return f"tcp://{urlsplit(control).netloc.rpartition(':')[0]}:{port}"


def memory_path(control: str) -> str:
    return sibling(control, MEMORY).removeprefix(_SCHEME)


def beside(address: str, server: str) -> str:
    """Return the address of a socket; if it is bound to all interfaces, replace its host by the server's.

    Example:
        >>> beside("tcp://0.0.0.0:7000", "tcp://10.0.0.1:5555"), beside("tcp://10.0.0.2:7000", "tcp://10.0.0.1:5555")
        ('tcp://10.0.0.1:7000', 'tcp://10.0.0.2:7000')
    """
    if is_private(address) or urlsplit(address).hostname not in EVERYWHERE:
        return address
    return data_address(server, urlsplit(address).port or 0)


def own_host(server: str) -> str:
    """Return this machine's address on the route to ``tcp://host:port``: loopback if ``host`` is."""
    parts = urlsplit(server)
    try:
        kind, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket sends nothing here, but the system picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConnectionLost(
            f"no parameter server can be reached at {server}: {error.strerror}; check the host's name and this"
            " machine's network"
        ) from error


def tcp_endpoint(host: str, port: int = 0) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"


def _bases() -> Iterator[Path]:
    yield Path(tempfile.gettempdir()).absolute()  # TMPDIR=. is not
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime)
    yield Path("/tmp")


def _make(base: Path | None) -> tuple[Path, int]:
    problems = []
    for place in dict.fromkeys([base] if base is not None else _bases()):
        _sweep(place)
        try:
            return _make_in(place)
        except OSError as error:
            problems.append(f"{place}: {error.strerror or error}")
    raise ConfigurationError(
        f"no directory for the sockets of this run: {'; '.join(problems)}; set TMPDIR to a directory of this machine"
        ' with a short path, or pass Server(host="127.0.0.1") to use TCP'
    )


def _make_in(base: Path) -> tuple[Path, int]:
    import zmq

    new = Path(tempfile.mkdtemp(prefix=_NEW, dir=base))
    path = base / f"{PREFIX}{new.name.removeprefix(_NEW)}"
    try:
        if (too_long := len(os.fsencode(path / _LONGEST_NAME)) - zmq.IPC_PATH_MAX_LEN) > 0:
            raise OSError(0, f"its path is {too_long} bytes too long for sockets")
        _try_socket(new / DATA)
        # Locked before it is renamed: other servers remove unlocked directories of the final name.
        lock = _open_locked(new)
        if lock is None:
            raise OSError(0, "directories cannot be locked there")
        new.rename(path)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    return path, lock


def _take(path: Path) -> tuple[Path, int]:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        lock = _open_locked(path)
        for name in (CONTROL, DATA, MEMORY):
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error
    if lock is None:
        raise ConfigurationError(f"{path}: another server has its sockets there")
    return path, lock


def _try_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(path))
    path.unlink()


def _sweep(base: Path) -> None:
    with contextlib.suppress(OSError):
        for path in base.glob(f"{PREFIX}*"):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    if not path.name.startswith(PREFIX):
        return
    with contextlib.suppress(OSError):
        lock = _open_locked(path)
        if lock is not None:
            if _is_ours(path):
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _is_ours(path: Path) -> bool:
    """Return whether a directory holds what a server puts there: another of the user's may have such a name."""
    is_private_to_user = stat.S_IMODE(path.stat().st_mode) & 0o777 == 0o700  # setgid is inherited
    return is_private_to_user and all(each.is_socket() or each.name == "state" for each in path.iterdir())


def _open_locked(path: Path) -> int | None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError("it belongs to another user")
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return None
    except OSError:
        os.close(directory)
        raise
    return directory
