"""What happens to a row depends on seed, epoch and row; not on who reads it, how often, or in which order."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset
from torchvision.transforms.v2 import functional as torchvision

from ddp_course.data import Images, load
from ddp_course.data.augment import MIRROR, SHIFT, Augmented, changed, draw
from ddp_course.data.datasets import DATASETS

pytestmark = pytest.mark.timeout(120)


def photographs(name: str = "cifar10", n: int = 40) -> Images:
    """Images that no shift and no mirror leaves as they are."""
    pixels = torch.randint(1, 256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Images(name, "train", pixels, torch.arange(n) % 10, tuple("abcdefghij"), 255)


def all_rows(rows: Augmented) -> torch.Tensor:
    return torch.stack([rows[i][0] for i in range(len(rows))])


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("down", "right"), [(0, 0), (1, 0), (0, -2), (-3, 2), (3, 3)])
def test_a_change_is_what_torchvision_does(down, right, mirrored):
    x = torch.rand(3, 5, 7)
    expected = torchvision.affine(x, angle=0, translate=[right, down], scale=1, shear=[0, 0])
    expected = torchvision.horizontal_flip(expected) if mirrored else expected
    assert torch.equal(changed(x, down, right, mirrored), expected)


def test_a_row_is_the_same_in_any_order_by_any_worker_and_after_a_pause():
    rows = Augmented(photographs(), seed=3)
    rows.set_epoch(4)
    straight = all_rows(rows)
    rows.set_epoch(5)
    assert not torch.equal(all_rows(rows), straight)
    again = Augmented(photographs(), seed=3)  # a process that was started again, in the middle of epoch 4
    again.set_epoch(4)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for workers in (0, 2):
        loader = DataLoader(Subset(again, order), 7, num_workers=workers)
        assert torch.equal(torch.cat([x for x, _ in loader]), straight[order])


def test_workers_that_start_with_an_epoch_know_it():
    rows = Augmented(photographs(), seed=3)
    loader, epochs = DataLoader(rows, 40, num_workers=1), []
    for epoch in (0, 1):
        rows.set_epoch(epoch)
        epochs.append(next(iter(loader))[0])
        assert torch.equal(epochs[-1], all_rows(rows))
    assert not torch.equal(*epochs)


def test_digits_are_never_mirrored_and_photographs_half_of_the_time():
    assert set(SHIFT) == set(DATASETS) and set(MIRROR) == {"fashion_mnist", "cifar10"}
    digits = Augmented(load(), seed=0)
    found = Counter()
    for row in range(300):
        x, label = digits[row]
        same = [changed(load_row, *place, False) for load_row in [digits.images[row][0]] for place in PLACES]
        assert any(torch.equal(x, other) for other in same)
        found[bool(label == digits.images[row][1])] += 1
    assert found == {True: 300}
    mirrored = [draw(0, 0, row, 4)[2] for row in range(4000)]
    assert 0.46 < np.mean(mirrored) < 0.54


PLACES = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]


def test_all_places_come_and_neighbours_have_nothing_in_common():
    drawn = [draw(0, epoch, row, 1)[:2] for epoch in range(30) for row in range(300)]
    counts = Counter(drawn)
    assert set(counts) == set(PLACES) and all(850 < count < 1150 for count in counts.values())
    words = np.array([draw(seed, epoch, row, 10**6)[:2] for seed in range(3) for epoch in range(30)
                      for row in range(50)])  # fmt: skip
    assert len({tuple(pair) for pair in words}) == len(words)  # no two of the 4500 are alike
    by_row = words[:, 0].reshape(90, 50)
    for a, b in ((by_row[:, 1:], by_row[:, :-1]), (by_row[1:], by_row[:-1]), (by_row[1:, :-1], by_row[:-1, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.06


def test_switched_off_it_gives_the_images_themselves():
    images = photographs()
    rows = Augmented(images, shift=0, mirror=False)
    assert len(rows) == len(images)
    assert all(torch.equal(rows[i][0], images[i][0]) and rows[i][1] == images[i][1] for i in range(len(images)))
    only_mirrored = Augmented(images, seed=1, shift=0, mirror=True)
    kept = [torch.equal(only_mirrored[i][0], images[i][0]) for i in range(40)]
    assert 8 < sum(kept) < 32
    assert draw(-1, 0, 0, 4) == draw(2**32 - 1, 0, 0, 4)  # torch takes a negative seed, so this does
