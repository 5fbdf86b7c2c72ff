"""11.2 `shifted(...)`: do the random numbers of a row depend on seed, epoch and row, and on nothing else?

The image has another value in each pixel, so a result tells how far it was moved. Two processes ask for the same rows
in other orders, each after other random numbers of its own.

Read next: `training.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer

SIDE, MOST, GRID = 11, 4, 30
HIGH = 2**13  # the highest bit of a number below 10,000
UNREAD = ", or it lies above the 32 bits of a seed that torch's CPU generator reads"
NOT_LOOKED_AT = Fault(found="not looked at", cause="the first line says what is wrong")
APART = (1, 10, 100, 1000)  # rows between two that a weak mix gives the same shift, when the epoch or the seed differs

Place = tuple[int, int, int]  # seed, epoch, row
Shift = tuple[int, int]  # down, right


def picture(height: int = SIDE) -> torch.Tensor:
    return torch.arange(1, 2 * height * SIDE + 1, dtype=torch.float32).view(2, height, SIDE)


def driver(rank: int, world_size: int, function: Callable, places: list[Place], orders: list[list[int]]) -> dict:
    """Ask for the shift of each place, in this rank's order; note what was no shift, and what happened outside."""
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(17 + rank)
    before, given = _generators(), picture()
    shifts: list[Any] = [None] * len(places)
    shared = None
    for number in orders[rank]:
        image = picture()
        result = function(image, *places[number], MOST)
        shifts[number] = decoded(result, given)
        if not torch.equal(image, given):
            shifts[number] = "the image that was given is changed; return a new one"
        if isinstance(shifts[number], str):
            break
        result.detach().zero_()
        if not torch.equal(image, given):
            shared = shifts[number]
    touched = [name for name, state in _generators().items() if state != before[name]]
    return {"shifts": shifts, "shared": shared, "touched": touched}


def wide_driver(rank: int, world_size: int, function: Callable, place: Place) -> list[Any]:
    """Images that are not square, and shifts of at most 1 and 2."""
    given = picture(SIDE - 3)
    return [decoded(function(given.clone(), *place, most), given) for most in (1, 2)]


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
    result = torch.zeros_like(image)
    height, width = image.shape[1:]
    rows, columns = range(max(0, down), min(height, height + down)), range(max(0, right), min(width, width + right))
    for y in rows:
        result[:, y, columns.start : columns.stop] = image[:, y - down, columns.start - right : columns.stop - right]
    return result


def shift_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """A grid of seeds, epochs and rows, asked for by two processes."""
    seed, epoch, row = rng.randint(5, 3000), rng.randint(5, 3000), rng.randint(1500, 5000)
    grid = [(seed, epoch + e, row + r) for e in range(GRID) for r in range(GRID)]
    near = [(seed + s, epoch + e, row + r) for e, r, s in _neighbours()]
    zeros = [(0, 0, r) for r in range(40)] + [far for r in range(GRID) for far in _far(r)]
    spread = [(seed, rng.randint(0, 9999), rng.randint(0, 9999)) for _ in range(GRID**2)]
    places = list(dict.fromkeys(grid + near + zeros + spread))
    orders = [list(range(len(places))), rng.sample(range(len(places)), len(places))]
    wide = answer.run(wide_driver, 1, (seed, epoch, row), init=False)[0]
    one, two = answer.run(driver, 2, places, orders, init=False)
    shifts = dict(zip(places, one["shifts"], strict=True))
    form = _form_fault([*one["shifts"], *two["shifts"], *wide], wide)
    yield "moved", form or _shared_fault(one["shared"])
    if form:
        for key in ("same", "other", "even", "global"):
            yield key, NOT_LOOKED_AT
        return
    yield "same", _same_fault(places, one["shifts"], two["shifts"])
    yield "other", _other_fault(shifts, (seed, epoch, row))
    yield "even", _even_fault([shifts[place] for place in spread])
    yield "global", _touched_fault(one["touched"])


def _neighbours() -> list[Place]:
    """Offsets (epoch, row, seed) at which a weak mix repeats itself."""
    rows = range(GRID)
    by_epoch = [(1, r - apart, 0) for r in rows for apart in APART]
    by_seed = [(0, r - apart, 1) for r in rows for apart in (0, *APART)] + [(e - 1, r, 1) for e in rows for r in (0, 9)]
    return by_epoch + by_seed


def _far(row: int) -> list[Place]:
    """Places that differ from (0, 0, row) in one high bit; two of the three do not fit into 32 bits side by side."""
    return [(HIGH, 0, row), (0, HIGH, row), (0, 0, HIGH + row)]


def _shared_fault(shared: Shift | None) -> Fault | None:
    if shared is None:
        return None
    found = f"writing into the result changes `image`, when it is moved by {shared}"
    cause = "return a new tensor, also where nothing moves: image.clone()"
    return Fault("a new tensor, whose memory is its own", found, cause=cause)


def _form_fault(shifts: list[Any], wide: list[Any]) -> Fault | None:
    said = next((each for each in shifts if isinstance(each, str)), None)
    if said:
        found, _, cause = said.partition("; ")
        return Fault("a moved copy of the image", found, cause=cause)
    far = next((s for s in shifts if s and max(map(abs, s)) > MOST), None)
    if far or any(max(map(abs, shift)) > most for most, shift in enumerate(wide, start=1)):
        found = f"moved by {far or wide[0]}"
        return Fault(f"at most {MOST} pixels, or what `most` says", found, cause="draw from -most to most")
    return None


