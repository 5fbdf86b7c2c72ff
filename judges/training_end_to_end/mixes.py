"""Which shifts tell that a mix of seed, epoch and row, for exercise 11.2, is weak: other triples, the same numbers?

Some weak mixes show at places that are known beforehand, `mixes`. Of a sum with any factors, or of bits or digits put
together, nobody knows where its numbers meet again. So the shifts of one epoch's rows are found, and those of a few
rows of many other epochs and seeds are looked for among them.

Read next: `shift.py`, which judges by these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

GRID, LINE = 30, 60
HIGH = 2**13  # the highest bit of a number below 10,000
FAR = 15  # pixels, for the search: 961 shifts tell more than 81
KNOWN, PROBE = 3344, 4  # rows whose shifts are known, and rows whose shifts are looked for among those
STARTS = (0, 3328, 6656, 9984)  # of a probe: one of them meets a row that is known
STEPS = (1, 10, 100, 1000, *(2**n for n in range(8, 13)))  # from a seed, or an epoch, to the next with its numbers

Place = tuple[int, int, int]  # seed, epoch, row


def mixes(first: Place) -> list[tuple[str, list[Place], Place]]:
    """Return what is wrong with a mix, when the shifts of these places agree with those so far away from them."""
    seed, epoch, row = first
    line, zeros = [(seed, epoch, row + r) for r in range(LINE)], [(0, 0, r) for r in range(LINE)]
    grid = [(seed, epoch + e, row + r) for e in range(GRID) for r in range(GRID)]
    unread = ", or it lies above the 32 bits of a seed that torch's CPU generator reads"
    high = f"{{}} {HIGH} moves as {{}} 0: torch's CPU generator reads 32 bits of a seed, and drops the others"
    return [
        (f"all rows move alike: the row is not in the mix{unread}", grid, (0, 0, 1)),
        (f"a row moves alike in every epoch: the epoch is not in the mix{unread}", grid, (0, 1, 0)),
        (f"the seed is not in the mix{unread}", line, (1, 0, 0)),
        ("in epoch 0, or with seed 0, all rows move alike: a product of the three is no mix", zeros, (0, 0, 1)),
        (
            "row 9999 moves as row 0 of the next epoch: 10,000 rows need a factor as large",
            [(seed, e, 9999) for e in range(LINE)],
            (0, 1, -9999),
        ),
        (
            "epoch 9999 moves as epoch 0 of the next seed: 10,000 epochs need a factor as large",
            [(s, 9999, row) for s in range(LINE)],
            (1, -9999, 0),
        ),
        (high.format("seed", "seed"), zeros, (HIGH, 0, 0)),
        (high.format("epoch", "epoch"), zeros, (0, HIGH, 0)),
        (high.format("row", "row"), zeros, (0, 0, HIGH)),
    ]


def away_from(place: Place, away: Place) -> Place:
    """Return the place so far away."""
    return tuple(a + b for a, b in zip(place, away, strict=True))


def probes(first: Place) -> list[Place]:
    """Return where some rows begin that have the numbers of known ones, if the mix is weak."""
    seed, epoch, _ = first
    away = [(0, -1), (-1, 0), *((by, 0) for by in STEPS), *((0, by) for by in STEPS), *((1, by) for by in STEPS)]
    away += [(-1, by) for by in (*range(1, 102), *STEPS)]  # in a sum, so many epochs may make up for a seed
    found = [(seed + by[0], epoch + by[1], row) for by in dict.fromkeys(away) for row in STARTS]
    digits = [(seed, 10 * epoch + 3, 40), (10 * seed + epoch // 10, epoch % 10, 40)]  # as rows 340 and 40
    return [(seed, epoch, STARTS[-1]), (epoch, seed, 40), *digits, *found]


def searched(function: Callable, first: Place, *, known: bool) -> list[str]:
    """Return a letter for the shift of each row: of the known rows of one epoch, from row 0 on, or of each probe."""
    image = torch.zeros(1, 2 * FAR + 1, 2 * FAR + 1)
    image[0, FAR, FAR] = 1

    def letters(seed: int, epoch: int, row: int, n_rows: int) -> str:
        return "".join(chr(256 + int(function(image, seed, epoch, row + r, FAR).argmax())) for r in range(n_rows))

    return [letters(*first[:2], 0, KNOWN)] if known else [letters(*place, PROBE) for place in probes(first)]


def meeting(first: Place, known: str, found: list[str]) -> str:
    """Say which rows have the numbers of others; nothing if none have."""
    for (seed, epoch, row), probe in zip(probes(first), found, strict=True):
        if (at := known.find(probe)) >= 0:
            here, there = (f"{start} to {start + PROBE - 1}" for start in (row, at))
            return f"rows {here} of seed {seed}, epoch {epoch} move as {there} of seed {first[0]}, epoch {first[1]}"
    return ""


def alike(known: str) -> float:
    """Return how many pairs of known rows move alike, of the number that chance would have."""
    return sum(n * (n - 1) for n in Counter(known).values()) / (KNOWN * (KNOWN - 1)) * (2 * FAR + 1) ** 2
