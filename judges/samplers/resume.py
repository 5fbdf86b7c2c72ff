"""05.3 `Resumable(length, world_size, rank, seed)`: is every sample of an epoch trained on once, whatever happens?

One epoch is interrupted, once or twice, and goes on, maybe with another number of ranks. What all ranks of all runs
have trained on is put together. Read next: `judges/ddp_from_scratch/`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import all_of, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.samplers.deal import REFUSED, indices

MOST_NUMBERS = 10  # in a state


@dataclass(frozen=True)
class Case:
    """An epoch in several runs, each of so many ranks and steps until the interruption (None: to the end)."""

    length: int
    seed: int
    epoch: int
    batch: int
    runs: tuple[tuple[int, int | None], ...]

    def rows(self, steps: int) -> int:
        """Return the rows of a rank's first steps; every other batch has one more than `batch`."""
        return steps * self.batch + steps // 2

    def made(self, sampler: Callable, ranks: int, state: dict | None) -> list:
        """Return the samplers of all ranks, as in processes of their own."""
        found = []
        for rank in range(ranks):
            torch.manual_seed(2000 + rank)
            found.append(sampler(self.length, ranks, rank, self.seed))
            if state is None:
                found[rank].set_epoch(self.epoch)
            else:
                found[rank].load_state_dict(state)
        return found


def act(sampler: Callable, case: Case, rank: int, world_size: int) -> Note:
    """Play the runs, each going on from the last one's state; note the next epoch, and one of another seed, too."""
    state, told, taken, agree, trouble = None, [], [], True, ""
    for ranks, steps in case.runs:
        rows, states, wrong = _trained(case.made(sampler, ranks, state), case, steps)
        taken.append(rows)
        agree = agree and (steps is None or len(set(states)) == 1)  # at an epoch's end, shards may differ by a row
        trouble, state = trouble or wrong, json.loads(states[0])
        told.append(state)
    ranks, last = case.runs[0][0], case.runs[-1][0]
    parts = {"later": case.made(sampler, last, state), "again": case.made(sampler, ranks, told[0])}
    for name, ahead in (("later", 1), ("again", 0)):
        for one in parts[name]:
            one.set_epoch(case.epoch + ahead)
    parts["reseeded"] = replace(case, seed=case.seed + 1).made(sampler, ranks, None)
    parts["whole"] = case.made(sampler, ranks, None)
    drawn = {name: [indices(one, case.length + 1) for one in samplers] for name, samplers in parts.items()}
    return Note(taken=taken, agree=agree, numbers=max(map(_count, told)), trouble=trouble, **drawn)


def _trained(made: list, case: Case, steps: int | None) -> tuple[list, list[str], str]:
    """Take so many steps; return what each rank has trained on, its state as text, and what is wrong with a state.

    A loader reads ahead: it has asked for more than what was trained on when the job stops.
    """
    asked, states, wrong = [indices(one, case.length + 1) for one in made], [], ""
    taken = [mine[: steps and case.rows(steps)] for mine in asked]
    for one, mine, all_left in zip(made, taken, asked, strict=True):
        _advance(one, len(mine), case)
        given = one.state_dict()
        states.append(json.dumps(given, sort_keys=True))
        _advance(one, len(all_left) - len(mine), case)
        moves = states[-1] != json.dumps(given, sort_keys=True) and "one that changes when the sampler goes on"
        wrong = wrong or moves or ("" if isinstance(given, dict) else type(given).__name__)
    return taken, states, wrong


def _advance(sampler: Any, rows: int, case: Case) -> None:
    """Train on so many rows, batch by batch."""
    for step in range(rows):
        if (done := case.rows(step)) < rows:
            sampler.advance(min(rows, case.rows(step + 1)) - done)


def _count(state: object) -> int:
    """Return how many values a state holds."""
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else None
    return 1 if parts is None else sum(map(_count, parts))


def rounds(rng: Random) -> list[Round]:
    """An epoch without interruption; with one, in its middle or at or near its end; with two, on other ranks."""
    ranks, batch, epoch = rng.choice((3, 4)), rng.randint(2, 3), rng.randint(1, 5)
    length = ranks * batch * 5 + rng.randint(1, ranks - 1)
    seed = rng.randrange(100)
    whole = Case(length, seed, epoch, batch, ((ranks, None),))
    cases = {
        "whole": whole,
        "stopped": replace(whole, seed=0, runs=((ranks, 2), (ranks, None))),  # a product with seed 0 has no epoch in it
        "ended": replace(whole, length=ranks * whole.rows(4), runs=((ranks, 4), (ranks, None))),
        "rest": replace(whole, length=ranks * whole.rows(4) + 1, runs=((ranks, 4), (ranks + 1, None))),
        "resized": replace(whole, runs=((ranks, 1), (ranks - 1, 2), (ranks + 1, None))),
    }
    return [Round(1, list(cases.items()), init=False)]


