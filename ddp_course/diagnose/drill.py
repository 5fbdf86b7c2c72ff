"""Can you tell what happened from what a job leaves? An incident, made by a real run with one to three faults in it.

Three ranks train, and each writes a log: the rows it read, the loss, the sum of its weights, its times, and its last
words. The faults are drawn by level and seed, at most one from each channel of evidence, so that no fault hides
another. `solve` is the proof: it sees the logs alone, tries every fault on every rank, and refuses logs that leave more
than one answer. `drill_job.py` keeps no incident that it refuses.

Left out on purpose: a story. Real incidents have none.
Read next: `drill_job.py`, which runs it; `commands/drill.py`, which asks; lesson 12, notebooks/12_failure_lab.ipynb,
which teaches what is asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import median

RANKS, STEPS, EPOCHS, BATCH = 3, 12, 3, 4
ROWS = STEPS // EPOCHS * RANKS * BATCH
NOISE_MS = 10  # what a rank that is not slow may take at most, as a median

# Channel of evidence -> the faults that show in it, each with whether one rank is to blame.
CHANNELS = {
    "end": {"one-rank-raises": True, "killed": True, "skipped-collective": True},
    "rows": {"same-rows": False, "missing-set-epoch": False},
    "weights": {"drift": True, "not-averaged": False},
    "time": {"straggler": True},
}
BLAMED = {name: whose for channel in CHANNELS.values() for name, whose in channel.items()}
HIDDEN = {"same-rows", "not-averaged"}  # from the same rows all ranks have the same gradients, averaged or not
# Level -> how many faults, from which channels, and what is new.
LEVELS = {
    1: (1, ("end",), "a job that died: last words"),
    2: (1, ("rows",), "a job that ended well, on the wrong rows"),
    3: (1, ("weights", "time"), "a job that ended well, but its weights differ or one rank is slow"),
    4: (1, ("rows", "weights", "time"), "a job that ended well: rows, weights or time, you are not told which"),
    5: (1, tuple(CHANNELS), "any of the faults"),
    6: (2, ("rows", "time"), "two at once: wrong rows and a slow rank"),
    7: (2, ("rows", "weights", "time"), "two at once, in any two columns"),
    8: (2, tuple(CHANNELS), "two at once, and the job may die of one"),
    9: (3, ("rows", "weights", "time"), "three at once: rows, weights and time"),
    10: (3, tuple(CHANNELS), "three at once, of all there are"),
}
LEGEND = f"""\
A run has {EPOCHS} epochs of {STEPS // EPOCHS} steps, and {ROWS} rows of data: in each step each of the {RANKS} ranks
reads {BATCH}. A line of a log is a step, written when the step is over:
  rows     the rows of the data that this rank read
  loss     on these rows, before the update
  weights  the sum of this rank's weights after the update; the same on all ranks if all is well
  own      the time this rank worked before it communicated; a few ms are noise, and in step 0
           one rank takes 0.1 s longer to start up: no fault
  calls    how many collectives this rank has called so far: two in each step, and one after the last
The last line of a rank is `done`, or the error that ended it. A rank that was killed writes no such line."""
HINTS = {
    "end": "Read the last lines of each log. Which rank has a reason of its own, or no last word at all?",
    "rows": "Compare the rows of two ranks in one epoch, then those of one rank in two epochs.",
    "weights": "In every step all ranks should have the same weights. From which step on do they differ, and whose?",
    "time": "Compare `own`, the time that a rank computes before it communicates.",
}
Faults = dict[str, int | None]  # fault -> the rank to blame, None if it is all ranks


@dataclass(frozen=True)
class Incident:
    """What is drawn by level and seed.

    Attributes:
        faults: each with the rank to blame.
        when: the step in which the job dies, if it does.
        cold: the rank whose first step is slow, which is no fault.
        world: the seed of data, weights and order.
    """

    faults: Faults
    when: int
    cold: int
    world: int


def drawn(level: int, seed: int) -> Incident:
    """Return the incident of this level and seed.

    Raises:
        ValueError: there is no such level.
    """
    if level not in LEVELS:
        raise ValueError(f"there is no level {level}: levels are 1 to {max(LEVELS)}")
    choose = random.Random(f"{level}/{seed}")
    kinds = _kinds(level)
    names = kinds[seed % len(kinds)]
    faults = {fault: choose.randrange(RANKS) if BLAMED[fault] else None for fault in sorted(names)}
    cold = (faults.get("straggler", -1) + choose.choice((1, 2))) % RANKS
    return Incident(faults, choose.randrange(STEPS // 2, STEPS - 1), cold, choose.randrange(2**31))


def _kinds(level: int) -> list[tuple[str, ...]]:
    """Return the faults that this level can combine, in an order of its own: seeds in a row repeat none too soon."""
    count, channels, _ = LEVELS[level]
    names = [each for some in combinations(channels, count) for each in product(*(CHANNELS[one] for one in some))]
    kinds = [each for each in names if not set(each) >= HIDDEN]
    random.Random(level).shuffle(kinds)
    return kinds


# --- The proof that it can be solved ---------------------------------------------------------------

_LINE = re.compile(
    r"step \d+ epoch (\d+) rows (?P<rows>\S+) loss \S+ weights (?P<weights>\S+) own (\S+) ms calls (?P<calls>\d+)"
)


@dataclass(frozen=True)
class _Job:
    """The logs, by rank: the steps, and the last words, "" where the last line is a step."""

    steps: list[list[re.Match]]
    last: list[str]

    def differ(self, column: str) -> list[re.Match]:
        """The first step in which ranks differ in this column, as each rank has it; nothing if they never do."""
        return next((here for here in zip(*self.steps, strict=False) if len({each[column] for each in here}) > 1), [])


def solve(folder: Path) -> Faults:
    """Return the faults that the logs show; nothing but the logs is looked at.

    Raises:
        ValueError: they fit more than one answer; says which.
    """
    lines = [(folder / f"rank{rank}.log").read_text().splitlines() for rank in range(RANKS)]
    steps = [[found for line in of_rank if (found := _LINE.fullmatch(line))] for of_rank in lines]
    last = ["" if not of_rank or _LINE.fullmatch(of_rank[-1]) else of_rank[-1] for of_rank in lines]
    job = _Job(steps, last)
    tried = [(name, rank) for name, whose in BLAMED.items() for rank in (range(RANKS) if whose else [None])]
    fit = [(name, rank) for name, rank in tried if _SHOWS[name](job, rank)]
    for channel in CHANNELS.values():
        if len(rivals := [each for each in fit if each[0] in channel]) > 1:
            raise ValueError(f"the logs fit more than one answer: {rivals}")
    return dict(fit)


def _skipped(job: _Job, rank: int) -> bool:
    calls = [int(each["calls"]) for each in job.differ("calls")]
    return bool(calls) and calls[rank] == min(calls)


def _repeated(job: _Job, _: None) -> bool:
    orders = [[[each["rows"] for each in of_rank if each[1] == epoch] for epoch in "01"] for of_rank in job.steps]
    return all(again and again == first[: len(again)] for first, again in orders)


def _parted(job: _Job, rank: int | None) -> bool:
    """Whether weights differ, those of one rank, or with a rank of None all, and not because a call was skipped."""
    here = job.differ("weights")
    alone = [r for r, each in enumerate(here) if [other["weights"] for other in here].count(each["weights"]) == 1]
    return alone == (list(range(RANKS)) if rank is None else [rank]) and len({each["calls"] for each in here}) == 1


def _slow(job: _Job, rank: int) -> bool:
    own = [median(float(each[4]) for each in of_rank) for of_rank in job.steps]
    slowest = own.pop(rank)
    return slowest > NOISE_MS and slowest > 3 * max(own)


# Fault -> whether the logs can be those of a job that had it, on this rank.
_SHOWS: dict[str, Callable[[_Job, int | None], bool]] = {
    "one-rank-raises": lambda job, rank: job.last[rank].startswith("ValueError"),
    "killed": lambda job, rank: not job.last[rank],
    "skipped-collective": _skipped,
    "same-rows": lambda job, _: not job.differ("rows"),
    "missing-set-epoch": _repeated,
    "drift": _parted,
    "not-averaged": _parted,
    "straggler": _slow,
}
