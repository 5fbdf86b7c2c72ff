"""11.2 `shifted(...)`: do the random numbers of a row depend on seed, epoch and row, and on nothing else?

The image has another value in each pixel, so a result tells how far it was moved. Two processes ask for the same rows
in other orders, each after other random numbers of its own.

Read `mixes.py` first. Read next: `training.py`.
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
from ddp_course.grading.vocabulary.expect import Expect, exercise, first_mistake, nothing, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.training_end_to_end.mixes import GRID, Place, alike, away_from, meeting, mixes, searched

SIDE, MOST, MANY = 11, 4, 10
WAYS = range(-MOST, MOST + 1)

Shift = tuple[int, int]  # down, right


class Case(NamedTuple):
    """Where shifts are asked for, each place once, in an order of each rank's own."""

    first: Place
    spread: list[Place]
    places: list[Place]
    orders: list[list[int]]


def picture(height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an image with another value in each pixel."""
    return torch.arange(1, 2 * height * width + 1, dtype=dtype).view(2, height, width)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Ask for the shift of each place, then for those of a wide image; note what was no shift, and what was touched."""
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(17 + rank)
    before, given, wide = _generators(), picture(SIDE, SIDE), picture(SIDE - 3, SIDE, torch.uint8)
    shifts: list[Any] = [None] * len(case.places)
    shared = ""
    for number in case.orders[rank]:
        image = given.clone()
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
    is_shift = not any(isinstance(shift, str) for shift in (*shifts, *wides))
    letters = searched(function, case.first, known=rank == 0) if is_shift else []
    return Note(shifts=shifts, shared=shared, touched=touched, wide=wides, letters=letters)


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
    # Both odd, so that the one before has another lowest bit only; an epoch of two digits, for a mix of digits.
    first = 2 * rng.randint(50, 450) + 1, rng.choice((13, 35, 57, 79)), rng.randint(1500, 5000)
    near = [place for _, places, away in mixes(first) for start in places for place in (start, away_from(start, away))]
    spread = [(first[0], rng.randint(0, 9999), rng.randint(0, 9999)) for _ in range(GRID**2)]
    places = list(dict.fromkeys(near + spread))
    orders = [list(range(len(places))), rng.sample(range(len(places)), len(places))]
    orders[1] += orders[1][:5]  # asked once more
    return [Round(2, [("grid", Case(first, spread, places, orders))], init=False)]


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
    """Places that have nothing in common agree at most one time in three; by chance it is one in nine, each way."""
    shifts = dict(zip(seen.case.places, seen["shifts"], strict=True))
    known, found = *seen["letters"], seen.of(1)["letters"]
    met = alike(known) < MANY and meeting(seen.case.first, known, found)  # of few shifts, some meet by chance
    found = {"seed, epoch and row lead to the same number as others; a sum of the three is no mix, with factors too "
             "small for that, nor are digits or bits of the three that overlap": met}  # fmt: skip
    for cause, places, away in mixes(seen.case.first)[::-1]:
        pairs = [(shifts[place], shifts[away_from(place, away)]) for place in places]
        if sum(one[1] == two[0] for one, two in pairs) > len(pairs) / 3:
            found = {"seed one generator, and draw both from it": "its way down is often another's way to the right"}
        if any(sum(one[way] == two[way] for one, two in pairs) > len(pairs) / 3 for way in (0, 1)):
            found = {cause: "many move alike"}
    return first_mistake("another seed, epoch or row moves otherwise", found)


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
    pairs, every = len(set(seen["shifts"])), len(WAYS) ** 2
    return first_mistake("down and to the right have nothing in common, nor have two rows", {
        "draw two numbers, one for each way": pairs < every and f"{pairs} of {every} pairs occur",
        "of few seeds, many rows get the same one": alike(*seen["letters"]) > 1.07 and "too many rows that move alike",
    })  # fmt: skip


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
        "limit": "a loop that never ends; each row takes some millionths of a second",
        r"unhashable|must be an integer|expected int": "seed, epoch, row and most are ints; mix them into one int",
    },
)
