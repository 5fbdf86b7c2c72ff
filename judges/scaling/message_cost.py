"""14.1 `message_cost(...)`: alpha, beta and the bus bandwidth of a collective, from times over sizes.

A pure function. The times of the first cases lie on a line, which any fit finds. Those of the others are off by some
percent, and lines fitted with other weights are other lines, each of which the judge works out by torch's least
squares.

Source: nccl-tests, doc/PERFORMANCE.md, for sizes and factors.
Read next: `least_tokens.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import Expect, called, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.scaling.slips import numbers

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "all_gather": lambda w: (w - 1) / w,
    "reduce_scatter": lambda w: (w - 1) / w,
    "broadcast": lambda w: 1.0,
}


class Case(NamedTuple):
    """The arguments of the learner's function."""

    op: str
    world_size: int
    nbytes: list[int]
    seconds: list[float]


def rounds(rng: Random) -> list[Round]:
    """Times on a line, times beside it, the other collectives, and an all_gather."""
    exact = [("exact", _case(rng, "all_reduce", 0.0)) for _ in range(2)]
    noisy = [("noisy", _case(rng, "all_reduce", 0.12)) for _ in range(3)]
    others = [("others", _case(rng, op, 0.0)) for op in ("all_reduce", "reduce_scatter", "broadcast")]
    gather = [("gather", _case(rng, "all_gather", noise)) for noise in (0.0, 0.08)]
    return [Round(1, exact + noisy + others + gather, init=False)]


def _case(rng: Random, op: str, noise: float) -> Case:
    world_size = rng.choice((3, 4, 6))
    alpha, beta = rng.uniform(20e-6, 90e-6), rng.uniform(0.2e-9, 0.9e-9)
    between = rng.sample(range(2, 10), 8)  # in no order, and two sizes twice
    nbytes = [world_size * 4 * 4**power for power in (2, *between, 9)]
    counted = _counted(op, world_size, nbytes)
    seconds = [(alpha + beta * size) * (1 + rng.choice((-1, 1)) * noise * rng.uniform(0.5, 1)) for size in counted]
    return Case(op, world_size, nbytes, seconds)


def _counted(op: str, world_size: int, nbytes: list[int]) -> list[int]:
    return [size * world_size if op == "all_gather" else size for size in nbytes]


# --- What is right, with knobs for what is not -----------------------------------------------------


def fitted(size: torch.Tensor, t: torch.Tensor, power: float) -> tuple[float, float]:
    """The line for which the sum of squared errors, each divided by its time to this power, is least."""
    scale = size.max()  # so that both columns are of one magnitude
    columns = torch.stack([torch.ones_like(size), size / scale], dim=1) / t[:, None] ** power
    alpha, beta = torch.linalg.lstsq(columns, (t / t**power)[:, None]).solution.flatten().tolist()
    return alpha, beta / scale.item()


def logarithmic(size: torch.Tensor, t: torch.Tensor) -> tuple[float, float]:
    """A line through the logarithms: a factor and an exponent, which are neither latency nor bandwidth."""
    alpha, beta = fitted(size.log(), t.log(), 0)
    return math.exp(alpha), beta


def through(size: torch.Tensor, t: torch.Tensor) -> tuple[float, float]:
    """The line through the smallest and the largest size."""
    beta = ((t[-1] - t[0]) / (size[-1] - size[0])).item()
    return (t[0] - beta * size[0]).item(), beta


def worked(seen: Seen, fit=1, alpha: float = 1, beta: float = 1, bus: float = 1, factor: float = 0) -> list[float]:
    """Return alpha, beta and the bus bandwidth, each so many times. Fit: the power of the time in the weights."""
    size, t = (torch.tensor(column, dtype=torch.float64) for column in (_counted(*seen.case[:3]), seen.case.seconds))
    a, b = fit(size, t) if callable(fit) else fitted(size, t, fit)
    return [alpha * a, beta * b, bus * (factor or FACTORS[seen.case.op](seen.case.world_size)) / b]


