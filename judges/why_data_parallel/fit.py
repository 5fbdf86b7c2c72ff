"""01.3 `ranks_needed(parameters, optimizer, bytes_per_row, global_batch, device_bytes)`: what is divided, what is not?

Arithmetic alone, so a wrong number is explained by the slip of thought that leads to it.
Read next: `judges/start_here/`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from random import Random
from typing import Any, NamedTuple

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import called, exercise
from ddp_course.grading.vocabulary.play import Round, Seen

# Held for each parameter: itself, its gradient, the gradient's copy in DDP's bucket, the optimizer's running means.
NUMBERS = {"sgd": 3, "momentum": 4, "adam": 5}
FLOAT32 = 4  # bytes


class Case(NamedTuple):
    """The arguments of the learner's function."""

    parameters: int
    optimizer: str
    bytes_per_row: int
    global_batch: int
    device_bytes: int


def ranks_needed(case: Case, held: float | None = None, divide_all: bool = False, rounding: Callable = ceil):
    """Return the right number of ranks; with other arguments than the case, what a slip of thought gives."""
    parameters, optimizer, bytes_per_row, global_batch, device_bytes = case
    fixed = parameters * FLOAT32 * (NUMBERS[optimizer] if held is None else held)
    for world_size in range(1, global_batch + 1):
        need = fixed + rounding(global_batch / world_size) * bytes_per_row
        if divide_all:
            need = (fixed + global_batch * bytes_per_row) / world_size
        if need <= device_bytes:
            return world_size
    return None


def rounds(rng: Random) -> list[Round]:
    """Cases made backwards, from the largest shard that fits."""
    groups = {
        "one": [_case("sgd", 64, 64, rng)],
        "divided": [_case("sgd", rows, 100, rng, left=left) for rows, left in ((20, 9), (10, 9), (25, 0), (25, -1))],
        "optimizer": [_case("momentum", 24, 96, rng), _case("adam", rng.choice((12, 16, 24)), 96, rng, left=0)],
        "uneven": [_case("adam", 7, 100, rng, spare=0.9), _case("sgd", rng.choice((3, 6)), 20, rng)],
        "many": [_case("momentum", 1, rng.randint(120_000, 150_000), rng)],
    }
    fits = [(name, case) for name, group in groups.items() for case in group]
    # What fits nowhere comes last, and alone: a loop that never ends there must not hide the rest.
    never = [("never", _case("adam", rows, 64, rng)) for rows in (0, -3)] + [("never", _case("adam", 1, 48, rng))]
    return [Round(1, fits, init=False), Round(1, never, init=False)]


def _case(optimizer: str, rows: int, batch: int, rng: Random, spare: float = 0.0, left: int | None = None) -> Case:
    """A case in which `rows` rows fit on a device beside what is fixed, a part of one more, and `left` bytes."""
    # What is fixed outweighs many rows, so that a slip there changes the number of ranks.
    parameters, bytes_per_row = rng.randint(50, 90) * 10**5, rng.randint(10, 30) * 10**5
    fixed = parameters * FLOAT32 * NUMBERS[optimizer]
    device = fixed + int((rows + spare) * bytes_per_row) + (rng.randint(1, 10**5) if left is None else left)
    return Case(parameters, optimizer, bytes_per_row, batch, device)


def right(seen: Seen) -> Fault | None:
    """The least number of ranks, or None."""
    case, found, wanted = seen.case, seen["value"], ranks_needed(seen.case)
    if type(found) is type(wanted) and found == wanted:
        return None
    shown = (
        f"{case.parameters:,} parameters, {case.optimizer}, {case.bytes_per_row:,} bytes a row, {case.global_batch} "
        f"rows, {case.device_bytes:,} bytes"
    )
    return Fault(f"{wanted} for {shown}", repr(found), cause=_cause(case, found, wanted))


def _fits_exactly(case: Case, world_size: int) -> bool:
    fixed = case.parameters * FLOAT32 * NUMBERS[case.optimizer]
    return fixed + ceil(case.global_batch / world_size) * case.bytes_per_row == case.device_bytes


def _cause(case: Case, found: Any, right: int | None) -> str:
    held = NUMBERS[case[1]]
    if right is None:
        return (
            "not even one row fits beside parameters, gradients and optimizer state, so no number of ranks helps: None"
        )
    if isinstance(found, float):
        return "a number of ranks is whole; go up to the next one, and return an int"
    likely = []  # one number may come from two slips
    for slip, cause in (
        (
            ranks_needed(case, held=held - 1),
            "one number for each parameter is missing, such as the gradient's copy in DDP's bucket: ",
        ),
        (ranks_needed(case, held=3), "the optimizer's state is missing: "),
        (ranks_needed(case, held=held - 2), "two numbers for each parameter are missing, such as both gradients: "),
        (ranks_needed(case, held=1), "this counts the parameters alone: "),
        (ranks_needed(case, held=held / 4), "a float32 number has 4 bytes: "),
        (ranks_needed(case, held=0), "this counts the activations alone: "),
    ):
        if found == slip and not likely:
            likely = [f"{cause}each rank holds {held} numbers of {FLOAT32} bytes for each parameter with {case[1]}"]
    if found == ranks_needed(case, divide_all=True):
        likely += ["parameters, gradients and optimizer state are divided by the ranks; each rank holds all of them"]
    if likely:
        return "; or ".join(likely)
    left = case[4] - held * FLOAT32 * case[0]
    if found == ceil(case[3] * case[2] / left):
        return "a device holds whole rows: round the rows that fit down, before you divide by them"
    if found == ranks_needed(case, rounding=floor):
        return "the largest shard decides: 100 rows on 3 ranks are 34 on one of them, not 33"
    if _fits_exactly(case, right):
        return "what fits to the last byte fits: <=, not <"
    if found is None:
        return "it does fit: more ranks make the shards smaller, down to one row"
    if isinstance(found, int | float) and found > right:
        return f"fewer ranks are enough: with {right}, the largest shard has {ceil(case[3] / right)} rows"
    return "this many ranks still have more rows than fit beside what is fixed"


FIT = exercise(
    "01.3",
    "How many ranks until it fits? (stretch)",
    "ranks_needed",
    15,
    act=called,
    rounds=rounds,
    checks={
        "one": ("one rank is enough", 1, right, "one"),
        "divided": ("the rows are divided, the rest is not", 1, right, "divided"),
        "optimizer": ("each optimizer's state", 1, right, "optimizer"),
        "uneven": ("rows that do not divide evenly, and many of them", 1, right, "uneven many"),
        "never": ("too large for any number of ranks, and just not too large", 1, right, "never"),
    },
)
