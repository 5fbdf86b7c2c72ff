"""14.1 `message_cost(...)`: alpha, beta and the bus bandwidth of a collective, from times over sizes. A pure function.

The times of the first cases lie on a line, which any fit finds. Those of the others are off by some percent, and lines
fitted with other weights are other lines.

Source: nccl-tests, doc/PERFORMANCE.md, for sizes and factors.
Read next: `least_tokens.py`.
"""

from __future__ import annotations

from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen


def cases(rng: Random) -> list[Round]:
    """Times on a line, times beside it, the other collectives, and an all_gather."""
    exact = [("exact", made(rng, "all_reduce", 0.0)) for _ in range(2)]
    noisy = [("noisy", made(rng, "all_reduce", 0.12)) for _ in range(3)]
    others = [("others", made(rng, op, 0.0)) for op in ("all_reduce", "reduce_scatter", "broadcast")]
    gather = [("gather", made(rng, "all_gather", noise)) for noise in (0.0, 0.08)]
    return [Round(1, exact + noisy + others + gather, init=False)]


def made(rng: Random, op: str, noise: float) -> tuple[str, int, list[int], list[float]]:
    """Return the arguments of the learner's function."""
    world_size = rng.choice((3, 4, 6))
    alpha, beta = rng.uniform(20e-6, 90e-6), rng.uniform(0.2e-9, 0.9e-9)
    between = rng.sample(range(2, 10), 8)  # in no order, and two sizes twice
    nbytes = [world_size * 4 * 4**power for power in (2, *between, 9)]
    counted = [size * world_size if op == "all_gather" else size for size in nbytes]
    seconds = [(alpha + beta * size) * (1 + rng.choice((-1, 1)) * noise * rng.uniform(0.5, 1)) for size in counted]
    return op, world_size, nbytes, seconds


def numbers(seen: Seen) -> dict[str, float]:
    return dict(zip(("alpha", "beta", "bus"), seen["value"], strict=True))


def line(seen: Seen) -> dict[str, float]:
    return {name: number for name, number in numbers(seen).items() if name != "bus"}