def _mistakes(seen: Seen) -> dict[str, dict]:
    w, (alpha, beta, _), right = seen.case.world_size, worked(seen), FACTORS[seen.case.op](seen.case.world_size)
    at_last = _counted(*seen.case[:3])[-1] / seen.case.seconds[-1]
    return {
        "the largest message decides this line, for its error is the largest in seconds; weigh each error by its time: "
        "divide by t before it is squared": {"fit": 0},
        "the errors are weighed by the root of the time; the relative error is error / t": {"fit": 0.5},
        "the errors are weighed twice: the weight belongs to the error, and is squared with it": {"fit": 2},
        "a line through logarithms has a factor and an exponent, and no latency": {"fit": logarithmic},
        "two sizes make a line of their own errors; use all of them": {"fit": through},
        "the smallest time is no latency yet: bytes are in it, and an error": {"alpha": seen.case.seconds[0] / alpha},
        "alpha is in seconds": {"alpha": 1e6},
        "alpha comes first, then beta": {"alpha": beta / alpha, "beta": alpha / beta},
        "beta is the seconds of a byte, not the bytes of a second": {"beta": beta**-2},
        "beta is the seconds of one byte, not of a MiB": {"beta": 2**20},
        "beta is the seconds of one byte, not of a MB": {"beta": 1e6},
        "beta is the seconds of one byte, not of a number of 4 bytes": {"beta": 4},
        "beta belongs to the bytes of the tensor, not to those that a rank sends": {"beta": 1 / right},
        "that is the algorithm bandwidth; multiply it by the collective's factor": {"factor": 1},
        "an all_reduce moves each byte twice, there and back: 2 (W - 1) / W": {"factor": (w - 1) / w},
        "2 (W - 1) / W is all_reduce's: each collective has a factor of its own": {"factor": 2 * (w - 1) / w},
        "the factor is divided by W: each of W ranks sends its part at the same time": {"bus": w},
        "that is the bus bandwidth at the largest size, with the latency still in it; beta is without":
            {"bus": beta * at_last},
        "the factor multiplies the bandwidth; it does not divide it": {"factor": 1 / right},
        "bytes in a second, not 10^9 of them": {"bus": 1e-9},
        "bytes in a second, not 2^30 of them": {"bus": 2**-30},
        "bytes, not bits": {"bus": 8},
    }  # fmt: skip


# --- What is expected ------------------------------------------------------------------------------


def _said(what: str) -> Callable[[Seen, float], str]:
    return lambda seen, right: (
        f"{seen.case.op} of {seen.case.world_size} ranks, {len(seen.case.nbytes)} sizes: {what} {right:.6g}"
    )


def counted(seen: Seen) -> Fault | None:
    """Beta belongs to the bytes that are counted: in an all_gather, and only there, those of all ranks."""
    op, w, beta, found = seen.case.op, seen.case.world_size, worked(seen)[1], seen["value"][1]
    cause = f"only an all_gather's bytes are counted over all ranks; in {op} each rank hands in S already"
    if op == "all_gather":
        cause = "an all_gather's bytes are those of all ranks, as nccl-tests counts them: W times what one rank gives"
    if not close(found, beta * w if op == "all_gather" else beta / w):
        return None
    return Fault(_said("beta")(seen, beta), f"{found:.6g}", cause=cause)


def number(index: int, what: str, otherwise: str) -> Expect:
    """Return what is expected of one of the three numbers."""

    def reference(seen: Seen, **knobs: Any) -> float:
        return worked(seen, **knobs)[index]

    return equals(_said(what), reference, turned(reference, _mistakes), otherwise, of=lambda seen: seen["value"][index])


NAMES, FIT = "alpha, beta, bus", "alpha and beta are to make the sum of ((alpha + beta * S - t) / t) ** 2 least"
alpha, beta = number(0, "alpha", FIT), number(1, "beta", FIT)
rate = "the factor is 2 (W - 1) / W, (W - 1) / W or 1, by the collective; times 1 / beta"
bus = number(2, "bus bandwidth in bytes a second", rate)
line = numbers(NAMES, alpha, beta)  # what is wrong on the line already has been named there

COST = exercise(
    "14.1",
    "What a message costs",
    "message_cost",
    20,
    act=called,
    rounds=rounds,
    checks={
        "line": ("times on a line: alpha and beta", 1, line, "exact"),
        "relative": ("times beside it: the smallest relative errors", 2, line, "noisy"),
        "bus": ("the bus bandwidth", 2, numbers(NAMES, counted, bus), "others"),
        "bytes": ("an all_gather", 1, numbers(NAMES, counted, alpha, beta, bus), "gather"),
    },
    hints={
        r"KeyError|UnboundLocalError": "the collectives are all_reduce, all_gather, reduce_scatter and broadcast",
        r"singular|LinAlgError|ZeroDivisionError": "the equations have no answer; are sizes and times in their places?",
        r"missing \d required|takes \d+ positional": "the four arguments come in the order of the text",
        "limit": "no search is needed: two equations with two unknowns",
    },
)
