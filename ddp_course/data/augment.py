"""Which random changes does a training image get, and who draws the numbers?

A shifted digit is still that digit, so shifting makes new training rows for free. The random numbers are not drawn from
a generator that moves on: they are a function of the seed, the epoch and the row. So it does not matter which rank or
which worker of a DataLoader reads the row, nor whether the run was stopped in between. Nothing has to be saved.

Mirroring is for images that mean the same afterwards. A mirrored car is a car. A mirrored 3 is no digit, and a mirrored
2 looks like a 5 to a small network.

Left out on purpose: rotation, colours, mixing two images; torchvision.transforms.v2 has them.
Read next: `sampler.py`, whose order is a function of seed and epoch in the same way.

Shapes: C channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from ddp_course.data.datasets import Images

SHIFT = {"digits": 1, "mnist": 2, "fashion_mnist": 2, "cifar10": 4}  # pixels, at most; an eighth of the image or less
MIRROR = ("fashion_mnist", "cifar10")  # where left and right mean nothing


class Augmented(Dataset):
    """Images whose rows come shifted, and mirrored where that is allowed, otherwise in each epoch.

        rows = Augmented(images, seed=0)
        for epoch in range(epochs):
            rows.set_epoch(epoch)
            for x, label in DataLoader(rows, ...):
                ...

    Args:
        seed: the same on every rank.
        shift: pixels by which an image moves at most, up, down, left and right; what moves in is black. None: as
            many as suit the dataset.
        mirror: whether every second image is mirrored; None: if it suits the dataset.
    """

    def __init__(self, images: Images, seed: int = 0, shift: int | None = None, mirror: bool | None = None) -> None:
        self.images, self.seed, self.epoch = images, seed, 0
        self.shift = SHIFT[images.name] if shift is None else shift
        self.mirror = images.name in MIRROR if mirror is None else mirror

    def set_epoch(self, epoch: int) -> None:
        """Choose the changes of `epoch`. Workers that are started afterwards know it too."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x_CHW, label = self.images[row]
        if not self.shift and not self.mirror:
            return x_CHW, label
        down, right, mirrored = draw(self.seed, self.epoch, row, self.shift)
        return changed(x_CHW, down, right, mirrored and self.mirror), label


def draw(seed: int, epoch: int, row: int, shift: int) -> tuple[int, int, bool]:
    """Return how far a row moves down and to the right, -shift to shift each, and whether it is mirrored.

    numpy's SeedSequence mixes the three numbers so well that neighbours have nothing in common; a generator seeded
    with their sum would give row 5 of epoch 0 what row 4 of epoch 1 has.

    Source: numpy promises that `generate_state` gives the same words in all versions.
    """
    down, right, coin = np.random.SeedSequence((seed % 2**32, epoch, row)).generate_state(3).tolist()
    return down % (2 * shift + 1) - shift, right % (2 * shift + 1) - shift, bool(coin & 1)


def changed(x_CHW: torch.Tensor, down: int, right: int, mirrored: bool) -> torch.Tensor:
    """Return a copy, moved over a black ground and mirrored left to right."""
    height, width = x_CHW.shape[1:]
    wide_CHW = F.pad(x_CHW, (abs(right), abs(right), abs(down), abs(down)))
    top, left = abs(down) - down, abs(right) - right
    moved_CHW = wide_CHW[:, top : top + height, left : left + width]
    return moved_CHW.flip(2) if mirrored else moved_CHW.contiguous()
