"""05.3 `MyWeightedSampler(weights, length, world_size, rank, seed)`: do the ranks share one weighted draw?

The draw is that of one process, so what is compared is how often all ranks together draw each sample; which rank takes
which entries is free. Read next: `judges/ddp_from_scratch/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.samplers.deal import REFUSED, indices


class Case(NamedTuple):
    """A draw of so many indices in each of these epochs; None is one again, without a call."""

    weights: list[float]
    length: int
    ranks: int
    seed: int
    epochs: tuple[int | None, ...] = (None,)


def cases(rng: Random) -> list[Round]:
    """Lengths that the ranks divide or don't, more than there are samples; one sample is never drawn, one often."""
    weights = [rng.choice((0.25, 0.4, 0.7, 1.3, 2.6)) for _ in range(rng.randint(8, 12))]
    never, often = rng.sample(range(len(weights)), 2)
    weights[never], weights[often] = 0, 8.5
    ranks, seed = rng.choice((3, 4)), rng.randint(10, 90)
    uneven = Case(weights, ranks * rng.randint(6, 8) + rng.randint(1, ranks - 1), ranks, seed)
    named = {
        "uneven": uneven,
        "even": Case(weights[::-1], 2 * rng.randint(7, 9), 2, seed + 1),
        "epochs": uneven._replace(seed=seed + 100, epochs=(None, 0, 1, None, 5, 0)),
    }
    return [Round(1, list(named.items()), init=False)]


def act(sampler: Callable, case: Case, rank: int, world_size: int) -> Note:
    """Note what the samplers of all ranks yield, and whether this has changed what else a process draws."""
    by_rank, lengths, moved = [], [], False
    for number in range(case.ranks):
        torch.manual_seed(1000 + number)  # as in processes of their own, which draw other numbers
        before, mine = torch.get_rng_state(), []
        made = sampler(case.weights, case.length, case.ranks, number, case.seed)
        lengths.append(plain(len(made)))
        for epoch in case.epochs:
            if mine:
                next(iter(made), None)  # somebody who breaks off
            if epoch is not None:
                made.set_epoch(epoch)
            mine.append(indices(made, 10 * case.length))
        by_rank.append(mine)
        moved = moved or not torch.equal(before, torch.get_rng_state())
    return Note(epochs=[list(shards) for shards in zip(*by_rank, strict=True)], lengths=lengths, moved=moved)


def drawn(seen: Seen, iteration: int = 0) -> dict[str, Any]:
    """How often all ranks together have drawn each sample."""
    counts = Counter(sum(seen["epochs"][iteration], []))
    times = {f"draws of sample {index}:": counts.pop(index, 0) for index in range(len(seen.case.weights))}
    return {**times, "no indices:": sorted(map(repr, counts))}


def share(seen: Seen) -> dict[str, Any]:
    return {"indices of each rank:": [len(shard) for shard in seen["epochs"][0]], "len():": seen["lengths"]}


def epochs(seen: Seen) -> dict[str, dict]:
    called = ["no set_epoch" if epoch is None else f"set_epoch({epoch})" for epoch in seen.case.epochs]
    return {", ".join(called[: n + 1]) + ":": drawn(seen, n) for n in range(len(called))}


MISTAKES = """
a generator for each rank | draw epochs
| each rank has a draw of its own: all of them need the same seed, seed + epoch, without the rank
    self.seed + self.epoch => self.seed + self.epoch + self.rank
the process's own generator | draw epochs alone
| what a process draws is its own: give torch.multinomial a generator, whose seed is the same on all ranks
    , generator=generator =>
the whole draw on every rank | draw share epochs
| every rank takes the whole draw; take every world_size-th entry, beginning with the rank's own
    [self.rank : total : self.world_size] =>
the rank's samples alone | draw epochs
| each rank draws among its own samples only, by weights that it has sliced: draw among all, then slice the draw
    self.weights, self.length => self.weights[self.rank :: self.world_size], len(self)
    self.rank : total : self.world_size].tolist() => :].mul(self.world_size).add(self.rank).tolist()
another seed | draw epochs | the generator's seed is seed + epoch, as in DistributedSampler
    self.seed + self.epoch => 100_003 * self.seed + self.epoch
weights taken for scores | draw epochs | weights are no scores: no softmax; twice the weight is drawn twice as often
    self.weights, self.length => self.weights.softmax(0), self.length
no epoch in the seed | epochs | every epoch has the same draw: the generator's seed must contain the epoch
    self.seed + self.epoch => self.seed
one generator for all epochs | epochs
| a generator that is made once goes on from the last draw, also from one that was broken off: make it in __iter__
    self.seed, self.epoch = seed, 0 => self.seed, self.epoch = seed, 0
    self.generator = torch.Generator().manual_seed(seed)
    generator = torch.Generator().manual_seed(self.seed + self.epoch) => generator = self.generator
the process is seeded | alone
| torch.manual_seed changes what else the process draws: dropout would repeat in each epoch, alike on all ranks
    torch.Generator().manual_seed => torch.manual_seed
shares of unequal length | draw share epochs
| some ranks have an index more, so a step more, and the others would wait for them: leave out the end of the draw
    total = len(self) * self.world_size => total = self.length
len of the whole draw | share | a DataLoader asks len() for its number of steps: return what this rank yields
    total = len(self) * self.world_size => total = self.length // self.world_size * self.world_size
    return self.length // self.world_size => return self.length
each sample once | all | with replacement: a sample of great weight comes several times
    replacement=True => replacement=False
torch's own | all | this exercise is to write what it does | tests
    class MyWeightedSampler(torch.utils.data.DistributedSampler):
        def __init__(self, weights, length, world_size, rank, seed=0):
            super().__init__(range(length), world_size, rank, seed=seed, drop_last=True)
"""

RIGHT = """
torch's sampler of one process, a block of its order for each rank
    torch.multinomial(self.weights, self.length, replacement=True, generator=generator) => list(
        torch.utils.data.WeightedRandomSampler(self.weights, self.length, generator=generator))
    return iter(drawn[self.rank : total : self.world_size].tolist()) => first = self.rank * len(self)
    yield from drawn[first : first + len(self)]
"""

DRAW = "a generator with the seed seed + epoch, the same on all ranks, draws for all of them; then each takes its share"

WEIGHTED = exercise(
    *("05.3", "A weighted sampler for all ranks", "MyWeightedSampler", 20),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case.length} draws of {len(seen.case.weights)} samples on {seen.case.ranks} ranks:",
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "draw": ("together the ranks have the draw of one process", 2, "uneven even", drawn, DRAW),
        "share": ("all ranks get equally many", 1, "uneven even", share,
                  "each rank yields length // world_size indices, and its len() says so"),
        "epochs": ("each epoch has its own draw, the same each time", 2, "epochs", epochs, DRAW),
        "alone": ("what else the process draws is left alone", 1, "uneven epochs", lambda seen: {
                  "torch's global generator is used or seeded:": seen["moved"]}, "take a torch.Generator of your own"),
    },
    hints={r"without replacement": "with replacement: a sample of great weight comes several times in a draw"},
    refused=REFUSED,
)  # fmt: skip
