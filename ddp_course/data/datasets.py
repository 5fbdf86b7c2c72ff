"""What does each rank train on? Images with labels, in memory, the same rows on every rank.

The default is real and needs no network: the 1,797 handwritten digits that scikit-learn ships. MNIST,
FashionMNIST and CIFAR-10 come through torchvision when asked for, downloaded by one rank of each host
(`downloads.py`).

Left out on purpose: which rank gets which rows (a sampler decides), and data that does not fit into memory.

Shapes: N rows, C channels.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset

from ddp_course.data.digits import CLASSES, WHITE, read_digits
from ddp_course.data.downloads import DatasetError, last_line, once_per_host, silence_limit, staged

# Our name -> torchvision's class, and the folder in which it keeps its files below the root.
TORCHVISION = {
    "mnist": ("MNIST", "MNIST"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
}
DATASETS = ("digits", *TORCHVISION)
SPLITS = ("train", "test")
SILENCE_LIMIT_S = 30.0


@dataclass(frozen=True, eq=False)
class Images(Dataset):
    """Labelled images in memory. `images[i]` is a pair: one image scaled to [0, 1], and its label.

    The pixels are kept as bytes and scaled when a row is read, because a host with W ranks holds W copies.
    """

    name: str
    split: str
    pixels: torch.Tensor  # (N, C, height, width) uint8
    labels: torch.Tensor  # (N,) int64
    classes: tuple[str, ...]
    white: int  # the pixel value that becomes 1.0

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """C, height and width of one image."""
        return tuple(self.pixels.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pixels[index] / self.white, self.labels[index]  # (C, height, width) float32, () int64


def load(
    name: str = "digits",
    split: str = "train",
    root: str | Path | None = None,
    *,
    download_limit_s: float = 900.0,
) -> Images:
    """Return one split of a dataset, the same on every rank.

    Args:
        name: "digits", "mnist", "fashion_mnist" or "cifar10".
        split: "train" or "test".
        root: the folder with torchvision's files. By default $DDP_COURSE_DATA, or else `ddp_course` in the
            user's cache folder. The digits need none.
        download_limit_s: how long the other ranks wait for the one that downloads.
    Raises:
        DatasetError: the files are not there and cannot be had, or are broken. On every rank alike.
        ValueError: an unknown name or split.
    Collective: none for the digits; for the others see `once_per_host`.
    """
    if name not in DATASETS:
        raise ValueError(f"there is no dataset {name!r}; known are {', '.join(DATASETS)}")
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; known are {', '.join(SPLITS)}")
    if name == "digits":
        pixels, labels = map(torch.from_numpy, read_digits(split))
        return Images(name, split, pixels.unsqueeze(1), labels.to(torch.int64), CLASSES, WHITE)
    folder = data_folder(root)
    once_per_host(lambda: fetch(name, folder), download_limit_s)
    return read(name, split, folder)


# --- torchvision's datasets ------------------------------------------------------------------------


def data_folder(root: str | Path | None) -> Path:
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        root = os.environ.get("DDP_COURSE_DATA", os.path.join(cache, "ddp_course"))
    return Path(root).expanduser().absolute()


def fetch(name: str, folder: Path) -> None:
    """Make sure that both splits lie whole in `folder`; download them if there is nothing.

    Raises:
        DatasetError: they cannot be downloaded, or what is there is broken.
    """
    destination = folder / TORCHVISION[name][1]
    if destination.exists():
        for split in SPLITS:
            read(name, split, folder)
        return
    print(f"downloading {name} to {destination}", flush=True)
    try:
        staged(destination, lambda staging: download(name, staging))
    except DatasetError:
        raise
    except Exception as error:  # torchvision raises RuntimeError, URLError, OSError, AssertionError and more
        raise DatasetError(
            f"{name} is not in {folder} (looked for the folder {destination.name}) and cannot be downloaded: "
            f"{last_line(error)}; {way_out(name)}"
        ) from error


def download(name: str, staging: Path) -> None:
    """Download into `staging`; torchvision compares each archive's MD5 before it unpacks it."""
    with silence_limit(SILENCE_LIMIT_S), contextlib.redirect_stderr(io.StringIO()):  # hides one bar per file
        torchvision_class(name)(str(staging), train=True, download=True)
    for split in SPLITS:
        open_split(name, split, staging)  # what cannot be read now must not be moved into place


def read(name: str, split: str, folder: Path) -> Images:
    """Read one split from files that are there.

    Raises:
        DatasetError: they are incomplete or broken.
    """
    try:
        return open_split(name, split, folder)
    except DatasetError:
        raise
    except Exception as error:  # a broken file shows as almost anything
        where = folder / TORCHVISION[name][1]
        raise DatasetError(
            f"{name}: the files in {where} are incomplete or broken ({last_line(error)}); "
            f"remove that folder to download them again, or {way_out(name)}"
        ) from error


def open_split(name: str, split: str, folder: Path) -> Images:
    # MNIST's files are plain numbers. CIFAR-10's are pickles, which torchvision opens only after it has found
    # their MD5 to be the published one.
    source = torchvision_class(name)(str(folder), train=split == "train", download=False)
    pixels = torch.as_tensor(source.data)  # (N, height, width) or (N, height, width, C), uint8
    labels = torch.as_tensor(source.targets, dtype=torch.int64)  # (N,)
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images but {len(labels)} labels in the {split} split")
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)  # (N, C, height, width)
    return Images(name, split, pixels.contiguous(), labels, tuple(source.classes), white=255)


def torchvision_class(name: str) -> Callable:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise DatasetError(
            f"{name} comes through torchvision, which cannot be imported ({last_line(error)}); "
            "`ddp-course doctor` says why"
        ) from error
    return getattr(datasets, TORCHVISION[name][0])


def way_out(name: str) -> str:
    return f"give a folder that has {name} (root=...), or use the digits, which need no download"
