"""04.3 `all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s)`: what do ring and tree cost, and which wins?

Arithmetic alone, so one process is enough. The expected values are worked out here, with whole numbers for the rounds.
Read next: `two_levels.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

EXACTNESS = 1e-3  # of a result; a search for the crossover may stop there
PARTS = ("ring_s", "tree_s", "crossover")


def cost_driver(rank: int, world_size: int, function: Callable, cases: list[tuple]) -> list[Any]:
    """Call the function for each case."""
    found = []
    for case in cases:
        value = function(*case)
        found.append([plain(item) for item in value] if isinstance(value, tuple | list) else plain(value))
    return found


def cost_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Ring and tree for powers of two, the tree for others, the crossover, and the smallest numbers of ranks."""
    powers, others = [4, 64, 2 ** rng.randint(7, 10), 2**29], [5, rng.randint(9, 15), rng.randint(33, 60), 1000]
    asked = [_case(size, rng) for size in powers + others]
    small = [_case(size, rng) for size in (2, 3)]
    answers = answer.run(cost_driver, 1, asked + small)[0]
    notes = list(zip(asked, answers, strict=False))
    few = list(zip(small, answers[len(asked) :], strict=True))
    yield "ring", _first(notes, 0)
    yield "tree", _first(notes[: len(powers)], 1)
    yield "rounds", _first(notes[len(powers) :], 1)
    yield "crossover", _first(notes, 2)
    alone = _case(1, rng)
    found = answer.run(cost_driver, 1, [alone])[0]
    yield "few", _few_fault(few + [(alone, found[0])])


def _case(world_size: int, rng: Random) -> tuple[float, int, float, float]:
    return rng.randint(1_000, 90_000_000), world_size, rng.randint(3, 60) * 1e-6, rng.randint(2, 200) * 1e8


def costs(n_bytes: float, world_size: int, latency_s: float, bytes_per_s: float) -> list[float]:
    """Return the seconds of the ring, those of the tree, and the number of bytes for which they are equal."""
    steps, rounds = 2 * (world_size - 1), 2 * (world_size - 1).bit_length()
    ring = steps * (latency_s + n_bytes / world_size / bytes_per_s)
    tree = rounds * (latency_s + n_bytes / bytes_per_s)
    saved = rounds - steps / world_size  # payloads that the ring need not send
    return [ring, tree, (steps - rounds) * latency_s * bytes_per_s / saved if saved else 0.0]


def _first(notes: list[tuple], part: int) -> Fault | None:
    return next(filter(None, (_fault(case, found, part) for case, found in notes)), None)


def _few_fault(notes: list[tuple]) -> Fault | None:
    return next(filter(None, (_fault(case, found, part) for case, found in notes for part in range(3))), None)


def _fault(case: tuple, found: Any, part: int) -> Fault | None:
    n_bytes, world_size, latency_s, bytes_per_s = case
    right = costs(*case)[part]
    expected = f"{PARTS[part]} = {_number(right)} for {n_bytes:,} bytes, {world_size} ranks"
    expected += f", {latency_s:.2g} s, {bytes_per_s:.2g} bytes/s"
    if not isinstance(found, list) or len(found) != 3:
        return Fault(expected, repr(found), cause="return three numbers: ring_s, tree_s, crossover")
    number = found[part]
    if not isinstance(number, int | float) or isinstance(number, bool):
        return Fault(expected, repr(number), cause=f"{PARTS[part]} must be a number; return 0 where nothing is to do")
    if _right(case, found, part):
        return None
    return Fault(expected, f"{PARTS[part]} = {_number(number)}", cause=_cause(case, number, part, found))


def _right(case: tuple, found: list, part: int) -> bool:
    exact = 1e-12 if part < 2 else 1e-3  # where the right one is 0
    return isinstance(found[part], int | float) and math.isclose(
        found[part], costs(*case)[part], rel_tol=EXACTNESS, abs_tol=exact
    )


def _number(value: float) -> str:
    return f"{value:,.0f} bytes" if abs(value) >= 1000 else f"{value:.4g}"


def _cause(case: tuple, number: float, part: int, found: list) -> str:
    causes = (_ring_causes, _tree_causes, _crossover_causes)[part](*case)
    if part == 2 and any(not _right(case, found, other) for other in (0, 1)):
        return "the crossover follows from the two times, and one of them is wrong; mend that first"
    near = (cause for value, cause in causes if math.isclose(number, value, rel_tol=EXACTNESS, abs_tol=1e-9))
    last = (
        "the ring takes 2(W-1) steps, each with one latency and 1/W of the bytes",
        "the tree takes log2(W) rounds up, rounded up to a whole number, and as many down, each with one latency and "
        "all of the bytes",
        "set the two formulas equal, and solve for the bytes; their latencies and their bytes differ",
    )[part]
    return next(near, last)


