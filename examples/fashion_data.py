"""Fashion-MNIST as one tensor in memory: from the system, from a cache, or downloaded and checked.

If it cannot be had, scikit-learn's small handwritten digits replace it.
"""

import gzip
import hashlib
import os
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

DOWNLOAD_TIMEOUT_S = 20.0
"""How long one connection may stay silent before the next location is tried."""

DEBIAN_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package ``dataset-fashion-mnist`` keeps the files."""

LOCATIONS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)

# Of the decompressed files: the gzip wrappers differ between the packagers, their contents do not.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}

LabelledImages = tuple[Tensor, Tensor]
"""Images as float32 (N, 1, 28, 28) in [0, 1] and labels as int64 (N,)."""


class FashionMNIST(LightningDataModule):
    """60,000 training and 10,000 test images of clothes in ten classes; 5,000 of the former validate.

    Args:
        batch_size: Samples per worker and step.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.source = "Fashion-MNIST"

    @override
    def prepare_data(self) -> None:
        """Download what is missing; Lightning calls this on the first rank of a node only."""
        if find_directory() is None:
            download(cache_directory())

    @override
    def setup(self, stage: str) -> None:
        """Load and normalise the whole data set, once."""
        if hasattr(self, "train_set"):
            return
        directory = find_directory()
        if directory is None:
            self.source = "scikit-learn digits (stand-in)"
            rank_zero_warn("Without Fashion-MNIST, scikit-learn's handwritten digits are trained on.")
            train, validation, test = load_digits()
        else:
            labelled = load_pair(directory, "train")
            train, validation = split(labelled, held_out=5_000)
            test = load_pair(directory, "t10k")
        mean, std = train[0].mean(), train[0].std()
        self.train_set, self.validation_set, self.test_set = (
            TensorDataset((images - mean) / std, labels) for images, labels in (train, validation, test)
        )

    @override
    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation_set, batch_size=250)

    @override
    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test_set, batch_size=250)


def cache_directory() -> Path:
    """The user's cache: ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lightning-omni" / "fashion-mnist"


def find_directory() -> Path | None:
    """The first directory that has all four files, or None."""
    for directory in (DEBIAN_DIRECTORY, cache_directory()):
        if all((directory / f"{name}.gz").is_file() for name in SHA256):
            return directory
    return None


def download(directory: Path) -> None:
    """Fetch the four files into ``directory``; say so and give up if a file cannot be had."""
    for name in SHA256:
        target = directory / f"{name}.gz"
        if not target.is_file() and not any(fetch(location, target) for location in LOCATIONS):
            return


def fetch(location: str, target: Path) -> bool:
    """Download one file, check it, and move it into place in one step."""
    url = location + target.name
    rank_zero_info(f"Downloading {url}")
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
            packed = response.read()
        decompress(packed, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        partial.write_bytes(packed)
        partial.replace(target)
    except (OSError, HTTPException, ValueError) as error:
        rank_zero_info(f"{url}: {error}")
        return False
    return True


def decompress(packed: bytes, path: Path) -> bytes:
    """Unpack one file and compare its digest with the published data set's.

    Raises:
        ValueError: The file is damaged or is not that of Fashion-MNIST.
    """
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if hashlib.sha256(content).hexdigest() != SHA256[path.stem]:
        raise ValueError(f"{path} is not the published file: its SHA-256 digest differs")
    return content


def load_pair(directory: Path, part: str) -> LabelledImages:
    """Read the images and labels of ``"train"`` or ``"t10k"``; idx headers are 16 and 8 bytes long."""

    def read(name: str, header: int) -> np.ndarray:
        path = directory / f"{name}.gz"
        content = decompress(path.read_bytes(), path)
        return np.frombuffer(content, dtype=np.uint8, offset=header)

    images = read(f"{part}-images-idx3-ubyte", header=16).reshape(-1, 1, 28, 28)
    labels = read(f"{part}-labels-idx1-ubyte", header=8)
    return torch.tensor(images, dtype=torch.float32) / 255, torch.tensor(labels, dtype=torch.int64)


def load_digits() -> tuple[LabelledImages, LabelledImages, LabelledImages]:
    """The 1,797 digits of scikit-learn, 8x8 scaled up to 28x28; nine shifted copies of each train."""
    from sklearn.datasets import load_digits as load_small_digits

    digits = load_small_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = interpolate(small, size=28, mode="bilinear")
    labels = torch.tensor(digits.target, dtype=torch.int64)
    rest, test = split((images, labels), held_out=300)
    (images, labels), validation = split(rest, held_out=200)
    shifts = [(down, right) for down in (-2, 0, 2) for right in (-2, 0, 2)]
    shifted = torch.cat([images.roll(shift, dims=(2, 3)) for shift in shifts])
    return (shifted, labels.repeat(len(shifts))), validation, test


def split(labelled: LabelledImages, held_out: int) -> tuple[LabelledImages, LabelledImages]:
    """Hold out a random but always equal part of the samples."""
    images, labels = labelled
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    kept, held = order[held_out:], order[:held_out]
    return (images[kept], labels[kept]), (images[held], labels[held])
