"""A function that writes a checkpoint to a local file next to the old one, and then renames it."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from lightning_omni.runtime.state.distributed_checkpoint import beside


def write_whole(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write a checkpoint, and the folder of its path if that does not exist.

    Raises:
        OSError: the file could not be written; an older file of that name is unchanged.
    """
    final = Path(path).expanduser()
    final.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()  # the errors of torch's own writes have no cause
    torch.save(checkpoint, buffer)
    partial = beside(final, f"{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(buffer.getbuffer())
        partial.replace(final)
    except BaseException as error:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        reason = f"{error.strerror}: this checkpoint was not saved; one of before is as it was"
        raise OSError(error.errno, reason, str(final)) from error
