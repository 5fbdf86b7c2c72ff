"""05.3 `Resumable(length, world_size, rank, seed)`: is every sample of an epoch trained on once, whatever happens?

One epoch is interrupted, once or twice, and goes on, maybe with another number of ranks. What all ranks of all runs
have trained on is put together. Read next: `../ddp_from_scratch/`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.grading.lessons.samplers.deal import REFUSED

Run = tuple[int, int | None]  # ranks, and steps until the interruption (None: to the end)


def resume_driver(rank: int, world_size: int, sampler: Callable, cases: list[dict]) -> list[dict]:
    """Play each case: several runs after each other, each going on from the state of the last."""
    return [_played(sampler, **case) for case in cases]


def _played(sampler: Callable, length: int, seed: int, epoch: int, runs: list[Run], batch: int) -> dict:
    state, taken, agree = None, [], True
    for ranks, steps in runs:
        made = [_made(sampler, length, ranks, rank, seed, epoch, state) for rank in range(ranks)]
        # A loader reads ahead: it has asked for more than what was trained on when the job stops.
        ahead = [list(islice(iter(one), length + 1)) for one in made]
        used = [mine if steps is None else mine[: steps * batch] for mine in ahead]
        states = []
        for one, mine in zip(made, used, strict=True):
            for start in range(0, len(mine), batch):
                one.advance(len(mine[start : start + batch]))
            states.append(_as_text(one.state_dict()))
        if steps is not None:  # at an epoch's end, shards may differ by a row
            agree = agree and len(set(states)) == 1
        taken.append([plain(mine) for mine in used])
        state = json.loads(states[0])
    nexts = [_made(sampler, length, runs[-1][0], rank, seed, epoch, state) for rank in range(runs[-1][0])]
    for one in nexts:
        one.set_epoch(epoch + 1)
    return {"taken": taken, "agree": agree, "next": [plain(list(islice(iter(one), length + 1))) for one in nexts]}


def _made(sampler: Callable, length: int, ranks: int, rank: int, seed: int, epoch: int, state: dict | None):
    torch.manual_seed(2000 + rank)  # as in a process of its own
    made = sampler(length, ranks, rank, seed)
    if state is None:
        made.set_epoch(epoch)
    else:
        made.load_state_dict(state)
    return made


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
    ]
    whole, stopped, resized = answer.run(resume_driver, 1, cases)[0]
    yield "whole", _once_fault(length, whole)
    yield "stopped", _once_fault(length, stopped) or _order_fault(whole, stopped)
    yield "resized", _once_fault(length, resized)
    yield "state", next(filter(None, map(_state_fault, (stopped, resized))), None)
    yield "next", _next_fault(length, stopped)


def _once_fault(length: int, note: dict) -> Fault | None:
    counts = Counter(index for run in note["taken"] for shard in run for index in shard)
    expected = f"each of {length} samples once, in {len(note['taken'])} run{'s' * (len(note['taken']) > 1)} together"
    strange = [index for index in counts if not isinstance(index, int) or not 0 <= index < length]
    if strange:
        return Fault(expected, f"index {strange[0]!r}", cause=f"indices are whole numbers from 0 to {length - 1}")
    repeated, missing = sum(n > 1 for n in counts.values()), length - len(counts)
    if not repeated and not missing:
        return None
    return Fault(expected, f"{repeated} repeated, {missing} missing", cause=_cause(note, repeated, missing))


def _cause(note: dict, repeated: int, missing: int) -> str:
    first, last = note["taken"][0], note["taken"][-1]
    if len(note["taken"]) == 1:
        return "one order for all ranks, of which each takes every world_size-th entry; no padding, nothing dropped"
    if repeated and all(a[: len(b)] == b for a, b in zip(last, first, strict=False)):
        return "the epoch began anew; begin after what was trained on"
    if missing and not repeated:
        return "what a loader has read ahead was not trained on; count in advance(), not in __iter__"
    if len(note["taken"]) == 3:
        return "the position must be counted over all ranks, so that it means the same for another number of them"
    return "the position is that in the order of all ranks: each step of every rank moves it by world_size * rows"


def _order_fault(whole: dict, stopped: dict) -> Fault | None:
    joined = [a + b for a, b in zip(*stopped["taken"], strict=True)]
    if joined == whole["taken"][0]:
        return None
    cause = "the order after the interruption must be that of the same seed and epoch; save the epoch in the state"
    return Fault("the indices of the epoch without interruption, rank by rank", "another order", cause=cause)


def _state_fault(note: dict) -> Fault | None:
    if note["agree"]:
        return None
    cause = "the state is saved by one rank and loaded by all, so nothing in it may depend on the rank"
    return Fault("the same state on all ranks", "different states", cause=cause)


def _next_fault(length: int, note: dict) -> Fault | None:
    counts = Counter(index for shard in note["next"] for index in shard)
    if len(counts) == length and max(counts.values()) == 1:
        return None
    cause = "set_epoch begins a new epoch: the position goes back to 0"
    return Fault(f"all {length} samples in the epoch after it", f"{len(counts)} of them", cause=cause)


RESUME = Exercise(
    "05.3",
    "Go on where you stopped (stretch)",
    "Resumable",
    25,
    (
        Check("whole", "an epoch without interruption: each sample once", 1),
        Check("stopped", "an epoch that was interrupted", 2),
        Check("resized", "going on with other numbers of ranks", 2),
        Check("state", "the same state on all ranks", 1),
        Check("next", "the next epoch is whole", 1),
    ),
    resume_judge,
    hints=((r"not JSON serializable", "the state is saved as plain data: numbers, text, lists and dictionaries"),),
    refused=REFUSED,
)
