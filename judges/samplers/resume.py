"""05.4 `Resumable(length, world_size, rank, seed)`: is every sample of an epoch trained on once, whatever happens?

One epoch is interrupted, once or twice, and resumed, maybe with another number of ranks. Any order will do, so a view
has what all ranks of all runs have trained on together. Read next: `weighted.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.samplers.deal import REFUSED, indices

MOST_NUMBERS = 10  # in a state


class Case(NamedTuple):
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


def cases(rng: Random) -> list[Round]:
    """An epoch without interruption; with one, in its middle or at or near its end; with two, on other ranks."""
    ranks, batch, epoch = rng.choice((3, 4)), rng.randint(2, 3), rng.randint(1, 5)
    length, seed = ranks * batch * 5 + rng.randint(1, ranks - 1), rng.randrange(100)
    whole = Case(length, seed, epoch, batch, ((ranks, None),))
    named = {
        "whole": whole,
        "stopped": whole._replace(seed=0, runs=((ranks, 2), (ranks, None))),  # a product with seed 0 has no epoch in it
        "ended": whole._replace(length=ranks * whole.rows(4), runs=((ranks, 4), (ranks, None))),
        "rest": whole._replace(length=ranks * whole.rows(4) + 1, runs=((ranks, 4), (ranks + 1, None))),
        "resized": whole._replace(runs=((ranks, 1), (ranks - 1, 2), (ranks + 1, None))),
    }
    return [Round(1, list(named.items()), init=False)]


def act(sampler: Callable, case: Case, rank: int, world_size: int) -> Note:
    """Play the runs, each from the last one's state; note the next epoch, and one of another seed, too."""
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
    parts["reseeded"] = case._replace(seed=case.seed + 1).made(sampler, ranks, None)
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


def each_once(seen: Seen) -> dict[str, Any]:
    """How much all ranks have trained on in each run, and whether that is every sample once."""
    counts = Counter(index for run in seen["taken"] for shard in run for index in shard)
    return {
        "samples in each run:": [sum(map(len, run)) for run in seen["taken"]],
        "samples repeated:": any(times > 1 for times in counts.values()),
        "samples missing, or strange ones:": counts.keys() != set(range(seen.case.length)),
    }


def shuffled(seen: Seen) -> dict[str, bool]:
    first = seen["taken"][0]
    return {
        "an ascending order:": any(shard == sorted(shard) for shard in first),
        "the same order for another seed:": first == seen["reseeded"],
    }


def resumed(seen: Seen) -> dict[str, bool]:
    joined = [sum(parts, []) for parts in zip(*seen["taken"], strict=True)]
    return {"the order that it would have been without interruption:": joined == seen["whole"]}


def state(seen: Seen) -> dict[str, Any]:
    return {
        "many numbers:": seen["numbers"] > MOST_NUMBERS,
        "the same state on all ranks:": seen["agree"],
        "no dictionary of its own:": seen["trouble"],
    }


def next_epoch(seen: Seen) -> dict[str, bool]:
    return {
        "all samples once:": sorted(sum(seen["later"], [])) == list(range(seen.case.length)),
        "the order of the epoch before:": seen["later"] == seen["whole"],
        "the epoch that was interrupted, begun again by set_epoch, is whole:": seen["again"] == seen["whole"],
    }