def _same_fault(places: list[Place], one: list[Any], two: list[Any]) -> Fault | None:
    differing = [place for place, a, b in zip(places, one, two, strict=True) if a != b]
    if not differing:
        return None
    place = differing[0]
    found = f"{one[places.index(place)]} in one process, {two[places.index(place)]} in another that asks in other order"
    cause = (
        "the numbers come from a generator that moves on; make one for each row, seeded by seed, epoch and row: "
        "torch.Generator().manual_seed(...)"
    )
    return Fault(f"seed {place[0]}, epoch {place[1]}, row {place[2]} always moves alike", found, cause=cause)


def _other_fault(shifts: dict[Place, Shift], first: Place) -> Fault | None:
    """Whether places that have nothing in common agree more often than one time in four; by chance it is one in 81."""
    seed, epoch, row = first
    grid = [(epoch + e, row + r) for e in range(GRID - 1) for r in range(GRID - 1)]

    def agree(pairs: list[tuple[Place, Place]]) -> bool:
        return sum(shifts[a] == shifts[b] for a, b in pairs) > len(pairs) / 4 + 2

    told = [
        ([((seed, e, r), (seed, e, r + 1)) for e, r in grid], "all rows move alike: the row is not in the mix"
         f"{UNREAD}"),
        ([((seed, e, r), (seed, e + 1, r)) for e, r in grid], "a row moves alike in every epoch: the epoch is not in "
         f"the mix{UNREAD}"),
        ([((seed, epoch, row + r), (seed + 1, epoch, row + r)) for r in range(GRID)], "the seed is not in the mix"
         f"{UNREAD}"),
        ([((0, 0, 0), (0, 0, r)) for r in range(1, 40)], "in epoch 0, or with seed 0, all rows move alike: a product "
         "of the three is no mix"),
        ([((seed, e, r + 1), (seed, e + 1, r)) for e, r in grid], "row 5 of epoch 0 moves as row 4 of epoch 1: a sum "
         "of the three is no mix"),
        ([((seed, epoch + e, row), (seed + 1, epoch + e - 1, row)) for e in range(1, GRID)], "epoch 1 of seed 0 is "
         "epoch 0 of seed 1: a sum of the three is no mix"),
    ]  # fmt: skip
    for apart in APART:
        said = f"the numbers meet again {apart} rows apart: the factors before seed and epoch are too small for that"
        told.append(([((seed, epoch, row + r), (seed, epoch + 1, row + r - apart)) for r in range(GRID)], said))
        told.append(([((seed, epoch, row + r), (seed + 1, epoch, row + r - apart)) for r in range(GRID)], said))
    for which, name in enumerate(("seed", "epoch", "row")):
        said = f"{name} {HIGH} moves as {name} 0: torch's CPU generator reads 32 bits of a seed, and drops the others"
        told.append(([((0, 0, r), _far(r)[which]) for r in range(GRID)], said))
    cause = next((words for pairs, words in told if agree(pairs)), None)
    return cause and Fault("another seed, epoch or row moves otherwise", "many move alike", cause=cause)


def _even_fault(shifts: list[Shift]) -> Fault | None:
    wanted = range(-MOST, MOST + 1)
    for axis, name in enumerate(("down", "to the right")):
        counts = Counter(shift[axis] for shift in shifts)
        never = [way for way in wanted if not counts[way]]
        said = f"of {len(shifts)} rows, each of {MOST * 2 + 1} ways {name} about {len(shifts) // (2 * MOST + 1)} times"
        if never:
            cause = "the upper end of randint is left out: randint(-most, most + 1)" if never == [MOST] else ""
            found = f"never {', '.join(map(str, never))}"
            return Fault(said, found, cause=cause or "draw whole numbers from -most to most")
        if not all(55 <= counts[way] <= 160 for way in wanted):
            found = ", ".join(f"{way}: {counts[way]}" for way in wanted)
            return Fault(said, found, cause="draw each number from -most to most with the same chance")
    if len(set(shifts)) < 60:
        found = f"{len(set(shifts))} of {(2 * MOST + 1) ** 2} pairs occur"
        return Fault("down and to the right have nothing in common", found, cause="draw two numbers, one for each way")
    return None


def _touched_fault(touched: list[str]) -> Fault | None:
    if not touched:
        return None
    found = f"the generator of {' and '.join(touched)} has moved"
    cause = "dropout and others draw from it, and would get other numbers; use torch.Generator().manual_seed(...)"
    return Fault("the process's own generators stay as they are", found, cause=cause)


SHIFT = Exercise(
    "11.2",
    "Shifts without a generator",
    "shifted",
    20,
    (
        Check("moved", "the image is moved, black comes in", 1),
        Check("same", "the same in any process and in any order", 1),
        Check("other", "otherwise for another seed, epoch or row", 2),
        Check("even", "all shifts occur, equally often", 1),
        Check("global", "the process's own generators stay as they are", 1),
    ),
    shift_judge,
    refused=("ddp_course.data.augment.draw", "ddp_course.data.augment.changed"),
    hints=(
        (r"no result after", "a loop that never ends; each row takes some millionths of a second"),
        (r"unhashable|must be an integer|expected int", "seed, epoch, row and most are ints; mix them into one int"),
    ),
)
