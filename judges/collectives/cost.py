"""04.3 `all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s)`: what do ring and tree cost, and which wins?

Arithmetic alone, so one process is enough. W: the number of ranks. Read next: `two_levels.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import Expect, all_of, equals, exercise
from ddp_course.grading.vocabulary.play import Note, Round, Seen

EXACTNESS = 1e-3  # of a result; a search for the crossover may stop there
LEAST_BYTES = 1e-3  # of a crossover; less is none
PARTS = ("ring_s", "tree_s", "crossover")
Case = tuple[float, int, float, float]  # as in the function's arguments
Times = Iterator[tuple[str, float]]  # the right one, then by cause those of mistakes


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the three parts, or nothing where there are not three."""
    found = plain(function(*case))
    return Note(zip(PARTS, found, strict=True)) if isinstance(found, list) and len(found) == len(PARTS) else Note()


def rounds(rng: Random) -> list[Round]:
    """Powers of two, other numbers of ranks, the smallest ones, and apart from them a single rank."""
    powers, others = [4, 64, 2 ** rng.randint(7, 10), 2**29], [5, rng.randint(9, 15), rng.randint(33, 60), 1000]

    def case(W: int) -> Case:
        return rng.randint(1_000, 90_000_000), W, rng.randint(3, 60) * 1e-6, rng.randint(2, 200) * 1e8

    asked = {"powers": powers, "others": others, "small": [2, 3]}
    cases = [(name, case(W)) for name, sizes in asked.items() for W in sizes]
    # So few bytes and so short a latency that a part of a byte counts.
    cases.append(("others", (rng.randint(50, 90), 7, rng.randint(1, 3) * 1e-9, 2e8)))
    return [Round(1, cases, init=False), Round(1, [("one", case(1))], init=False)]


def ring(seen: Seen) -> Times:
    """Yield times of a ring."""
    n_bytes, W, latency_s, bytes_per_s = seen.case
    steps, whole_s = W - 1, latency_s + n_bytes / bytes_per_s
    chunk_s = n_bytes / W / bytes_per_s
    step_s = latency_s + chunk_s
    yield "", 2 * steps * step_s
    yield "this is half of the ring: W-1 steps that add, and W-1 that copy", steps * step_s
    yield "this ring sends whole tensors; a message of the ring is 1/W of the bytes", 2 * steps * whole_s
    yield "this ring sends whole tensors; a message of the ring is 1/W of the bytes", steps * whole_s
    yield "2W steps are two too many; a ring takes 2(W-1)", 2 * W * step_s
    yield "every one of the 2(W-1) messages costs a latency, not only the first", latency_s + 2 * steps * chunk_s
    by_bandwidth_s = latency_s + n_bytes / W * bytes_per_s
    yield "a message takes n / bytes_per_s; divide by the bandwidth", 2 * steps * by_bandwidth_s
    yield "the steps of a ring come one after the other; do not divide their time by the ranks", 2 * steps * step_s / W


def tree(seen: Seen) -> Times:
    """Yield times of a tree."""
    n_bytes, W, latency_s, bytes_per_s = seen.case
    message_s, exact, rounds = latency_s + n_bytes / bytes_per_s, math.log2(W), (W - 1).bit_length()
    yield "", 2 * rounds * message_s
    if W == 3:  # here half of the rounds and rounds that are rounded down look the same
        yield "three ranks take two rounds up and two down: log2(3) is rounded up, and both ways count", 2 * message_s
    yield "this is the way up only; the sum also travels down, in as many rounds", rounds * message_s
    yield "there is no part of a round; round log2(W) up to a whole number", 2 * exact * message_s
    early = "round log2(W) up before you double it: up and down are rounds of their own"
    yield early, math.ceil(2 * exact) * message_s
    down = 2 * (W.bit_length() - 1)
    yield "log2(W) is rounded down; a rank beyond a power of two needs a round more", down * message_s
    more = (
        "one round too many: for a power of two, log2(W) is whole; math.log(W, 2) is not exact, take math.log2(W) or "
    )
    yield more + "(W - 1).bit_length()", 2 * (rounds + 1) * message_s
    part_s = latency_s + n_bytes / W / bytes_per_s
    yield "a tree sends whole tensors: the message has all of the bytes, not 1/W", 2 * rounds * part_s
    yield "messages of one round travel at the same time; count rounds, not messages", 2 * (W - 1) * message_s
    yield "every round sends the bytes once more, not only the first", (2 * rounds - 1) * latency_s + message_s


