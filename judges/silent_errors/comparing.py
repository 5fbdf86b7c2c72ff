"""13.2 `compare_ranks(...)`: does a check find each sample that is read twice, and each parameter that differs?

A sum does not see values that are exchanged, and a tolerance does not see the last bit, so the judge makes both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import Expect, Slips, all_of, exercise
from ddp_course.grading.vocabulary.play import Note, Round, Seen

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """The numbers of each rank's samples, and its weights."""

    numbers: list[list[int]]
    weights: list[Weights]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    return Note(value=plain(function(rank, world_size, case.numbers[rank], case.weights[rank])))


def rounds(rng: Random) -> list[Round]:
    """Nothing wrong; then samples that are read twice; then weights that differ."""
    ranks = rng.choice((3, 4))
    numbers = [[rank + ranks * n for n in range(rng.randint(2, 5))] for rank in range(ranks)]
    for of_rank in numbers:
        rng.shuffle(of_rank)
    generator = torch.Generator().manual_seed(rng.randint(1, 1000))
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "head.weight": (2, 4), "head.bias": (2,)}
    names = list(shapes)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def copies() -> list[Weights]:
        return [{name: value.clone() for name, value in weights.items()} for _ in range(ranks)]

    twice = [list(of_rank) for of_rank in numbers]
    twice[-1].append(numbers[0][0])  # on two ranks
    twice[1].append(numbers[1][0])  # twice on one
    apart, (exchanged, last_bit) = copies(), rng.sample(names, 2)
    apart[-1][exchanged] = weights[exchanged].flip(0)
    apart[1][last_bit].view(-1)[0] = torch.nextafter(weights[last_bit].view(-1)[0], torch.tensor(torch.inf))
    cases = {"same": Case(numbers, copies()), "twice": Case(twice, copies()), "apart": Case(numbers, apart)}
    return [Round(ranks, list(cases.items()))]


def repeated(seen: Seen) -> list[int]:
    """Return what is read more than once by all ranks together."""
    return twice_in(sum(seen.case.numbers, []))


def twice_in(numbers: list[int]) -> list[int]:
    return sorted(number for number, times in Counter(numbers).items() if times > 1)


def differing(seen: Seen, **close: float) -> list[str]:
    """Return the names of parameters that some rank does not have as rank 0 has them."""
    first, *others = seen.case.weights
    same = torch.equal if not close else lambda a, b: torch.allclose(a, b, **close)
    return [name for name in first if not all(same(first[name], of_rank[name]) for of_rank in others)]


def sample_slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    numbers = seen.case.numbers
    yield "look for a sample that one rank reads twice, too", twice_in(sum(map(list, map(set, numbers)), []))
    yield "a sample may be read by two ranks: gather the numbers of all", twice_in(numbers[seen.rank])
    yield "each number once, in ascending order", repeated(seen)[::-1]


def weight_slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    value = seen["value"]
    if isinstance(value, list) and value and any(note["value"] != value for note in seen.everyone):
        yield "all ranks must return the same: gather, and compare all of them", value[-1]
    yield "equal means equal bit by bit: replicas make the same step", differing(seen, rtol=1e-5, atol=1e-8)
    rounded = "a sum stays as it was where values are exchanged, and may lose the last bit: compare the values"
    yield rounded, [name for name in differing(seen) if name not in differing(seen, rtol=1e-5, atol=1e-8)]
    yield rounded, []
    yield "names in the order of the dictionary", differing(seen)[::-1]


def part(index: int, what: str, right: Callable[[Seen], list], slips: Slips, otherwise: str) -> Expect:
    """Expect one of the two lists that are returned; numbers and names are equal or not, without a tolerance."""

    def expect(seen: Seen) -> Fault | None:
        value, wanted = seen["value"], right(seen)
        pair = isinstance(value, list) and len(value) == 2 and all(isinstance(found, list) for found in value)
        if pair and value[index] == wanted:
            return None
        found = value[index] if pair else value
        cause = next((slip for slip, wrong in slips(seen) if found == wrong), otherwise)
        cause = cause if pair else "return two lists on every rank: of numbers, and of names"
        return Fault(f"{what} {short(wanted)}", short(found), seen.rank, cause)

    return expect


samples = part(0, "samples read twice:", repeated, sample_slips, "count the numbers of all ranks together")
weights = part(1, "parameters that differ:", differing, weight_slips, "compare each parameter with that of all ranks")

COMPARING = exercise(
    "13.2",
    "Write the check (stretch)",
    "compare_ranks",
    25,
    act=act,
    rounds=rounds,
    checks={
        "same": ("nothing is found where nothing is wrong", 1, all_of(samples, weights), "same"),
        "twice": ("samples that are read twice, on one rank or on two", 2, samples, "twice"),
        "apart": ("parameters that differ, in a bit or in their order", 2, weights, "apart"),
    },
    hints={"sizes": "ranks have different numbers of samples: all_gather_object takes lists of any length"},
)