MISTAKES = """
begins again | stopped resized | the epoch began again; begin after what was trained on
    state["epoch"], state["consumed"] => state["epoch"], 0
an epoch that has ended begins again | stopped | the epoch began again: nothing is left of it
    order[self.consumed :] => order[self.consumed % self.length :]
counts what the loader asked for | stopped resized state
| what a loader has read ahead was not trained on; count in advance(), not in __iter__
    return iter( => for index in list(
    :: self.world_size]) => :: self.world_size]):
        self.consumed += self.world_size
        yield index
    self.consumed += rows * self.world_size => pass
counts its own rows only | stopped resized
| the position is that in the order of all ranks: each step of every rank moves it by world_size * rows
    rows * self.world_size => rows
a position for this number of ranks | resized
| the position must be counted over all ranks, so that it means the same for another number of them
    rows * self.world_size => rows
    order[self.consumed :] => order[self.consumed * self.world_size :]
the first run is forgotten | resized | the second state forgets the first run: add to the position that was loaded
    "consumed": self.consumed} => "consumed": self.consumed - vars(self).get("base", 0)}
    state["consumed"] => state["consumed"]
    self.base = self.consumed
the epoch is not saved | stopped resized
| after the interruption the order is another one: save the epoch in the state, shuffle by seed and epoch
    = state["epoch"], => = 0,
padding | whole stopped resized next | no padding, nothing dropped: each sample once
    .tolist() => .tolist()
    order += order[: -self.length % self.world_size]
not shuffled | whole next | shuffle as in 05.1, before the ranks take their part
    torch.randperm(self.length, generator=chance).tolist() => list(range(self.length))
one order for all epochs | next | set_epoch has no effect on the order; the shuffle's seed must contain the epoch
    100_003 * self.seed + self.epoch => self.seed
set_epoch keeps the position | next | set_epoch begins a new epoch: the position goes back to 0
    self.epoch, self.consumed = epoch, 0 => self.epoch = epoch
the epoch that runs is not begun again | next | set_epoch begins a whole epoch, also that which was interrupted
    self.epoch, self.consumed = epoch, 0 => if epoch != self.epoch:
        self.epoch, self.consumed = epoch, 0
all that is left, in the state | state
| a list grows with the data set; the epoch and a position say the same
    {"epoch" => {"left": list(range(self.consumed, self.length)), "epoch"
the rank in the state | state
| the state is saved by one rank and loaded by all, so nothing in it may depend on the rank
    {"epoch" => {"rank": self.rank, "epoch"
the state goes on changing | state | return a new dictionary, which nothing changes afterwards
    rows * self.world_size => rows * self.world_size
    self.state_dict()
    return {"epoch": self.epoch, "consumed": self.consumed} => self.kept = vars(self).get("kept", {})
    self.kept.update(epoch=self.epoch, consumed=self.consumed)
    return self.kept
tensors in the state | all | the state is saved as plain data
    "epoch": self.epoch => "epoch": torch.tensor(self.epoch)
the course's own | all | this exercise is to write what it does | tests
    from ddp_course.data.sampler import ShardSampler
    class Resumable(ShardSampler):
        def __init__(self, length, world_size, rank, seed=0):
            super().__init__(length, world_size, rank, seed=seed, streaming=True)
"""

ONCE = "one order for all ranks, each takes every world_size-th entry; a step moves the position by world_size * rows"

RESUME = exercise(
    *("05.4", "Resume where you stopped (stretch)", "Resumable", 25),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case.length} samples, {' then '.join(str(ranks) for ranks, _ in seen.case.runs)} ranks:",
    mistakes=MISTAKES,
    checks={
        "whole": ("an epoch without interruption: each sample once, shuffled", 1, "whole",
                  lambda seen: {**each_once(seen), **shuffled(seen)}, ONCE),
        "stopped": ("an epoch that was interrupted", 2, "stopped ended",
                    lambda seen: {**each_once(seen), **resumed(seen)}, ONCE),
        "resized": ("going on with other numbers of ranks", 2, "resized rest", each_once, ONCE),
        "state": ("a small state, the same on all ranks", 1, "stopped resized", state,
                  "return a new dictionary of a few plain numbers, in which nothing depends on the rank"),
        "next": ("the next epoch is whole, in its own order", 1, "stopped", next_epoch,
                 "set_epoch begins a whole epoch, in the order of seed and epoch"),
    },
    hints={r"not JSON serializable": "the state is saved as plain data: numbers, text, lists and dictionaries"},
    refused=REFUSED,
)  # fmt: skip
