"""00.1 `sum_of_all(rank, world_size, value)`: does a sum over the ranks reach every rank, through any collectives?

The values differ from rank to rank so that each usual mistake gives another number. Read next: `replicas.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

from ddp_course.grading.differential import exercise, value
from ddp_course.grading.vocabulary.rounds import Round, Seen


def cases(rng: Random) -> list[Round]:
    """Two numbers of ranks, the second with fractions that no rounding keeps; and ranks with one value."""
    three = [float(each) for each in sorted(rng.sample(range(2, 90), 3))]  # rank 0's is the least
    others = [each + rng.randrange(1, 256, 2) / 256 for each in rng.sample(range(2, 90), rng.choice((2, 4)))]
    return [Round(3, [("three", three), ("equal", [*three[:2], three[0]])]), Round(len(others), [("others", others)])]


def act(function, case: list[float], rank: int, world_size: int) -> Any:
    return function(rank, world_size, case[rank])


def communicates(seen: Seen) -> str:
    return "a collective" if seen["calls"] else "none"


MISTAKES = """
own value | all | no collective was called, so a rank knows its own value only
    dist.all_reduce(total) => pass
what all_reduce returns | sum others | all_reduce works in place and returns None; return the tensor
    dist.all_reduce(total) => total = dist.all_reduce(total)
mean | sum others | this is the mean; the sum is asked for
    return total => return total / world_size
largest | sum others | this is the largest value; the operation must be the sum, which is the default
    all_reduce(total) => all_reduce(total, op=dist.ReduceOp.MAX)
reduced twice | sum others | reduced twice: the second call added sums
    return total => dist.all_reduce(total)
    return total
a list | sum others | return one number, or a tensor with one element
    return total => return [total.item()]
whole numbers | others | the fractions are lost: the tensor holds whole numbers; make it of value as it is
    torch.tensor(value) => torch.tensor(int(value))
rounded | others | the sum is rounded; return it as it is
    return total => return round(total.item(), 2)
equal values count once | others | equal values of two ranks are both part of the sum
    dist.all_reduce(total) => everyone = [None] * world_size
    dist.all_gather_object(everyone, value)
    total = sum(set(everyone))
reduced to rank 0 | sum others | reduce has one receiver, all_reduce has all
    dist.all_reduce(total) => dist.reduce(total, dst=0)
the last rank stays away | all | one rank skips a collective | tests
    dist.all_reduce(total) => if rank < world_size - 1:
        dist.all_reduce(total)
multiplied | all | a rank knows its own value only | tests
    def sum_of_all(rank, world_size, value):
        return value * world_size
the visible sum, hard-coded | others talk | some values are missing, or counted twice | tests
    def sum_of_all(rank, world_size, value):
        dist.barrier()
        return 120.0
"""

WORDS = "some values are missing, or counted twice; one all_reduce adds each rank's value once, for all ranks"
TOTAL = exercise(
    *("00.1", "One sum on every rank", "sum_of_all", 5),
    cases=cases,
    act=act,
    said=lambda seen: f"{' + '.join(f'{each:g}' for each in seen.case)} on every rank:",
    mistakes=MISTAKES,
    checks={
        "sum": ("every rank has the sum", 1, "three", value, WORDS),
        "others": ("another number of ranks, other numbers, also equal ones", 1, "others equal", value, WORDS),
        "talk": ("the ranks communicate", 1, "three others", communicates,
                 "no collective was called, so a rank knows its own value only"),
    },
)  # fmt: skip
