"""13.2 `compare_ranks(...)`: does a check find each sample that is read twice, and each parameter that differs?

A sum does not see values that are exchanged, and a tolerance does not see the last bit, so there are both.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen

SHAPES = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}
Weights = dict[str, torch.Tensor]


def cases(rng: Random) -> list[Round]:
    """Nothing wrong; then samples that are read twice; then weights that differ. Of each rank numbers and weights."""
    ranks = rng.choice((3, 4))
    numbers = [[rank + ranks * n for n in range(rng.randint(2, 5))] for rank in range(ranks)]
    for of_rank in numbers:
        rng.shuffle(of_rank)
    generator = torch.Generator().manual_seed(rng.randint(1, 1000))
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def copies() -> list[Weights]:
        return [{name: value.clone() for name, value in weights.items()} for _ in range(ranks)]

    twice = [list(of_rank) for of_rank in numbers]
    twice[-1].append(numbers[0][0])  # on two ranks
    twice[1].append(numbers[1][0])  # twice on one
    apart, (exchanged, last_bit) = copies(), rng.sample(list(SHAPES), 2)
    apart[-1][exchanged] = weights[exchanged].flip(0)
    apart[1][last_bit].view(-1)[0] = torch.nextafter(weights[last_bit].view(-1)[0], torch.tensor(torch.inf))
    named = {"same": (numbers, copies()), "twice": (twice, copies()), "apart": (numbers, apart)}
    return [Round(ranks, list(named.items()))]


def act(function, case: tuple, rank: int, world_size: int) -> Any:
    numbers, weights = case
    return function(rank, world_size, numbers[rank], weights[rank])


def view(*which: int) -> Callable[[Seen], dict[str, list]]:
    """A view of one of the two lists, or of both."""

    def looked(seen: Seen) -> dict[str, list]:
        pair = dict(zip(("samples read twice:", "parameters that differ:"), seen["value"], strict=True))
        return {what: list(found) for n, (what, found) in enumerate(pair.items()) if n in which}

    return looked


MISTAKES = """
a sum of the values | apart
| a sum stays as it was where values are exchanged, and may lose the last bit: compare the values
    torch.equal(first[name], each[name]) => abs(first[name].sum() - each[name].sum()) < 1e-5
a tolerance | apart | equal means equal bit by bit: replicas make the same step
    torch.equal => torch.allclose
each rank with rank 0 only | apart | all ranks must return the same: gather, and compare all of them
    for _, each in everyone) => for each in [weights])
names in another order | apart | names in the order of the dictionary
    return repeated, apart => return repeated, sorted(apart, key=list(first).index, reverse=True)
a sample counts once a rank | twice | look for a sample that one rank reads twice, too
    for number in numbers) => for number in set(numbers))
its own samples alone | twice | a sample may be read by two ranks: gather the numbers of all
    for numbers, _ in everyone => for numbers in [numbers]
each number as often as it is read again | twice | each number once, in ascending order
    sorted(number for number in times if times[number] > 1) => sorted((times - Counter(set(times))).elements())[::-1]
nothing is ever wrong | twice apart | gather the numbers of all, and compare the values of all
    return repeated, apart => return [], []
names alone | all | return two lists on every rank: of numbers, and of names
    return repeated, apart => return apart
a mean of the values | apart | a sum stays as it was where values are exchanged | tests
    def compare_ranks(rank, world_size, numbers, weights):
        apart, lists = [], [None] * world_size
        for name, value in weights.items():
            mean = value.mean()
            dist.all_reduce(mean)
            if abs(mean / world_size - value.mean()) > 1e-6:
                apart.append(name)
        dist.all_gather_object(lists, numbers)
        return sorted(n for n, times in Counter(sum(lists, [])).items() if times > 1), apart
every rank for itself | twice apart | gather the numbers of all, and compare the values of all | tests
    def compare_ranks(rank, world_size, numbers, weights):
        return [number for number in set(numbers) if numbers.count(number) > 1], []
"""

RIGHT = """
smallest and largest of each value
    def compare_ranks(rank, world_size, numbers, weights):
        apart, lists = [], [None] * world_size
        for name, value in weights.items():
            low, high = value.clone(), value.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            if not torch.equal(low, high):
                apart.append(name)
        dist.all_gather_object(lists, numbers)
        return sorted(n for n, times in Counter(sum(lists, [])).items() if times > 1), apart
"""

TWO = (
    "gather the numbers of all, and compare the values of all; return two lists on every rank: of numbers, and of names"
)

COMPARING = exercise(
    *("13.2", "Write the check", "compare_ranks", 25),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "same": ("nothing is found where nothing is wrong", 1, "same", view(0, 1), TWO),
        "twice": ("samples that are read twice, on one rank or on two", 2, "twice", view(0), TWO),
        "apart": ("parameters that differ, in a bit or in their order", 2, "apart", view(1), TWO),
    },
    hints={"sizes": "ranks have different numbers of samples: all_gather_object takes lists of any length"},
)
