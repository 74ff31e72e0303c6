"""A disk that is full costs what was to be written there, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_omni import OmniStrategy
from lightning_omni.protocol.record import Event, RecordFile, read_record

resource = pytest.importorskip("resource")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_record_that_cannot_be_written_ends_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    record = RecordFile("/dev/full")
    for clock in range(3):
        record(Event(kind="push", time=0.0, clock=clock))
    assert [each.message for each in caplog.records] == [
        "record='/dev/full': No space left on device; the record ends here, after 0 bytes, and the run goes on without"
    ]


def test_a_record_ends_with_its_last_whole_line(tmp_path: Path) -> None:
    record, events = RecordFile(tmp_path / "record"), [Event(kind="push", time=0.0, clock=i) for i in range(9)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        for event in events:
            record(event)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = list(read_record(tmp_path / "record"))
    assert 0 < len(kept) < 9
    assert kept == events[: len(kept)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if (
        sys.platform != "linux"
        or os.geteuid() != 0
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("only root may mount a small file system, on Linux")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class Module(pl.LightningModule):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numbers))


def save(strategy: Any, numbers: int, path: Path) -> None:
    strategy.save_checkpoint({"state_dict": Module(numbers).state_dict()}, path)


def test_a_checkpoint_on_a_full_disk_is_refused_and_the_old_one_kept(small_disk: Path) -> None:
    strategy = OmniStrategy(groups=2)
    save(strategy, 1_000, small_disk / "last.ckpt")
    with pytest.raises(OSError, match="No space left on device: this checkpoint was not saved") as error:
        save(strategy, 1_000_000, small_disk / "last.ckpt")
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(small_disk / "last.ckpt")
    with pytest.raises(OSError, match="No space"):
        save(strategy, 1_000_000, small_disk / "other.ckpt")
    assert [file.name for file in small_disk.iterdir()] == ["last.ckpt"]
    assert torch.load(small_disk / "last.ckpt")["state_dict"]["weight"].numel() == 1_000


def test_a_checkpoint_plugin_of_the_users_is_left_alone(tmp_path: Path) -> None:
    class Plugin(TorchCheckpointIO):
        saved: list[str] = []

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.saved.append(str(path))

    strategy = OmniStrategy(groups=2, checkpoint_io=Plugin())
    save(strategy, 10, tmp_path / "some.ckpt")
    assert Plugin.saved == [str(tmp_path / "some.ckpt")]
    assert isinstance(strategy.checkpoint_io, Plugin)
    assert type(OmniStrategy(groups=2).checkpoint_io) is TorchCheckpointIO, "what else is taken for a user's"