def each_once(seen: Seen) -> Fault | None:
    """What all runs together have trained on is every sample once."""
    length, taken = seen.case.length, seen["taken"]
    counts = Counter(index for run in taken for shard in run for index in shard)
    strange = [repr(index) for index in counts if not isinstance(index, int) or not 0 <= index < length]
    repeated, missing = sum(n > 1 for n in counts.values()), length - len(counts)
    mistakes = {
        f"indices are whole numbers from 0 to {length - 1}": strange and strange[0],
        _cause(length, [sum(map(len, run)) for run in taken], repeated):
            (repeated or missing) and f"{repeated} repeated, {missing} missing",
    }  # fmt: skip
    return first_mistake(f"each of {length} samples once, by all ranks in all runs together", mistakes)


def _cause(length: int, sizes: list[int], repeated: int) -> str:
    """Name the mistake from the number of samples that all ranks of each run have trained on."""
    if len(sizes) == 1:
        return "one order for all ranks, of which each takes every world_size-th entry; no padding, nothing dropped"
    if sizes[-1] >= length:
        return "the epoch began again; begin after what was trained on"
    if sum(sizes) == length:
        return "after the interruption the order is another one: save the epoch in the state, shuffle by seed and epoch"
    if not repeated:
        return "what a loader has read ahead was not trained on; count in advance(), not in __iter__"
    if len(sizes) == 3 and sizes[1] + sizes[2] == length:
        return "the second state forgets the first run: add to the position that was loaded"
    if len(sizes) == 3:
        return "the position must be counted over all ranks, so that it means the same for another number of them"
    return "the position is that in the order of all ranks: each step of every rank moves it by world_size * rows"


def shuffled(seen: Seen) -> Fault | None:
    """The order is no ascending one, and follows from the seed."""
    ascending = any(shard == sorted(shard) for shard in seen["taken"][0])
    mistakes = {
        "shuffle as in 05.1, before the ranks take their part": ascending and "an ascending order",
        "the shuffle does not use the seed": seen["taken"][0] == seen["reseeded"] and "the same one for another seed",
    }
    return first_mistake("a shuffled order, another one for another seed", mistakes)


def same_order(seen: Seen) -> Fault | None:
    """The runs together have the order of the epoch without interruption."""
    joined = [sum(parts, []) for parts in zip(*seen["taken"], strict=True)]
    cause = "the order after the interruption must be that of the same seed and epoch; save the epoch in the state"
    other = joined != seen["whole"] and "another order"
    return first_mistake("the indices of the epoch without interruption, rank by rank", {cause: other})


def small_state(seen: Seen) -> Fault | None:
    """The state is small, and the same on all ranks."""
    many = seen["numbers"] > MOST_NUMBERS and f"{seen['numbers']} numbers"
    mistakes = {
        "a list grows with the data set; the epoch and a position say the same": many,
        "the state is saved by one rank and loaded by all, so nothing in it may depend on the rank":
            not seen["agree"] and "different states",
        "return a new dictionary, which nothing changes afterwards": seen["trouble"],
    }  # fmt: skip
    return first_mistake("a dictionary of a few numbers, the same on all ranks", mistakes)


def next_epoch(seen: Seen) -> Fault | None:
    """The epoch after it is whole, in its own order."""
    counts = Counter(index for shard in seen["later"] for index in shard)
    said = f"{len(counts)} samples, {sum(n > 1 for n in counts.values())} of them repeated"
    mistakes = {
        "set_epoch begins a new epoch: the position goes back to 0, nothing is padded":
            (len(counts) != seen.case.length or max(counts.values()) > 1) and said,
        "set_epoch has no effect on the order; the shuffle's seed must contain the epoch":
            seen["later"] == seen["whole"] and "the order of the epoch before",
        "set_epoch begins a whole epoch, also that which was interrupted":
            seen["again"] != seen["whole"] and "something else, if the epoch that was interrupted begins again",
    }  # fmt: skip
    return first_mistake(f"all {seen.case.length} samples in the next epoch, each once, in another order", mistakes)


RESUME = exercise(
    "05.3",
    "Resume where you stopped (stretch)",
    "Resumable",
    25,
    act=act,
    rounds=rounds,
    checks={
        "whole": ("an epoch without interruption: each sample once, shuffled", 1, all_of(each_once, shuffled), "whole"),
        "stopped": ("an epoch that was interrupted", 2, all_of(each_once, same_order), "stopped ended"),
        "resized": ("going on with other numbers of ranks", 2, each_once, "resized rest"),
        "state": ("a small state, the same on all ranks", 1, small_state, "stopped resized"),
        "next": ("the next epoch is whole, in its own order", 1, next_epoch, "stopped"),
    },
    hints={r"not JSON serializable": "the state is saved as plain data: numbers, text, lists and dictionaries"},
    refused=REFUSED,
)
