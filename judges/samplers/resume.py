"""05.3 `Resumable(length, world_size, rank, seed)`: is every sample of an epoch trained on once, whatever happens?

One epoch is interrupted, once or twice, and goes on, maybe with another number of ranks. What all ranks of all runs
have trained on is put together. Read next: `judges/ddp_from_scratch/`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from random import Random

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.samplers.deal import REFUSED, Shards, index_of

MOST_NUMBERS = 10  # in a state
Run = tuple[int, int | None]  # ranks, and steps until the interruption (None: to the end)


def resume_driver(rank: int, world_size: int, sampler: Callable, cases: list[dict]) -> list[dict]:
    """Play each case: several runs after each other, each going on from the state of the last."""
    return [_played(sampler, **case) for case in cases]


def _played(sampler: Callable, length: int, seed: int, epoch: int, runs: list[Run], batch: int) -> dict:
    state, taken, agree, numbers = None, [], True, 0
    for ranks, steps in runs:
        made = [_made(sampler, length, ranks, rank, seed, epoch, state) for rank in range(ranks)]
        # A loader reads ahead: it has asked for more than what was trained on when the job stops.
        ahead = [_drawn(one, length) for one in made]
        used = [mine if steps is None else mine[: steps * batch] for mine in ahead]
        states = []
        for one, mine in zip(made, used, strict=True):
            for start in range(0, len(mine), batch):
                one.advance(len(mine[start : start + batch]))
            states.append(_as_text(one.state_dict()))
        if steps is not None:  # at an epoch's end, shards may differ by a row
            agree = agree and len(set(states)) == 1
        taken.append(used)
        state = json.loads(states[0])
        numbers = max(numbers, _count(state))
    nexts = [_made(sampler, length, runs[-1][0], rank, seed, epoch, state) for rank in range(runs[-1][0])]
    for one in nexts:
        one.set_epoch(epoch + 1)
    return {"taken": taken, "agree": agree, "numbers": numbers, "next": [_drawn(one, length) for one in nexts]}


def _drawn(one: Iterable, length: int) -> list:
    return [index_of(item) for item in islice(iter(one), length + 1)]


def _made(sampler: Callable, length: int, ranks: int, rank: int, seed: int, epoch: int, state: dict | None):
    torch.manual_seed(2000 + rank)  # as in a process of its own
    made = sampler(length, ranks, rank, seed)
    if state is None:
        made.set_epoch(epoch)
    else:
        made.load_state_dict(state)
    return made


def _count(state: object) -> int:
    """Return how many values a state holds."""
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else None
    return 1 if parts is None else sum(map(_count, parts))


def _as_text(state: object) -> str:
    return json.dumps(state, sort_keys=True)


def resume_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """An epoch without interruption; one with; one that goes on with other numbers of ranks, twice."""
    ranks, batch, epoch = rng.choice((3, 4)), rng.randint(2, 3), rng.randint(1, 5)
    length = ranks * batch * 5 + rng.randint(1, ranks - 1)
    case = {"length": length, "seed": rng.randrange(100), "epoch": epoch, "batch": batch}
    cases = [
        {**case, "runs": [(ranks, None)]},
        {**case, "runs": [(ranks, 2), (ranks, None)]},
        {**case, "runs": [(ranks, 1), (ranks - 1, 2), (ranks + 1, None)]},
        {**case, "runs": [(ranks, None)], "seed": case["seed"] + 1},
    ]
    whole, stopped, resized, other = answer.run(resume_driver, 1, cases)[0]
    yield "whole", _once_fault(length, whole) or _shuffle_fault(whole["taken"][0], other["taken"][0])
    yield "stopped", _once_fault(length, stopped) or _order_fault(whole, stopped)
    yield "resized", _once_fault(length, resized)
    yield "state", next(filter(None, map(_state_fault, (stopped, resized))), None)
    yield "next", _next_fault(length, stopped, whole["taken"][0])


def _once_fault(length: int, note: dict, cause: str = "") -> Fault | None:
    counts = Counter(index for run in note["taken"] for shard in run for index in shard)
    expected = f"each of {length} samples once, in {len(note['taken'])} run{'s' * (len(note['taken']) > 1)} together"
    strange = [index for index in counts if not isinstance(index, int) or not 0 <= index < length]
    if strange:
        return Fault(expected, f"index {strange[0]!r}", cause=f"indices are whole numbers from 0 to {length - 1}")
    repeated, missing = sum(n > 1 for n in counts.values()), length - len(counts)
    if not repeated and not missing:
        return None
    sizes = [sum(map(len, run)) for run in note["taken"]]  # of all ranks
    return Fault(expected, f"{repeated} repeated, {missing} missing", cause=_cause(length, sizes, repeated))


def _cause(length: int, sizes: list[int], repeated: int) -> str:
    """Name the mistake from the number of samples that each run has trained on."""
    if len(sizes) == 1:
        return "one order for all ranks, of which each takes every world_size-th entry; no padding, nothing dropped"
    if sizes[-1] >= length:
        return "the epoch began anew; begin after what was trained on"
    if sum(sizes) == length:
        return "after the interruption the order is another one: save the epoch in the state, shuffle by seed and epoch"
    if not repeated:
        return "what a loader has read ahead was not trained on; count in advance(), not in __iter__"
    if len(sizes) == 3 and sizes[1] + sizes[2] == length:
        return "the second state forgets the first run: add to the position that was loaded"
    if len(sizes) == 3:
        return "the position must be counted over all ranks, so that it means the same for another number of them"
    return "the position is that in the order of all ranks: each step of every rank moves it by world_size * rows"


def _shuffle_fault(ours: Shards, theirs: Shards) -> Fault | None:
    if any(shard == sorted(shard) for shard in ours):
        return Fault(
            "a shuffled order", "an ascending one", cause="shuffle as in 05.1, before the ranks take their part"
        )
    if ours == theirs:
        return Fault("another order for another seed", "the same order", cause="the shuffle does not use the seed")
    return None


def _order_fault(whole: dict, stopped: dict) -> Fault | None:
    joined = [a + b for a, b in zip(*stopped["taken"], strict=True)]
    if joined == whole["taken"][0]:
        return None
    cause = "the order after the interruption must be that of the same seed and epoch; save the epoch in the state"
    return Fault("the indices of the epoch without interruption, rank by rank", "another order", cause=cause)


def _state_fault(note: dict) -> Fault | None:
    if note["numbers"] > MOST_NUMBERS:
        cause = "a list grows with the data set; the epoch and a position say the same"
        return Fault("a state of a few numbers", f"{note['numbers']} of them", cause=cause)
    if note["agree"]:
        return None
    cause = "the state is saved by one rank and loaded by all, so nothing in it may depend on the rank"
    return Fault("the same state on all ranks", "different states", cause=cause)


def _next_fault(length: int, note: dict, before: Shards) -> Fault | None:
    counts = Counter(index for shard in note["next"] for index in shard)
    if len(counts) != length or max(counts.values()) > 1:
        cause = "set_epoch begins a new epoch: the position goes back to 0, nothing is padded"
        found = f"{len(counts)} of them, {sum(n > 1 for n in counts.values())} repeated"
        return Fault(f"all {length} samples in the epoch after it, each once", found, cause=cause)
    if note["next"] == before:
        cause = "set_epoch has no effect on the order; the shuffle's seed must contain the epoch"
        return Fault("another order in the next epoch", "the same order", cause=cause)
    return None


RESUME = Exercise(
    "05.3",
    "Go on where you stopped (stretch)",
    "Resumable",
    25,
    (
        Check("whole", "an epoch without interruption: each sample once, shuffled", 1),
        Check("stopped", "an epoch that was interrupted", 2),
        Check("resized", "going on with other numbers of ranks", 2),
        Check("state", "a small state, the same on all ranks", 1),
        Check("next", "the next epoch is whole, in its own order", 1),
    ),
    resume_judge,
    hints=((r"not JSON serializable", "the state is saved as plain data: numbers, text, lists and dictionaries"),),
    refused=REFUSED,
)
