"""05.1 `MySampler(length, world_size, rank, seed, drop_last)`: do the ranks share every epoch evenly, in a new order?

Judged by properties, so any order will do: equal shards, nothing missing, a new order in each epoch, one for all ranks.
Read next: `evaluate.py`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

Shards = list[list[int]]
REFUSED = (
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.sampler.RandomSampler",
    "ddp_course.data.sampler.ShardSampler",
    "ddp_course.data.sampler.exact_shard",
)


def deal_driver(rank: int, world_size: int, sampler: Callable, cases: list[dict]) -> list[dict]:
    """Make the samplers of all ranks for each case, and let them deal some epochs."""
    return [_dealt(sampler, **case) for case in cases]


def _dealt(sampler: Callable, length: int, ranks: int, seed: int, drop_last: bool, epochs: list[int | None]) -> dict:
    shards: list[list] = []
    lengths = []
    for rank in range(ranks):
        torch.manual_seed(1000 + rank)  # as in processes of their own, which draw other numbers
        made = sampler(length, ranks, rank, seed, drop_last)
        mine = []
        for epoch in epochs:
            if epoch is not None:  # None: the same epoch once more, without another call
                made.set_epoch(epoch)
            mine.append([index_of(item) for item in islice(iter(made), 10 * length + 10)])
        shards.append(mine)
        lengths.append(plain(len(made)))
    return {"epochs": [list(shard) for shard in zip(*shards, strict=True)], "lengths": lengths}


def index_of(item: object) -> object:
    """Return what a sampler yields as an int if it is a whole number of any kind: Python's, NumPy's, a tensor."""
    try:
        return operator.index(item)
    except TypeError:
        return plain(item)


def deal_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Lengths that the ranks do not divide, fewer samples than ranks, several epochs, another seed."""
    ranks, seed = rng.choice((3, 4)), rng.randrange(100)
    length = ranks * rng.randint(8, 12) + rng.randint(1, ranks - 1)
    case = {"length": length, "ranks": ranks, "seed": seed, "drop_last": False, "epochs": [0, 1, None, 5, 0]}
    cases = [
        case,
        {**case, "drop_last": True, "epochs": list(range(20))},
        {**case, "length": ranks - 1, "ranks": ranks + 4, "epochs": [0]},
        {**case, "length": 4 * ranks, "epochs": [2]},
        {**case, "seed": seed + 1, "epochs": [0]},
    ]
    plain_case, dropped, few, even, other = answer.run(deal_driver, 1, cases)[0]
    yield "even", next(filter(None, (_even_fault(c, n) for c, n in ((case, plain_case), (cases[3], even)))), None)
    yield "all", next(filter(None, (_all_fault(c, n) for c, n in ((case, plain_case), (cases[3], even)))), None)
    yield "epochs", _epochs_fault(plain_case["epochs"])
    yield "seed", _seed_fault(plain_case["epochs"][0], other["epochs"][0])
    yield "few", _even_fault(cases[2], few) or _all_fault(cases[2], few)
    yield "drop", _drop_fault(cases[1], dropped)


def _shape_fault(case: dict, shards: Shards) -> Fault | None:
    length = case["length"]
    for rank, shard in enumerate(shards):
        if len(shard) > 10 * length:
            return Fault(f"about {length // case['ranks']} indices", "no end", rank, "the iterator never ends")
        strange = [i for i in shard if not isinstance(i, int) or not 0 <= i < length]
        if strange:
            cause = "indices count from 0 to length - 1; padding repeats samples, it does not invent them"
            return Fault(f"whole numbers from 0 to {length - 1}", repr(strange[0]), rank, cause)
    return None


