"""Checkpoints as files that are there as a whole, or not at all."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as _Base
else:
    _Base = object


class WholeFileHooks(_Base):
    """Lightning's way to save checkpoints, but for local files: written beside the old one, and then renamed.

    Lightning's own writes to a temporary file elsewhere and moves it. Between two file systems moving is copying, and
    where the disk is full a truncated file is left, in the place of what was there before.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint.

        Raises:
            OSError: it could not be written; what was there before is as it was.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        final = Path(path).expanduser()
        final.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()  # torch does not say what went wrong with a file
        torch.save(checkpoint, buffer)
        partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(buffer.getbuffer())
            partial.replace(final)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            reason = f"{error.strerror}: this checkpoint was not saved; one of before is as it was"
            raise OSError(error.errno, reason, str(final)) from error
