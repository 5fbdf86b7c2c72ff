"""05.1 `MySampler(length, world_size, rank, seed, drop_last)`: do the ranks share every epoch evenly, in a new order?

Any order will do, so a view has what is true of all right ones: equal shards, nothing missing, a new order in each
epoch, one for all ranks. Read next: `evaluate.py`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

Shards = list[list[int]]
REFUSED = (
    *("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.sampler.RandomSampler"),
    "ddp_course.data.sampler.ShardSampler",
)


class Case(NamedTuple):
    """One sampler for each of so many ranks, and the epochs that they deal; None is one again, without a call."""

    length: int
    ranks: int
    seed: int
    epochs: tuple[int | None, ...] = (0,)
    drop_last: bool = False

    @property
    def share(self) -> int:
        """The indices of each rank."""
        return (self.length + (0 if self.drop_last else self.ranks - 1)) // self.ranks


def cases(rng: Random) -> list[Round]:
    """Lengths that the ranks do not divide, fewer samples than ranks, several epochs; on two processes."""
    ranks, seed = rng.choice((3, 4)), rng.randrange(100)
    length = ranks * rng.randint(8, 12) + rng.randint(1, ranks - 1)
    padded = {
        "uneven": Case(length, ranks, 0, (None, 0, 1, None, 5, 0)),  # a product with seed 0 has no epoch in it
        "few": Case(ranks - 1, ranks + 4, seed),
        "even": Case(4 * ranks, ranks, seed, (2,)),
    }
    dropped = {
        "dropped": Case(length, ranks, seed, tuple(range(20)), drop_last=True),
        "divided": Case(4 * ranks, ranks, seed, drop_last=True),
        "scarce": Case(ranks - 1, ranks, seed, drop_last=True),
    }
    return [Round(2, list(some.items()), init=False) for some in (padded, dropped)]


def act(sampler: Callable, case: Case, rank: int, world_size: int) -> Note:
    """Note what the samplers of all ranks deal, what with another seed, and the order of all samples, which one has."""
    epochs, lengths = _dealt(sampler, case)
    others, _ = _dealt(sampler, case._replace(seed=case.seed + 1))
    orders, _ = _dealt(sampler, case._replace(ranks=1, drop_last=False))
    return Note(epochs=epochs, lengths=lengths, others=others, orders=[order for (order,) in orders])


def _dealt(sampler: Callable, case: Case) -> tuple[list[Shards], list[int]]:
    by_rank, lengths = [], []
    for rank in range(case.ranks):
        torch.manual_seed(1000 + rank)  # as in processes of their own, which draw other numbers
        made = sampler(case.length, case.ranks, rank, case.seed, case.drop_last)
        lengths.append(plain(len(made)))
        mine = []
        for epoch in case.epochs:
            if epoch is not None:
                made.set_epoch(epoch)
            next(iter(made), None)  # somebody who breaks off
            mine.append(indices(made, 10 * case.length + 10))
        by_rank.append(mine)
    return [list(shards) for shards in zip(*by_rank, strict=True)], lengths


def indices(sampler: Iterable, most: int) -> list:
    """Return what a sampler yields, as ints where it is whole numbers of any kind: Python's, NumPy's, tensors."""
    return [_index(item) for item in islice(iter(sampler), most)]


def _index(item: object) -> object:
    try:
        return operator.index(item)
    except TypeError:
        return plain(item)


def even(seen: Seen) -> dict[str, Any]:
    sizes = [[len(shard) for shard in shards] for shards in seen["epochs"]]
    return {"indices of each rank": sizes, "len()": seen["lengths"]}


def whole(seen: Seen) -> dict[str, Any]:
    """Whether samples are missing or come too often, and whether what is dealt begins the one order, begun again."""
    case, epochs = seen.case, seen["epochs"]
    total = case.share * case.ranks
    counted = [Counter(sum(shards, [])) for shards in epochs]
    orders = [Counter(islice(cycle(order), total)) for order in seen["orders"]]
    repeated = [frozenset(i for i, n in counts.items() if n > 1) for counts in counted]
    most = max(1, -(-total // case.length))
    return {
        "no indices:": sorted({repr(i) for counts in counted for i in counts} - set(map(repr, range(case.length)))),
        "missing samples": 0 if case.drop_last else [case.length - len(counts) for counts in counted],
        "the most times that a sample comes": max(most, *(max(counts.values(), default=0) for counts in counted)),
        "always the same samples repeated:": moves(seen) and any(repeated) and len(set(repeated)) == 1,
        "never dealt:": moves(seen) and case.length > len(set().union(*counted)),
        "another order than that of a single rank:": moves(seen)
        and any(dealt.total() == total and dealt != order for dealt, order in zip(counted, orders, strict=True)),
    }  # fmt: skip


def moves(seen: Seen) -> bool:
    """Whether samples come to other ranks in another epoch; if not, that is another check's affair."""
    first, *others = seen["epochs"]
    return any(sorted(a) != sorted(b) for later in others for a, b in zip(first, later, strict=True))


def own_order(seen: Seen) -> dict[str, bool]:
    fresh, zero, one, again, five, back = seen["epochs"]
    return {
        "an ascending order:": all(any(shard == sorted(shard) for shard in shards) for shards in (zero, one)),
        "the same order for different epochs:": zero == one or one == five,
        "before the first call another order than in epoch 0:": fresh != zero,
        "different orders for the same epoch:": one != again or zero != back,
        "samples move from rank to rank:": moves(seen),
        "two processes deal the same:": seen["epochs"] == seen.of(0)["epochs"],
    }


