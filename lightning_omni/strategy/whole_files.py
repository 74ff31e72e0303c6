"""Writes a checkpoint to a local file: beside the old one, and then renamed."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch

from lightning_omni.optimizer.folders import beside


def write_whole(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Writes a checkpoint.

    Args:
        checkpoint: the checkpoint.
        path: of the file; its folder is made if there is none.

    Raises:
        OSError: it could not be written; what was there before is as it was.
    """
    final = Path(path).expanduser()
    final.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()  # torch does not say what went wrong with a file
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