def _ring_causes(n_bytes: float, world_size: int, latency_s: float, bytes_per_s: float) -> list[tuple[float, str]]:
    steps = world_size - 1
    chunk_s = n_bytes / world_size / bytes_per_s
    return [
        (steps * (latency_s + chunk_s), "this is half of the ring: W-1 steps that add, and W-1 that copy"),
        (
            2 * steps * (latency_s + n_bytes / bytes_per_s),
            "this ring sends whole tensors; a message of the ring is 1/W of the bytes",
        ),
        (steps * (latency_s + n_bytes / bytes_per_s), "this ring sends whole tensors; a message is 1/W of the bytes"),
        (2 * world_size * (latency_s + chunk_s), "2W steps are two too many; a ring takes 2(W-1)"),
        (latency_s + 2 * steps * chunk_s, "every one of the 2(W-1) messages costs a latency, not only the first"),
        (
            2 * steps * (latency_s + chunk_s * bytes_per_s**2),
            "a message takes n / bytes_per_s; divide by the bandwidth",
        ),
        (
            2 * steps * (latency_s + chunk_s) / world_size,
            "the steps of a ring come one after the other; do not divide their time by the ranks",
        ),
    ]


def _tree_causes(n_bytes: float, world_size: int, latency_s: float, bytes_per_s: float) -> list[tuple[float, str]]:
    exact, up = math.log2(world_size), (world_size - 1).bit_length()
    message_s = latency_s + n_bytes / bytes_per_s
    down = world_size.bit_length() - 1
    up_only = "this is the way up only; the sum also travels down, in as many rounds"
    if world_size == 3:  # here half of the rounds and rounds that are rounded down look the same
        up_only = "three ranks take two rounds up and two down: log2(3) is rounded up, and both ways count"
    return [
        (up * message_s, up_only),
        (2 * exact * message_s, "there is no part of a round; round log2(W) up to a whole number"),
        (
            math.ceil(2 * exact) * message_s,
            "round log2(W) up before you double it: up and down are rounds of their own",
        ),
        (2 * down * message_s, "log2(W) is rounded down; a rank beyond a power of two needs a round more"),
        (
            2 * (up + 1) * message_s,
            "one round too many: for a power of two, log2(W) is whole; math.log(W, 2) is not exact, take math.log2(W) "
            "or (W - 1).bit_length()",
        ),
        (
            2 * up * (latency_s + n_bytes / world_size / bytes_per_s),
            "a tree sends whole tensors: the message has all of the bytes, not 1/W",
        ),
        (2 * (world_size - 1) * message_s, "messages of one round travel at the same time; count rounds, not messages"),
        (2 * up * latency_s + n_bytes / bytes_per_s, "every round sends the bytes once more, not only the first"),
    ]


def _crossover_causes(n_bytes: float, world_size: int, latency_s: float, bytes_per_s: float) -> list[tuple[float, str]]:
    right = costs(n_bytes, world_size, latency_s, bytes_per_s)[2]
    return [
        (right / bytes_per_s, "these are seconds; multiply by the bandwidth to get bytes"),
        (right / world_size, "this is one chunk; the crossover is the size of the whole tensor"),
        (right * world_size, "this is W times too much; the ring's message is 1/W of the tensor"),
        (right / 2, "this is half of it; the factor 2 of both formulas cancels"),
        (right * 2, "this is twice as much; the factor 2 of both formulas cancels"),
        (-right, "the sign is wrong: it is (more latencies of the ring) / (fewer bytes of the ring)"),
    ]


COST = Exercise(
    "04.3",
    "What does it cost?",
    "all_reduce_seconds",
    15,
    (
        Check("ring", "the time of the ring", 1),
        Check("tree", "the time of the tree, with a power of two of ranks", 1),
        Check("rounds", "the time of the tree, with other numbers of ranks", 1),
        Check("crossover", "the size from which the ring is as quick", 1),
        Check("few", "one, two and three ranks", 1),
    ),
    cost_judge,
    refused=(
        "ddp_course.collectives.ring_seconds",
        "ddp_course.collectives.tree_seconds",
        "ddp_course.collectives.crossover_bytes",
    ),
    hints=(
        (r"ZeroDivisionError", "one rank has nothing to send: all three are 0, and nothing may be divided by it"),
        (r"math domain error|expected a positive input", "the logarithm of 0 does not exist; one rank takes no rounds"),
    ),
)