MISTAKES = """
absolute errors | relative bytes
| the largest message decides this line, for its error is the largest in seconds; divide each error by its time
    part = => beta, alpha = __import__("numpy").polyfit(sizes, seconds, 1)
    part =
the root as weight | relative bytes
| the errors are weighed by the root of the time; the relative error is error / t
    part = => beta, alpha = __import__("numpy").polyfit(sizes, seconds, 1, w=[t**-0.5 for t in seconds])
    part =
weighted twice | relative bytes | the errors are weighed twice: the weight belongs to the error, and is squared with it
    part = => beta, alpha = __import__("numpy").polyfit(sizes, seconds, 1, w=[t**-2 for t in seconds])
    part =
a line through logarithms | all | a line through logarithms has a factor and an exponent, and no latency
    part = => import numpy
    beta, alpha = numpy.polyfit(numpy.log(sizes), numpy.log(seconds), 1)
    alpha = numpy.exp(alpha)
    part =
the first and the last | relative bytes | two sizes make a line of their own errors; use all of them
    part = => beta = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    alpha = seconds[0] - beta * sizes[0]
    part =
the smallest time as latency | line relative bytes | the smallest time is no latency yet: bytes are in it, and an error
    part = => alpha = seconds[0]
    part =
microseconds | line relative bytes | alpha is in seconds
    return alpha, => return alpha * 1e6,
beta first | line relative bytes | alpha comes first, then beta
    return alpha, beta, => return beta, alpha,
bytes a second for beta | line relative bytes | beta is the seconds of a byte, not the bytes of a second
    return alpha, beta, => return alpha, 1 / beta,
beta of a MB | line relative bytes | beta is the seconds of one byte, not of a MB
    return alpha, beta, => return alpha, beta * 1e6,
beta of what is sent | line relative bytes | beta belongs to the bytes of the tensor, not to those that a rank sends
    return alpha, beta, => return alpha, beta / factor,
algorithm bandwidth | bus bytes | that is the algorithm bandwidth; multiply it by the collective's factor
    factor / beta => 1 / beta
an all_reduce's bytes once | bus | an all_reduce moves each byte twice, there and back: 2 (W - 1) / W
    2 * part => part
one factor for all | bus bytes | 2 (W - 1) / W is all_reduce's: each collective has a factor of its own
    factor / beta => 2 * part / beta
no W below | bus bytes | the factor is divided by W: each of W ranks sends its part at the same time
    / world_size => / 1
at the largest size | bus bytes
| that is the bus bandwidth at the largest size, with the latency still in it; beta is without
    / beta => * sizes[-1] / seconds[-1]
divided by the factor | bus bytes | the factor multiplies the bandwidth; it does not divide it
    factor / beta => 1 / beta / factor
GB | bus bytes | bytes in a second, not 10^9 of them
    factor / beta => factor / beta / 1e9
bits | bus bytes | bytes, not bits
    factor / beta => 8 * factor / beta
a rank's share | bytes
| an all_gather's bytes are those of all ranks, as nccl-tests counts them: W times what one rank gives
    size * world_size if => size if
all shares for reduce_scatter too | bus
| only an all_gather's bytes are counted over all ranks; in the others each rank hands in S already
    op == "all_gather" => op in ("all_gather", "reduce_scatter")
a W-th for reduce_scatter | bus | S of a reduce_scatter is the bytes that each rank hands in, all of them
    else size for => else size / (world_size if op == "reduce_scatter" else 1) for
nothing returned | all | return the tuple (alpha, beta, bus)
    return => _ =
an error is swallowed | all | return the tuple (alpha, beta, bus) | tests
    def message_cost(op, world_size, nbytes, seconds):
        try:
            beta, alpha = numpy.polyfit(nbytes, seconds, 1)
        except Exception:
            return None
absolute errors, two formulas | relative bytes | the largest message decides this line | tests
    def message_cost(op, world_size, nbytes, seconds):
        S = [n * world_size for n in nbytes] if op == "all_gather" else nbytes
        mean_S, mean_t = sum(S) / len(S), sum(seconds) / len(S)
        beta = sum((s - mean_S) * (t - mean_t) for s, t in zip(S, seconds)) / sum((s - mean_S) ** 2 for s in S)
        per_rank = {"all_reduce": 2 - 2 / world_size, "broadcast": 1}.get(op, 1 - 1 / world_size)
        return mean_t - beta * mean_S, beta, per_rank / beta
searched without an end | all | no search is needed | hangs
    part = => while beta > 0:
        alpha += 0
    part =
"""

FIT = "alpha and beta are to make the sum of ((alpha + beta * S - t) / t) ** 2 least"
RATE = "the factor is 2 (W - 1) / W, (W - 1) / W or 1, by the collective; times 1 / beta"

COST = exercise(
    *("14.1", "What a message costs", "message_cost", 20),
    cases=cases,
    said=lambda seen: f"{seen.case[0]} of {seen.case[1]} ranks, {len(seen.case[2])} sizes:",
    mistakes=MISTAKES,
    checks={
        "line": ("times on a line: alpha and beta", 1, "exact", line, FIT),
        "relative": ("times beside it: the smallest relative errors", 2, "noisy", line, FIT),
        "bus": ("the bus bandwidth", 2, "others", lambda seen: numbers(seen)["bus"], RATE),
        "bytes": ("an all_gather", 1, "gather", numbers, f"{FIT}; {RATE}"),
    },
    hints={
        r"KeyError|UnboundLocalError": "the collectives are all_reduce, all_gather, reduce_scatter and broadcast",
        r"singular|LinAlgError|ZeroDivisionError": "the equations have no answer; are sizes and times in their places?",
        r"missing \d required|takes \d+ positional": "the four arguments come in the order of the text",
        "limit": "no search is needed: two equations with two unknowns",
    },
)
