"""Checks that output files can be written, before a command spends minutes on their contents."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from lightning_omni.errors import ConfigurationError


def check_file(option: str, path: Path) -> None:
    """Raise an error if a file cannot be written; the file stays as it is.

    Args:
        option: option that names the file, as the user wrote it.
        path: path of the file.

    Raises:
        ConfigurationError: the path is a folder, its folder is missing, or one of both cannot be written.
    """
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another"
        )
    try:
        if path.is_dir() or path.is_file():
            path.open("ab").close()
        elif not path.exists():  # opening and closing a pipe would end it for its reader
            TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, path, error, "file") from error


def make_folder(option: str, folder: Path) -> None:
    """Create a folder if it is missing, and check that files can be written into it.

    Raises:
        ConfigurationError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, folder, error, "folder") from error


def _unwritable(option: str, path: Path, error: OSError, kind: str) -> ConfigurationError:
    return ConfigurationError(f"{option} {str(path)!r}: {error.strerror}; pass a {kind} that can be written")