def seeded(seen: Seen) -> dict[str, bool]:
    return {"the same order for another seed:": any(map(operator.eq, seen["epochs"], seen["others"]))}


MISTAKES = """
len of the dataset | even few drop
| a DataLoader asks len() for its number of steps; return what __iter__ yields, with drop_last too
    def __len__(self): => def __len__(self):
        return self.length

    def share(self):
    len(self) => self.share()
no padding | even few
| some ranks have a sample more, so a step more, and the others would wait for them; pad the order first
    while len(order) < total => while False
always drops | even all few | the rest is dropped, but drop_last is False; repeat the first samples
    if self.drop_last => if True
padded before the shuffle | all drop
| the order is padded or cut off before it is shuffled; shuffle all samples, then repeat the first of that order
    torch.randperm(self.length => torch.randperm(len(self) * self.world_size
    total = => order = [index % self.length for index in order]
    total =
the end of the order comes twice | all drop
| padding repeats, or drop_last leaves out, another part of the order than the text says
    order += order[: total - len(order)] => order = order[len(order) - total :] + order
    order[self.rank : total => order[len(order) - total :][self.rank :
everything on every rank | even all few drop
| every rank gets everything; take every world_size-th entry, beginning with the rank's own
    order[self.rank : total : self.world_size] => order
the rank is not used | all few drop | all ranks deal the same samples: the rank is not used
    order[self.rank : => order[0 :
a seed for each rank | all few drop
| the ranks' shards overlap, so each rank has another order: use the same seed on all ranks
    + self.epoch => + self.epoch + 31 * self.rank
the process's own generator | all epochs seed few drop
| what a process draws is its own: shuffle with a generator of your own, whose seed is the same on all ranks
    , generator=chance =>
not shuffled | epochs seed | shuffle the indices, with torch.randperm for instance
    torch.randperm(self.length, generator=chance).tolist() => list(range(self.length))
shuffled within the shard | epochs | each rank shuffles within its own shard; shuffle all samples first, then deal
    torch.randperm(self.length, generator=chance).tolist() => list(range(self.length))
    return iter(order[self.rank : total : self.world_size]) => mine = order[self.rank : total : self.world_size]
    return iter([mine[i] for i in torch.randperm(len(mine), generator=chance).tolist()])
set_epoch without effect | epochs | set_epoch has no effect on the order; the shuffle's seed must contain the epoch
    self.epoch = epoch => pass
one generator for all epochs | epochs
| the order must follow from seed and epoch alone; make a new generator in each __iter__
    drop_last, 0 => drop_last, 0
    self.chance = torch.Generator().manual_seed(seed)
    chance = torch.Generator().manual_seed(100_003 * self.seed + self.epoch) => pass
    generator=chance => generator=self.chance
the seed of epoch 0 alone | seed | the shuffle does not use the seed in each epoch
    100_003 * self.seed + self.epoch => self.epoch or 100_003 * self.seed
never drops | drop | with drop_last the end of the order is left out, so that no sample is repeated
    if self.drop_last => if False
a rest of none is dropped | drop | the ranks divide the length here: there is nothing to repeat or to drop
    return iter(order => order = order[: -(self.length % self.world_size)] if self.drop_last else order
    return iter(order
padded once only | few | repeat the order again and again, until the ranks share evenly
    while len(order) < total => if len(order) < total
torch's own | all | this exercise is to write what it does | tests
    class MySampler(torch.utils.data.DistributedSampler):
        def __init__(self, length, world_size, rank, seed=0, drop_last=False):
            super().__init__(range(length), world_size, rank, seed=seed, drop_last=drop_last)
the course's own | all | this exercise is to write what it does | tests
    from ddp_course.data.sampler import ShardSampler
    class MySampler(ShardSampler):
        def __init__(self, length, world_size, rank, seed=0, drop_last=False):
            super().__init__(length, world_size, rank, seed=seed)
never ends | all | an endless loop | hangs
    total = => while True:
        pass
    total =
"""

SHARE = "repeat samples from the beginning of the order, again and again if need be, until the ranks share evenly"
ORDER = "shuffle all samples, repeat the first of that order, or leave out its end, then let the ranks take their parts"

DEAL = exercise(
    *("05.1", "A sampler with padding and epochs", "MySampler", 25),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case.length} samples, {seen.case.ranks} ranks{', drop_last' * seen.case.drop_last}:",
    mistakes=MISTAKES,
    checks={
        "even": ("all ranks get equally many", 1, "uneven even", even, SHARE),
        "all": ("no sample is missing", 2, "uneven even", whole, ORDER),
        "epochs": ("each epoch has its own order", 2, "uneven", own_order,
                   "the order follows from seed and epoch, at first 0, alone: give a torch.Generator a seed of both; "
                   "the hash() of a text is a process's own"),
        "seed": ("another seed, another order", 1, "uneven", seeded, "the shuffle does not use the seed in each epoch"),
        "few": ("fewer samples than ranks", 1, "few", lambda seen: {**even(seen), **whole(seen)}, SHARE),
        "drop": ("drop_last", 1, "dropped divided scarce", lambda seen: {**even(seen), **whole(seen)}, ORDER),
    },
    refused=REFUSED,
)  # fmt: skip
