"""04.3 `all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s)`: what do ring and tree cost, and which wins?

Arithmetic alone, so one process is enough. W: the number of ranks. Read next: `two_levels.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen

EXACTNESS = 1e-3  # of a result; a search for the crossover may stop there, and 1e-3 bytes are none


def cases(rng: Random) -> list[Round]:
    """Powers of two, other numbers of ranks, the smallest ones, and apart from them a single rank."""
    powers, others = [4, 64, 2 ** rng.randint(7, 10), 2**29], [5, rng.randint(9, 15), rng.randint(33, 60), 1000]

    def case(W: int) -> tuple:
        return rng.randint(1_000, 90_000_000), W, rng.randint(3, 60) * 1e-6, rng.randint(2, 200) * 1e8

    asked = {"powers": powers, "others": others, "small": [2, 3]}
    named = [(name, case(W)) for name, sizes in asked.items() for W in sizes]
    # So few bytes and so short a latency that a part of a byte counts.
    named.append(("others", (rng.randint(50, 90), 7, rng.randint(1, 3) * 1e-9, 2e8)))
    return [Round(1, named, init=False), Round(1, [("one", case(1))], init=False)]


def said(seen: Seen) -> str:
    n_bytes, W, latency_s, bytes_per_s = seen.case
    return f"for {n_bytes:,} bytes, {W} ranks, {latency_s:.2g} s, {bytes_per_s:.2g} bytes/s:"


def all_three(seen: Seen) -> dict[str, float]:
    ring_s, tree_s, crossover = map(float, seen["value"])
    return {"ring_s": ring_s, "tree_s": tree_s, "crossover": 0.0 if abs(crossover) < EXACTNESS else crossover}


def part(name: str) -> Callable[[Seen], dict[str, float]]:
    return lambda seen: {name: all_three(seen)[name]}


MISTAKES = """
half a ring | ring few | this is half of the ring: W-1 steps that add, and W-1 that copy
    ring_s = steps => ring_s = steps / 2
a ring of whole tensors | ring few | this ring sends whole tensors; a message of the ring is 1/W of the bytes
    n_bytes / world_size / => n_bytes /
2W steps | ring few | 2W steps are two too many; a ring takes 2(W-1)
    ring_s = steps => ring_s = (steps + 2)
one latency | ring few | every one of the 2(W-1) messages costs a latency, not only the first
    steps * (latency_s + n_bytes / world_size / bytes_per_s) => latency_s + steps * n_bytes / world_size / bytes_per_s
times the bandwidth | ring tree rounds few | a message takes n / bytes_per_s; divide by the bandwidth
    / bytes_per_s) => * bytes_per_s)
only up | tree rounds few | this is the way up only; the sum also travels down, in as many rounds
    tree_s = rounds => tree_s = rounds / 2
a tree of chunks | tree rounds few | a tree sends whole tensors: the message has all of the bytes, not 1/W
    rounds * (latency_s + n_bytes => rounds * (latency_s + n_bytes / world_size
a part of a round | rounds crossover few | there is no part of a round; round log2(W) up to a whole number
    math.ceil(math.log2(world_size)) => math.log2(world_size)
rounds rounded down | rounds crossover few
| log2(W) is rounded down; a rank beyond a power of two needs a round more
    math.ceil(math.log2(world_size)) => int(math.log2(world_size))
log(W, 2) | tree crossover
| one round too many: for a power of two, log2(W) is whole; math.log(W, 2) is not exact, take math.log2(W)
    math.log2(world_size) => math.log(world_size, 2)
rounds of the doubled logarithm | rounds crossover
| round log2(W) up before you double it: up and down are rounds of their own
    2 * math.ceil(math.log2(world_size)) => math.ceil(2 * math.log2(world_size))
the crossover in seconds | crossover | these are seconds; multiply by the bandwidth to get bytes
    latency_s * bytes_per_s / fewer => latency_s / fewer
one chunk | crossover | this is one chunk; the crossover is the size of the whole tensor
    / fewer_payloads => / fewer_payloads / world_size
half of the crossover | crossover | this is half of it; the factor 2 of both formulas cancels
    / fewer_payloads => / fewer_payloads / 2
the sign | crossover | the sign is wrong: it is (more latencies of the ring) / (fewer bytes of the ring)
    more_latencies = steps - rounds => more_latencies = rounds - steps
one rank divides by zero | few | one rank has nothing to send: all three are 0, and nothing may be divided by it
    world_size == 1 => world_size == 0
two values | all | return three numbers | tests
    def all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s):
        return n_bytes / bytes_per_s, latency_s
the course's own | all | this exercise is to write what it does | tests
    def all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s):
        return collectives.ring_seconds(n_bytes, world_size, latency_s=latency_s, bytes_per_s=bytes_per_s), 0, 0
a loop over the messages | all | one over the ranks or their messages | hangs
    ring_s = steps => ring_s = sum(1 for _ in range(steps))
"""

RING = "return three numbers; the ring takes 2(W-1) steps, each with one latency and 1/W of the bytes"
TREE = (
    "return three numbers; the tree takes log2(W) rounds up, rounded up to a whole number, and as many down, each with "
    "one latency and all of the bytes"
)

COST = exercise(
    *("04.3", "What does it cost?", "all_reduce_seconds", 15),
    cases=cases,
    said=said,
    tolerance=EXACTNESS,
    mistakes=MISTAKES,
    checks={
        "ring": ("the time of the ring", 1, "powers others", part("ring_s"), RING),
        "tree": ("the time of the tree, with a power of two of ranks", 1, "powers", part("tree_s"), TREE),
        "rounds": ("the time of the tree, with other numbers of ranks", 1, "others", part("tree_s"), TREE),
        "crossover": ("the size from which the ring is as quick", 1, "powers others", part("crossover"),
                      "set the two formulas equal, and solve for the bytes; if a time is wrong, fix that first"),
        "few": ("one, two and three ranks", 1, "small one", all_three, "with 1 rank all are 0; log2(3) is rounded up"),
    },
    refused=tuple(f"ddp_course.collectives.{name}" for name in ("ring_seconds", "tree_seconds", "crossover_bytes")),
    hints={
        "limit": "an endless loop, or one over the ranks or their messages: W may be hundreds of millions, "
        "so multiply, and count doublings",
        r"ZeroDivisionError": "one rank has nothing to send: all three are 0, and nothing may be divided by it",
        r"math domain error|expected a positive input": "the logarithm of 0 does not exist; one rank takes no rounds",
    },
)  # fmt: skip
