"""Files that commands write: that they can be written is known before minutes are spent on what goes into them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from lightning_omni.errors import ConfigurationError
from lightning_omni.palette import check_can_draw


def check_file(option: str, path: Path) -> None:
    """Refuses a file that cannot be written; it is left as it is.

    Args:
        option: that names it, as the user wrote it.
        path: of the file.

    Raises:
        ConfigurationError: it is a folder, its folder is missing, or one of both may not be written.
    """
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another"
        )
    try:
        if path.is_dir() or path.is_file():
            path.open("ab").close()
        elif not path.exists():  # a pipe would take its end for that of the file
            TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, path, error, "file") from error


def check_picture(option: str, path: Path) -> None:
    """Refuses a picture that cannot be drawn or written; see `check_file`.

    Raises:
        ConfigurationError: matplotlib is missing, or does not know files of that suffix; or the file cannot be written.
    """
    check_can_draw(f"{option}: ")
    from matplotlib.figure import Figure  # not above: it is optional, and slow

    if path.suffix and path.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise ConfigurationError(f"{option} {str(path)!r}: pass a name that ends in .png, .svg or .pdf")
    check_file(option, path)


def make_folder(option: str, folder: Path) -> None:
    """Makes a folder, if there is none, and tries whether files can be written into it.

    Raises:
        ConfigurationError: it cannot be made, or not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(option, folder, error, "folder") from error


def _unwritable(option: str, path: Path, error: OSError, kind: str) -> ConfigurationError:
    return ConfigurationError(f"{option} {str(path)!r}: {error.strerror}; pass a {kind} that can be written")