def _even_fault(case: dict, note: dict) -> Fault | None:
    share = -(-case["length"] // case["ranks"])
    expected = f"{share} indices on each of {case['ranks']} ranks, for {case['length']} samples"
    for shards in note["epochs"]:
        if fault := _shape_fault(case, shards):
            return fault
        sizes = [len(shard) for shard in shards]
        if set(sizes) != {share}:
            return Fault(expected, f"{sizes}", cause=_size_cause(sizes, case))
    if note["lengths"] != [share] * case["ranks"]:
        cause = "a DataLoader asks len() for its number of steps; return what __iter__ yields"
        return Fault(f"len() of {share} on each rank", repr(note["lengths"]), cause=cause)
    return None


def _size_cause(sizes: list[int], case: dict) -> str:
    length, ranks = case["length"], case["ranks"]
    if length % ranks == 0:
        return "the ranks divide the length here: there is nothing to repeat or to drop"
    if set(sizes) == {length}:
        return "every rank gets everything; take every world_size-th entry, beginning with the rank's own"
    if set(sizes) == {length // ranks}:
        return "the rest is dropped, but drop_last is False; repeat the first samples until the ranks share evenly"
    if max(sizes) - min(sizes) == 1 and sum(sizes) == length:
        return "some ranks have a sample more, so a step more, and the others would wait for them; pad the order first"
    return "repeat samples from the beginning of the order, again and again if need be, until the ranks share evenly"


def _all_fault(case: dict, note: dict) -> Fault | None:
    length, ranks = case["length"], case["ranks"]
    for shards in note["epochs"]:
        if fault := _shape_fault(case, shards):
            return fault
        counts = Counter(index for shard in shards for index in shard)
        missing = [index for index in range(length) if not counts[index]]
        if missing:
            return Fault(f"each of {length} samples at least once", f"{len(missing)} missing", cause=_overlap(shards))
        most = -(-(-(-length // ranks) * ranks) // length)
        if max(counts.values()) > most:
            often = f"a sample that comes {max(counts.values())} times"
            cause = "either the ranks have different orders, or padding repeats one sample only, not the next ones too"
            return Fault(f"no sample more than {most} time{'s' * (most > 1)}", often, cause=cause)
    repeated = {frozenset(i for i, n in Counter(sum(shards, [])).items() if n > 1) for shards in note["epochs"]}
    if _moves(note["epochs"]) and repeated != {frozenset()} and len(repeated) == 1:
        cause = "the order is padded before it is shuffled; shuffle all samples, then repeat the first of that order"
        return Fault("other samples repeated in other epochs", f"always {sorted(*repeated)}", cause=cause)
    return None


def _moves(epochs: list[Shards]) -> bool:
    """Whether samples come to other ranks in the second epoch; if not, that is another check's affair."""
    return len(epochs) > 1 and any(sorted(a) != sorted(b) for a, b in zip(epochs[0], epochs[1], strict=True))


def _overlap(shards: Shards) -> str:
    if all(shard == shards[0] for shard in shards):
        return "all ranks deal the same samples: the rank is not used"
    return (
        "the ranks' shards overlap, so each rank has another order: shuffle with a generator of your own, whose seed "
        "is the same on all ranks"
    )


def _epochs_fault(epochs: list[Shards]) -> Fault | None:
    zero, one, again, five, back = epochs
    if any(shard == sorted(shard) for shard in zero) and any(shard == sorted(shard) for shard in one):
        cause = "shuffle the indices, with torch.randperm for instance"
        return Fault("a shuffled order", "an ascending one", cause=cause)
    if zero == one or one == five:
        cause = "set_epoch has no effect on the order; the shuffle's seed must contain the epoch"
        return Fault("another order in each epoch", "the same order", cause=cause)
    if one != again or zero != back:
        cause = "the order must follow from seed and epoch alone; make the generator anew in each __iter__"
        return Fault("the same order for the same epoch", "another order", cause=cause)
    if all(sorted(a) == sorted(b) for a, b in zip(zero, one, strict=True)):
        cause = "each rank shuffles within its own shard; shuffle all samples first, then deal"
        return Fault("samples that move from rank to rank between epochs", "the same samples on each rank", cause=cause)
    return None


def _seed_fault(ours: Shards, theirs: Shards) -> Fault | None:
    if ours != theirs:
        return None
    return Fault(
        "another order for another seed", "the same order", cause="the shuffle of epoch 0 does not use the seed"
    )


def _drop_fault(case: dict, note: dict) -> Fault | None:
    share = case["length"] // case["ranks"]
    for shards in note["epochs"]:
        if fault := _shape_fault(case, shards):
            return fault
        sizes = [len(shard) for shard in shards]
        if set(sizes) != {share}:
            cause = "with drop_last the end of the order is left out, so that no sample is repeated"
            return Fault(f"{share} indices on each rank with drop_last", repr(sizes), cause=cause)
        repeated = sum(sizes) - len({index for shard in shards for index in shard})
        if repeated:
            return Fault("no sample twice with drop_last", f"{repeated} repeated", cause=_overlap(shards))
    never = set(range(case["length"])) - {index for shards in note["epochs"] for shard in shards for index in shard}
    if never and _moves(note["epochs"]):
        cause = "the samples are cut off before the shuffle; shuffle all of them, then leave out the end of the order"
        return Fault(f"every sample in some of {len(note['epochs'])} epochs", f"never {sorted(never)}", cause=cause)
    if note["lengths"] != [share] * case["ranks"]:
        return Fault(f"len() of {share}", repr(note["lengths"]), cause="len() must follow drop_last, too")
    return None


DEAL = Exercise(
    "05.1",
    "A sampler with padding and epochs",
    "MySampler",
    25,
    (
        Check("even", "all ranks get equally many", 1),
        Check("all", "no sample is missing", 2),
        Check("epochs", "each epoch has its own order", 2),
        Check("seed", "another seed, another order", 1),
        Check("few", "fewer samples than ranks", 1),
        Check("drop", "drop_last", 1),
    ),
    deal_judge,
    refused=REFUSED,
)