def crossover(seen: Seen) -> Times:
    """Yield numbers of bytes for which ring and tree take as long; when a time is wrong, that is the reason."""
    _, W, latency_s, bytes_per_s = seen.case
    found = seen["crossover"]
    steps, rounds = 2 * (W - 1), 2 * (W - 1).bit_length()
    saved = rounds - steps / W  # payloads that the ring need not send
    right = (steps - rounds) * latency_s * bytes_per_s / saved if saved else 0.0
    none = not right and isinstance(found, float) and abs(found) < LEAST_BYTES
    yield "", found if none else right
    if not all(
        close(seen[name], next(times(seen))[1], EXACTNESS) for name, times in (("ring_s", ring), ("tree_s", tree))
    ):
        yield "the crossover follows from the two times, and one of them is wrong; fix that first", found
    yield "these are seconds; multiply by the bandwidth to get bytes", right / bytes_per_s
    yield "this is one chunk; the crossover is the size of the whole tensor", right / W
    yield "this is W times too much; the ring's message is 1/W of the tensor", right * W
    yield "this is half of it; the factor 2 of both formulas cancels", right / 2
    yield "this is twice as much; the factor 2 of both formulas cancels", right * 2
    yield "the sign is wrong: it is (more latencies of the ring) / (fewer bytes of the ring)", -right


def part(name: str, times: Callable[[Seen], Times], otherwise: str) -> Expect:
    """Expect the first of the times, or name the mistake that leads to another one."""

    def words(seen: Seen, right: float) -> str:
        n_bytes, W, latency_s, bytes_per_s = seen.case
        given = f"{n_bytes:,} bytes, {W} ranks, {latency_s:.2g} s, {bytes_per_s:.2g} bytes/s"
        return f"{name} = {short(right)} for {given}"

    def form(found: Any) -> str:
        number = isinstance(found, int | float) and not isinstance(found, bool)
        return "" if number else f"return three numbers: {', '.join(PARTS)}; 0 where nothing is to do"

    return equals(words, lambda seen: next(times(seen))[1], times, otherwise, of=name, tolerance=EXACTNESS, form=form)


ring_s = part("ring_s", ring, "the ring takes 2(W-1) steps, each with one latency and 1/W of the bytes")
rounds_up = "the tree takes log2(W) rounds up, rounded up to a whole number, and as many down, each with one latency "
tree_s = part("tree_s", tree, rounds_up + "and all of the bytes")
solved = "set the two formulas equal, and solve for the bytes; their latencies and their bytes differ"
equal = part("crossover", crossover, solved)

COST = exercise(
    "04.3",
    "What does it cost?",
    "all_reduce_seconds",
    15,
    act=act,
    rounds=rounds,
    checks={
        "ring": ("the time of the ring", 1, ring_s, "powers others"),
        "tree": ("the time of the tree, with a power of two of ranks", 1, tree_s, "powers"),
        "rounds": ("the time of the tree, with other numbers of ranks", 1, tree_s, "others"),
        "crossover": ("the size from which the ring is as quick", 1, equal, "powers others"),
        "few": ("one, two and three ranks", 1, all_of(ring_s, tree_s, equal), "small one"),
    },
    refused=tuple(f"ddp_course.collectives.{name}" for name in ("ring_seconds", "tree_seconds", "crossover_bytes")),
    hints={
        "limit": "an endless loop, or one over the ranks or their messages: W may be hundreds of millions, "
        "so multiply, and count doublings",
        r"ZeroDivisionError": "one rank has nothing to send: all three are 0, and nothing may be divided by it",
        r"math domain error|expected a positive input": "the logarithm of 0 does not exist; one rank takes no rounds",
    },
)
