"""The files of a saved server: their names, and how a save is written and read."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from lightning_omni.errors import ConfigurationError, MalformedMessage
from lightning_omni.server.service import as_tensor
from lightning_omni.wire.codec import Packed, unpack

SAVED, JOURNAL, NEW = "state-", "journal-", "new"
"""Prefixes of the files of a directory: saves, their journals, and files that are being written."""
ENDED = "ended"
"""The file name of the last save of a run that ended early."""
LENGTH = 4
"""Bytes of the length in front of a journal's entry, or of a save's plain part."""
_ATTEMPTS = 5
"""Attempts to read a save while a server may write the next one."""
_MARK = b"lightning-omni state\n"


def file_of(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{kind}{number:08d}"


def numbers_in(folder: Path, kind: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:  # the directory has been removed meanwhile
        return []
    found = (name.removeprefix(kind) for name in names if name.startswith(kind))
    return sorted(int(number) for number in found if number.isdigit())


def write_save(folder: Path, number: int, packed: Packed, buffer: Tensor) -> OSError | None:
    new, head, data = folder / f"{NEW}-{os.getpid()}", msgspec.msgpack.encode(packed), buffer.numpy().data
    numbers = (each.to_bytes(LENGTH, "little") for each in (zlib.crc32(data, zlib.crc32(head)), len(head)))
    parts: tuple[bytes | memoryview, ...] = (_MARK, *numbers, head, data)
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            for part in parts:
                _write_whole(file, part)
            os.fsync(file.fileno())
        new.rename(file_of(folder, SAVED, number))
        _sync(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        return error
    return None


def read(path: str | Path) -> dict[str, Any]:
    """Return the contents of a save, as in `lightning_omni.server.core.ServerCore.state`."""
    try:
        data = memoryview(Path(path).read_bytes())
        if data[: len(_MARK)] != _MARK:
            raise MalformedMessage("it does not begin as one")
        head = len(_MARK) + 2 * LENGTH
        checksum, length = (int.from_bytes(data[stop - LENGTH : stop], "little") for stop in (head - LENGTH, head))
        if zlib.crc32(data[head:]) != checksum:
            raise MalformedMessage("it is damaged or incomplete, as its checksum says")
        packed = msgspec.msgpack.decode(data[head : head + length], type=Packed)
        # A copy, because the offset in the file is aligned for no dtype.
        tree: dict[str, Any] = unpack(packed, as_tensor(bytes(data[head + length :])))
        return tree
    except (OSError, ValueError, MalformedMessage, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path}: no saved state: {error}; remove it to begin without") from error


def saved_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the weights of the last save in a server's directory, for ``module.load_state_dict(..., strict=False)``.

    A server may be using the directory meanwhile.

    Raises:
        ConfigurationError: the directory does not exist, or has no readable save.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigurationError(f"{path}: there is no such directory; pass the one that the server was given: --state")
    state = _last_of(folder)
    return {
        name: weight for part in state["services"]["Snapshots"]["parts"] for name, weight in part["weights"].items()
    }


def _last_of(folder: Path) -> dict[str, Any]:
    for attempt in range(_ATTEMPTS):
        numbers = numbers_in(folder, SAVED)
        file = file_of(folder, SAVED, numbers[-1]) if numbers else folder / ENDED
        if not (numbers or file.exists()):
            break
        try:
            return read(file)
        except ConfigurationError:
            # The server has meanwhile written another save and removed this one.
            if attempt == _ATTEMPTS - 1 or file.exists():
                raise
    raise ConfigurationError(
        f"{folder}: nothing is saved there. A server saves when training has begun, and removes its saves when a run"
        " has ended in good order; then load a checkpoint that the Trainer has saved"
    )


def _write_whole(file: io.FileIO, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while view:
        view = view[file.write(view) :]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
