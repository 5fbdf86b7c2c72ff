"""11.2 `shifted(...)`: do the random numbers of a row depend on seed, epoch and row, and on nothing else?

The image has another value in each pixel, so a result tells how far it was moved. Two processes ask for the same rows
in other orders, each after other random numbers of its own.

Read next: `training.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ddp_course.grading.exercise import Fault
from ddp_course.grading.expect import Expect, exercise, first_mistake, nothing, once
from ddp_course.grading.play import Note, Round, Seen

SIDE, MOST, GRID = 11, 4, 30
WAYS = range(-MOST, MOST + 1)
HIGH = 2**13  # the highest bit of a number below 10,000
APART = (1, 10, 100, 1000)  # rows between two that a weak mix gives the same shift, when the epoch or the seed differs

Place = tuple[int, int, int]  # seed, epoch, row
Shift = tuple[int, int]  # down, right


class Case(NamedTuple):
    """Where shifts are asked for, each place once, in an order of each rank's own."""

    first: Place
    spread: list[Place]
    places: list[Place]
    orders: list[list[int]]


def picture(height: int = SIDE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an image with another value in each pixel."""
    return torch.arange(1, 2 * height * SIDE + 1, dtype=dtype).view(2, height, SIDE)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Ask for the shift of each place, then for those of a wide image; note what was no shift, and what was touched."""
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(17 + rank)
    before, given, wide = _generators(), picture(), picture(SIDE - 3, torch.uint8)
    shifts: list[Any] = [None] * len(case.places)
    shared = ""
    for number in case.orders[rank]:
        image = picture()
        result = function(image, *case.places[number], MOST)
        shifts[number] = decoded(result, given)
        if not torch.equal(image, given):
            shifts[number] = "the image that was given is changed; return a new one"
        if isinstance(shifts[number], str):
            break
        result.detach().zero_()
        if not torch.equal(image, given):
            shared = f"writing into the result changes `image`, when it is moved by {shifts[number]}"
    moved_on = " and ".join(name for name, state in _generators().items() if state != before[name])
    touched = moved_on and f"the generator of {moved_on} has moved"
    wides = [decoded(function(wide.clone(), *case.first, most), wide) for most in (1, 2)]
    return Note(shifts=shifts, shared=shared, touched=touched, wide=wides)


def _generators() -> dict[str, str]:
    numpys = np.random.get_state()
    return {
        "torch": str(torch.get_rng_state().tolist()),
        "numpy": str((numpys[1].tolist(), numpys[2])),
        "Python": str(random.getstate()),
    }


def decoded(found: Any, given: torch.Tensor) -> Shift | str:
    """Return how far the image was moved, or in words why it is no moved image."""
    if not isinstance(found, torch.Tensor):
        return f"returned a {type(found).__name__}; return a tensor"
    if found.shape != given.shape or found.dtype != given.dtype:
        return f"returned {list(found.shape)} {found.dtype}; shape and dtype stay {list(given.shape)} {given.dtype}"
    height, width = given.shape[1:]
    middle = given[0, height // 2, width // 2]
    where = (found[0] == middle).nonzero().tolist()
    if len(where) != 1:
        return "the pixel in the middle of the image is not there once; move by at most `most` pixels"
    down, right = where[0][0] - height // 2, where[0][1] - width // 2
    if torch.equal(found, moved(given, down, right)):
        return down, right
    if torch.equal(found, torch.roll(given, (down, right), (1, 2))):
        return "what leaves the image on one side comes in on the other; what comes in is 0"
    return "the pixels are not those of the moved image; all channels move alike, and what comes in is 0"


def moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """Return the image moved, with 0 coming in."""
    height, width = image.shape[1:]
    return F.pad(image, (SIDE,) * 4)[:, SIDE - down : SIDE - down + height, SIDE - right : SIDE - right + width]


def rounds(rng: Random) -> list[Round]:
    """Places that a weak mix gives the same shift, and many with nothing in common, asked for by two processes."""
    first = rng.randint(5, 3000), rng.randint(5, 3000), rng.randint(1500, 5000)
    near = [place for _, places, away in mixes(first) for start in places for place in (start, _moved(start, away))]
    spread = [(first[0], rng.randint(0, 9999), rng.randint(0, 9999)) for _ in range(GRID**2)]
    places = list(dict.fromkeys(near + spread))
    orders = [list(range(len(places))), rng.sample(range(len(places)), len(places))]
    orders[1] += orders[1][:5]  # asked once more
    return [Round(2, [("grid", Case(first, spread, places, orders))], init=False)]


def mixes(first: Place) -> list[tuple[str, list[Place], Place]]:
    """Return what is wrong with a mix, when the shifts of these places agree with those so far away from them."""
    seed, epoch, row = first
    line, epochs = [(seed, epoch, row + r) for r in range(GRID)], [(seed, epoch + e, row) for e in range(1, GRID)]
    grid, zeros = [(seed, epoch + e, row + r) for e in range(GRID) for r in range(GRID)], [(0, 0, r) for r in range(40)]
    unread = ", or it lies above the 32 bits of a seed that torch's CPU generator reads"
    again = "the numbers meet again {} rows apart: the factors before seed and epoch are too small for that"
    high = f"{{}} {HIGH} moves as {{}} 0: torch's CPU generator reads 32 bits of a seed, and drops the others"
    return [
        (f"all rows move alike: the row is not in the mix{unread}", grid, (0, 0, 1)),
        (f"a row moves alike in every epoch: the epoch is not in the mix{unread}", grid, (0, 1, 0)),
        (f"the seed is not in the mix{unread}", line, (1, 0, 0)),
        ("in epoch 0, or with seed 0, all rows move alike: a product of the three is no mix", zeros, (0, 0, 1)),
        ("row 5 of epoch 0 moves as row 4 of epoch 1: a sum of the three is no mix", grid, (0, 1, -1)),
        ("epoch 1 of seed 0 is epoch 0 of seed 1: a sum of the three is no mix", epochs, (1, -1, 0)),
        *((again.format(apart), line, (*which, -apart)) for apart in APART for which in ((0, 1), (1, 0))),
        (high.format("seed", "seed"), zeros, (HIGH, 0, 0)),
        (high.format("epoch", "epoch"), zeros, (0, HIGH, 0)),
        (high.format("row", "row"), zeros, (0, 0, HIGH)),
    ]


def _moved(place: Place, away: Place) -> Place:
    return tuple(a + b for a, b in zip(place, away, strict=True))


# --- What is expected ------------------------------------------------------------------------------


def _form(seen: Seen) -> Fault | None:
    shifts = [*seen["shifts"], *seen.of(1)["shifts"], *seen["wide"]]
    said = next((each for each in shifts if isinstance(each, str)), None)
    if said:
        found, _, cause = said.partition("; ")
        return Fault("a moved copy of the image", found, cause=cause)
    far = next((s for s in shifts if s and max(map(abs, s)) > MOST), None)
    if far or any(max(map(abs, shift)) > most for most, shift in enumerate(seen["wide"], start=1)):
        found = f"moved by {far or seen['wide'][0]}"
        return Fault(f"at most {MOST} pixels, or what `most` says", found, cause="draw from -most to most")
    return None


fresh = nothing(
    *("shared", "a new tensor, whose memory is its own"),
    "return a new tensor, also where nothing moves: image.clone()",
)
untouched = nothing(
    *("touched", "the process's own generators stay as they are"),
    "dropout and others draw from it, and would get other numbers; use torch.Generator().manual_seed(...)",
)


def same(seen: Seen) -> Fault | None:
    """Two processes find the same."""
    asked = zip(seen.case.places, seen["shifts"], seen.of(1)["shifts"], strict=True)
    place, one, two = next((found for found in asked if found[1] != found[2]), (seen.case.first, 0, 0))
    return first_mistake("seed {}, epoch {}, row {} always moves alike".format(*place), {
        "the numbers come from a generator that moves on; make one for each row, seeded by seed, epoch and row: "
        "torch.Generator().manual_seed(...)":
            one != two and f"{one} in one process, {two} in another that asks in other order",
    })  # fmt: skip


def other(seen: Seen) -> Fault | None:
    """Places that have nothing in common agree at most one time in four; by chance it is one in 81."""
    shifts = dict(zip(seen.case.places, seen["shifts"], strict=True))
    for cause, places, away in mixes(seen.case.first):
        if sum(shifts[place] == shifts[_moved(place, away)] for place in places) > len(places) / 4 + 2:
            return Fault("another seed, epoch or row moves otherwise", "many move alike", cause=cause)
        crossed = [shifts[place][1] == shifts[_moved(place, away)][0] for place in places]
        if len(places) == GRID**2 and sum(crossed) > len(places) / 4:  # by chance it is one in nine
            found, cause = (
                "its way down is often another's way to the right",
                "seed one generator, and draw both from it",
            )
            return Fault("another seed, epoch or row moves otherwise", found, cause=cause)
    return None


def even(seen: Seen) -> Fault | None:
    """All shifts occur, equally often."""
    place_of = dict(zip(seen.case.places, seen["shifts"], strict=True))
    shifts = [place_of[place] for place in seen.case.spread]
    for axis, name in enumerate(("down", "to the right")):
        counts = Counter(shift[axis] for shift in shifts)
        said = f"of {len(shifts)} rows, each of {len(WAYS)} ways {name} about {len(shifts) // len(WAYS)} times"
        never = [way for way in WAYS if not counts[way]]
        uneven = not all(55 <= counts[way] <= 160 for way in WAYS)
        fault = first_mistake(said, {
            "the upper end of randint is left out: randint(-most, most + 1)": never == [MOST] and f"never {MOST}",
            "draw whole numbers from -most to most": never and f"never {', '.join(map(str, never))}",
            "draw each number from -most to most with the same chance":
                uneven and ", ".join(f"{way}: {counts[way]}" for way in WAYS),
        })  # fmt: skip
        if fault:
            return fault
    both = Counter(way for shift in shifts for way in shift)
    rare = ", ".join(f"{way}: {both[way]}" for way in WAYS if not 135 <= both[way] <= 270)
    if rare:
        cause = "draw each number from -most to most with the same chance; rounding gives the two ends half a chance"
        return Fault(
            f"of {2 * len(shifts)} numbers, each about {2 * len(shifts) // len(WAYS)} times", rare, cause=cause
        )
    pairs = len(set(shifts)) < 60 and f"{len(set(shifts))} of {len(WAYS) ** 2} pairs occur"
    return first_mistake("down and to the right have nothing in common", {"draw two numbers, one for each way": pairs})


def looked_at(expect: Expect) -> Expect:
    """An expectation of images that are moved ones at all."""
    skipped = Fault(found="not looked at", cause="the first line says what is wrong")
    return once(lambda seen: skipped if _form(seen) else expect(seen))


SHIFT = exercise(
    "11.2",
    "Shifts without a generator",
    "shifted",
    20,
    act=act,
    rounds=rounds,
    checks={
        "moved": ("the image is moved, black comes in", 1, once(lambda seen: _form(seen) or fresh(seen)), "grid"),
        "same": ("the same in any process and in any order", 1, looked_at(same), "grid"),
        "other": ("otherwise for another seed, epoch or row", 2, looked_at(other), "grid"),
        "even": ("all shifts occur, equally often", 1, looked_at(even), "grid"),
        "global": ("the process's own generators stay as they are", 1, looked_at(untouched), "grid"),
    },
    refused=("ddp_course.data.augment.draw", "ddp_course.data.augment.changed"),
    hints={
        r"no result after": "a loop that never ends; each row takes some millionths of a second",
        r"unhashable|must be an integer|expected int": "seed, epoch, row and most are ints; mix them into one int",
    },
)
