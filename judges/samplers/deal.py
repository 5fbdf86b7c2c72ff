"""05.1 `MySampler(length, world_size, rank, seed, drop_last)`: do the ranks share every epoch evenly, in a new order?

Judged by properties, so any order will do: equal shards, nothing missing, a new order in each epoch, one for all ranks.
Read next: `evaluate.py`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import alike, all_of, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen

Shards = list[list[int]]
REFUSED = (
    *("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.sampler.RandomSampler"),
    *("ddp_course.data.sampler.ShardSampler", "ddp_course.data.sampler.exact_shard"),
)


@dataclass(frozen=True)
class Case:
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


def act(sampler: Callable, case: Case, rank: int, world_size: int) -> Note:
    """Note what the samplers of all ranks deal, what with another seed, and the order of all samples, which one has."""
    epochs, lengths = _dealt(sampler, case)
    others, _ = _dealt(sampler, replace(case, seed=case.seed + 1))
    orders, _ = _dealt(sampler, replace(case, ranks=1, drop_last=False))
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


def rounds(rng: Random) -> list[Round]:
    """Lengths that the ranks do not divide, fewer samples than ranks, several epochs."""
    ranks, seed = rng.choice((3, 4)), rng.randrange(100)
    length = ranks * rng.randint(8, 12) + rng.randint(1, ranks - 1)
    cases = {
        "uneven": Case(length, ranks, 0, (None, 0, 1, None, 5, 0)),  # a product with seed 0 has no epoch in it
        "few": Case(ranks - 1, ranks + 4, seed),
        "even": Case(4 * ranks, ranks, seed, (2,)),
    }
    dropped = {
        "dropped": Case(length, ranks, seed, tuple(range(20)), drop_last=True),
        "divided": Case(4 * ranks, ranks, seed, drop_last=True),
        "scarce": Case(ranks - 1, ranks, seed, drop_last=True),
    }
    # Two processes that know nothing of each other.
    return [Round(2, list(some.items()), init=False) for some in (cases, dropped)]


def sound(seen: Seen) -> Fault | None:
    """The iterators end, and yield indices."""
    length, shards = seen.case.length, [shard for shards in seen["epochs"] for shard in shards]
    strange = [repr(i) for shard in shards for i in shard if not isinstance(i, int) or not 0 <= i < length]
    mistakes = {
        "the iterator never ends": max(map(len, shards)) > 10 * length and "no end",
        "indices count from 0 to length - 1; padding repeats samples, it does not invent them": strange and strange[0],
    }
    return first_mistake(f"about {seen.case.share} whole numbers from 0 to {length - 1} on each rank", mistakes)


def even(seen: Seen) -> Fault | None:
    """All ranks get equally many, and say so."""
    case, share, lengths = seen.case, seen.case.share, seen["lengths"]
    on = f"on each of {case.ranks} ranks, for {case.length} samples{', with drop_last' * case.drop_last}"
    for sizes in ([len(shard) for shard in shards] for shards in seen["epochs"]):
        if set(sizes) != {share}:
            return Fault(f"{share} indices {on}", f"{sizes}", cause=_size_cause(sizes, case))
    cause = "a DataLoader asks len() for its number of steps; return what __iter__ yields, with drop_last too"
    return first_mistake(f"len() of {share} {on}", {cause: lengths != [share] * case.ranks and lengths})


def _size_cause(sizes: list[int], case: Case) -> str:
    if case.length % case.ranks == 0:
        return "the ranks divide the length here: there is nothing to repeat or to drop"
    if case.drop_last:
        return "with drop_last the end of the order is left out, so that no sample is repeated"
    if set(sizes) == {case.length}:
        return "every rank gets everything; take every world_size-th entry, beginning with the rank's own"
    if set(sizes) == {case.length // case.ranks}:
        return "the rest is dropped, but drop_last is False; repeat the first samples until the ranks share evenly"
    if max(sizes) - min(sizes) == 1 and sum(sizes) == case.length:
        return "some ranks have a sample more, so a step more, and the others would wait for them; pad the order first"
    return "repeat samples from the beginning of the order, again and again if need be, until the ranks share evenly"


def whole(seen: Seen) -> Fault | None:
    """No sample is missing, none comes too often, and padding repeats different ones in different epochs."""
    length, epochs = seen.case.length, seen["epochs"]
    most = -(-seen.case.share * seen.case.ranks // length)
    counted = [Counter(sum(shards, [])) for shards in epochs]
    for counts, shards in zip(counted, epochs, strict=True):
        if missing := length - len(counts):
            return Fault(f"each of {length} samples at least once", f"{missing} missing", cause=_overlap(shards))
        if max(counts.values()) > most:
            often = f"a sample that comes {max(counts.values())} times"
            cause = "either the ranks have different orders, or padding repeats one sample only, not the next ones too"
            return Fault(f"no sample more than {most} time{'s' * (most > 1)}", often, cause=cause)
    first, *others = [sorted(i for i, n in counts.items() if n > 1) for counts in counted]
    always = _moves(epochs) and first and others == [first] * len(others) and f"always {first}"
    cause = "the order is padded before it is shuffled; shuffle all samples, then repeat the first of that order"
    return first_mistake("different samples repeated in different epochs", {cause: always}) or from_the_beginning(seen)


def from_the_beginning(seen: Seen) -> Fault | None:
    """What is dealt is the beginning of the one order, which is repeated where it is too short."""
    total = seen.case.share * seen.case.ranks
    for shards, order in zip(seen["epochs"], seen["orders"], strict=True):
        dealt = Counter(sum(shards, []))
        if _moves(seen["epochs"]) and dealt.total() == total and dealt != Counter(islice(cycle(order), total)):
            cause = "either padding repeats, or drop_last leaves out, another part of the order than the text says, "
            cause += "or there is another order for another number of ranks"
            expected = f"the first {total} of the order that a single rank has, {short(order)}, begun again at its end"
            return Fault(expected, "others", cause=cause)
    return None


def _moves(epochs: list[Shards]) -> bool:
    """Whether samples come to other ranks in another epoch; if not, that is another check's affair."""
    return any(sorted(a) != sorted(b) for later in epochs for a, b in zip(epochs[0], later, strict=True))


