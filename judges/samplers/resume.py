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

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.expect import all_of, exercise, first_mistake
from ddp_course.grading.play import Note, Round, Seen
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
    state, taken, agree, numbers = None, [], True, 0
    for ranks, steps in case.runs:
        made = case.made(sampler, ranks, state)
        # A loader reads ahead: it has asked for more than what was trained on when the job stops.
        taken.append([indices(one, case.length + 1)[: steps and steps * case.batch] for one in made])
        states = []
        for one, mine in zip(made, taken[-1], strict=True):
            for start in range(0, len(mine), case.batch):
                one.advance(len(mine[start : start + case.batch]))
            states.append(json.dumps(one.state_dict(), sort_keys=True))
        agree = agree and (steps is None or len(set(states)) == 1)  # at an epoch's end, shards may differ by a row
        state = json.loads(states[0])
        numbers = max(numbers, _count(state))
    later = case.made(sampler, case.runs[-1][0], state)
    for one in later:
        one.set_epoch(case.epoch + 1)
    reseeded = replace(case, seed=case.seed + 1).made(sampler, case.runs[0][0], None)
    parts = {"later": later, "reseeded": reseeded, "whole": case.made(sampler, case.runs[0][0], None)}
    drawn = {name: [indices(one, case.length + 1) for one in samplers] for name, samplers in parts.items()}
    return Note(taken=taken, agree=agree, numbers=numbers, **drawn)


def _count(state: object) -> int:
    """Return how many values a state holds."""
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else None
    return 1 if parts is None else sum(map(_count, parts))


def rounds(rng: Random) -> list[Round]:
    """An epoch without interruption; one with; one that goes on with other numbers of ranks, twice."""
    ranks, batch, epoch = rng.choice((3, 4)), rng.randint(2, 3), rng.randint(1, 5)
    length = ranks * batch * 5 + rng.randint(1, ranks - 1)
    seed = rng.randrange(100)
    runs = {
        "whole": ((ranks, None),),
        "stopped": ((ranks, 2), (ranks, None)),
        "resized": ((ranks, 1), (ranks - 1, 2), (ranks + 1, None)),
    }
    return [Round(1, [(name, Case(length, seed, epoch, batch, each)) for name, each in runs.items()], init=False)]


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
    }  # fmt: skip
    return first_mistake("a state of a few numbers, the same on all ranks", mistakes)


def next_epoch(seen: Seen) -> Fault | None:
    """The epoch after it is whole, in its own order."""
    counts = Counter(index for shard in seen["later"] for index in shard)
    said = f"{len(counts)} samples, {sum(n > 1 for n in counts.values())} of them repeated"
    mistakes = {
        "set_epoch begins a new epoch: the position goes back to 0, nothing is padded":
            (len(counts) != seen.case.length or max(counts.values()) > 1) and said,
        "set_epoch has no effect on the order; the shuffle's seed must contain the epoch":
            seen["later"] == seen["whole"] and "the order of the epoch before",
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
        "stopped": ("an epoch that was interrupted", 2, all_of(each_once, same_order), "stopped"),
        "resized": ("going on with other numbers of ranks", 2, each_once, "resized"),
        "state": ("a small state, the same on all ranks", 1, small_state, "stopped resized"),
        "next": ("the next epoch is whole, in its own order", 1, next_epoch, "stopped"),
    },
    hints={r"not JSON serializable": "the state is saved as plain data: numbers, text, lists and dictionaries"},
    refused=REFUSED,
)