def _overlap(shards: Shards) -> str:
    if all(shard == shards[0] for shard in shards):
        return "all ranks deal the same samples: the rank is not used"
    cause = (
        "the ranks' shards overlap, so each rank has another order: shuffle with a generator of your own, whose seed "
    )
    return cause + "is the same on all ranks"


def own_order(seen: Seen) -> Fault | None:
    """Each epoch has an order of its own, which follows from its number."""
    fresh, zero, one, again, five, back = seen["epochs"]
    ascending = all(any(shard == sorted(shard) for shard in shards) for shards in (zero, one))
    mistakes = {
        "shuffle the indices, with torch.randperm for instance": ascending and "an ascending order",
        "set_epoch has no effect on the order; the shuffle's seed must contain the epoch":
            (zero == one or one == five) and "the same order for different epochs",
        "before the first call of set_epoch the epoch is 0": fresh != zero and "another order than in epoch 0",
        "the order must follow from seed and epoch alone; make a new generator in each __iter__":
            (one != again or zero != back) and "different orders for the same epoch",
        "each rank shuffles within its own shard; shuffle all samples first, then deal":
            not _moves(seen["epochs"]) and "the same samples on each rank in each epoch",
    }  # fmt: skip
    return first_mistake("an order for each epoch, in which samples move from rank to rank", mistakes)


def seeded(seen: Seen) -> Fault | None:
    """Another seed, another order."""
    same = any(map(operator.eq, seen["epochs"], seen["others"])) and "the same order"
    return first_mistake("another order for another seed", {"the shuffle does not use the seed in each epoch": same})


def dropped(seen: Seen) -> Fault | None:
    """With drop_last no sample comes twice, and none is left out for ever."""
    for shards in seen["epochs"]:
        if repeated := sum(map(len, shards)) - len(set(sum(shards, []))):
            return Fault("no sample twice with drop_last", f"{repeated} repeated", cause=_overlap(shards))
    never = set(range(seen.case.length)) - {i for shards in seen["epochs"] for shard in shards for i in shard}
    cause = "the samples are cut off before the shuffle; shuffle all of them, then leave out the end of the order"
    expected = f"every sample in some of {len(seen['epochs'])} epochs"
    always = _moves(seen["epochs"]) and never and f"never {sorted(never)}"
    return first_mistake(expected, {cause: always}) or from_the_beginning(seen)


anywhere = alike(
    "two processes deal different orders for the same seed and epoch: what a process draws, and the hash() of a text, "
    "are its own; take a torch.Generator with a seed",
    of="epochs",
)
DEAL = exercise(
    "05.1",
    "A sampler with padding and epochs",
    "MySampler",
    25,
    act=act,
    rounds=rounds,
    checks={
        "even": ("all ranks get equally many", 1, all_of(sound, even), "uneven even"),
        "all": ("no sample is missing", 2, all_of(sound, whole), "uneven even"),
        "epochs": ("each epoch has its own order", 2, all_of(own_order, anywhere), "uneven"),
        "seed": ("another seed, another order", 1, seeded, "uneven"),
        "few": ("fewer samples than ranks", 1, all_of(sound, even, whole), "few"),
        "drop": ("drop_last", 1, all_of(sound, even, dropped), "dropped divided scarce"),
    },
    refused=REFUSED,
)
