"""13.2 `message_cost(...)`: alpha, beta and the bus bandwidth of a collective, from times over sizes.

A pure function. The times of the first cases lie on a line, which any fit finds. Those of the others are off by some
percent, and lines fitted with other weights are other lines, each of which the judge works out by torch's least
squares.

Source: nccl-tests, doc/PERFORMANCE.md, for sizes and factors.
Read next: `event_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.scaling.slips import first_fault, form_fault, number_fault, same

NAMES = "alpha, beta, bus"
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "all_gather": lambda w: (w - 1) / w,
    "reduce_scatter": lambda w: (w - 1) / w,
    "broadcast": lambda w: 1.0,
}
RELATIVE = (
    "the largest message decides this line, for its error is the largest in seconds; weigh each error by its time: "
    "divide by t before it is squared"
)


class Case(NamedTuple):
    """The arguments of the learner's function."""

    op: str
    world_size: int
    nbytes: list[int]
    seconds: list[float]


def driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Return the learner's answer for each case."""
    return [plain(function(*case)) for case in cases]


def cost_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Times on a line, times beside it, the other collectives, and an all_gather."""
    exact = [_case(rng, "all_reduce", 0.0) for _ in range(2)]
    noisy = [_case(rng, "all_reduce", 0.12) for _ in range(3)]
    others = [_case(rng, op, 0.0) for op in ("all_reduce", "reduce_scatter", "broadcast")]
    gather = [_case(rng, "all_gather", noise) for noise in (0.0, 0.08)]
    found = answer.run(driver, 1, exact + noisy + others + gather, init=False)[0]
    line = first_fault(exact, found[:2], _line_fault)
    yield "line", line
    # What is wrong on the line already has been named there.
    yield "relative", first_fault(noisy, found[2:5], _line_fault)
    yield "bus", first_fault(others, found[5:8], _bus_fault)
    yield "bytes", first_fault(gather, found[8:], _gather_fault)


def _case(rng: Random, op: str, noise: float) -> Case:
    world_size = rng.choice((3, 4, 6))
    alpha, beta = rng.uniform(20e-6, 90e-6), rng.uniform(0.2e-9, 0.9e-9)
    nbytes = [world_size * 4 * 4**power for power in range(2, 10)]
    counted = _counted(op, world_size, nbytes)
    seconds = [(alpha + beta * size) * (1 + rng.choice((-1, 1)) * noise * rng.uniform(0.5, 1)) for size in counted]
    return Case(op, world_size, nbytes, seconds)


def _counted(op: str, world_size: int, nbytes: list[int]) -> list[int]:
    return [size * world_size if op == "all_gather" else size for size in nbytes]


def fitted(sizes: list[int], seconds: list[float], power: float) -> tuple[float, float]:
    """The line for which the sum of squared errors, each divided by its time to this power, is least."""
    size, t = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    scale = size.max()  # so that both columns are of one magnitude
    columns = torch.stack([torch.ones_like(size), size / scale], dim=1) / t[:, None] ** power
    alpha, beta = torch.linalg.lstsq(columns, (t / t**power)[:, None]).solution.flatten().tolist()
    return alpha, beta / scale.item()


def logarithmic(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """A line through the logarithms: an exponent and a factor, which are neither latency nor bandwidth."""
    x, y = torch.tensor(sizes, dtype=torch.float64).log(), torch.tensor(seconds, dtype=torch.float64).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return (y.mean() - slope * x.mean()).exp().item(), slope.item()


def right_line(case: Case) -> tuple[float, float]:
    return fitted(_counted(case.op, case.world_size, case.nbytes), case.seconds, 1.0)


def _said(case: Case) -> str:
    return f"{case.op} of {case.world_size} ranks, {len(case.nbytes)} sizes"


def _line_fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    sizes, t = _counted(case.op, case.world_size, case.nbytes), case.seconds
    alpha, beta = right_line(case)
    lines = {
        RELATIVE: fitted(sizes, t, 0.0),
        "the errors are weighed by the root of the time; the relative error is error / t": fitted(sizes, t, 0.5),
        "the errors are weighed twice: the weight belongs to the error, and is squared with it": fitted(sizes, t, 2.0),
        "a line through logarithms has a factor and an exponent, and no latency": logarithmic(sizes, t),
        "two sizes make a line of their own errors; use all of them": _through(sizes, t, 0, -1),
        "the smallest time is no latency yet: bytes are in it, and an error": (t[0], _through(sizes, t, 0, -1)[1]),
    }
    alphas = {cause: line[0] for cause, line in lines.items()}
    alphas |= {"alpha is in seconds": 1e6 * alpha, "alpha comes first, then beta": beta}
    betas = {cause: line[1] for cause, line in lines.items()}
    betas |= {
        "beta is the seconds of a byte, not the bytes of a second": 1 / beta,
        "beta is the seconds of one byte, not of a MiB": beta * 2**20,
        "beta is the seconds of one byte, not of a MB": beta * 1e6,
        "beta is the seconds of one byte, not of a number of 4 bytes": beta * 4,
        "beta belongs to the bytes of the tensor, not to those that a rank sends": beta
        / FACTORS[case.op](case.world_size),
    }
    otherwise = "alpha and beta are to make the sum of ((alpha + beta * S - t) / t) ** 2 least"
    what = _said(case)
    return number_fault(f"{what}: alpha", answer[0], alpha, alphas, otherwise) or number_fault(
        f"{what}: beta", answer[1], beta, betas, otherwise
    )


def _through(sizes: list[int], t: list[float], one: int, other: int) -> tuple[float, float]:
    beta = (t[other] - t[one]) / (sizes[other] - sizes[one])
    return t[one] - beta * sizes[one], beta


def _bus_fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    w, (_, beta) = case.world_size, right_line(case)
    factor = FACTORS[case.op](w)
    size, t = _counted(case.op, w, case.nbytes)[-1], case.seconds[-1]
    if case.op != "all_gather" and same(answer[1], beta / w):
        cause = f"only an all_gather's bytes are counted over all ranks; in {case.op} each rank hands in S already"
        return Fault(f"{_said(case)}: beta {beta:.6g}", f"{answer[1]:.6g}", cause=cause)
    slips = {
        "that is the algorithm bandwidth; multiply it by the collective's factor": 1 / beta,
        "an all_reduce moves each byte twice, there and back: 2 (W - 1) / W": (w - 1) / w / beta,
        "2 (W - 1) / W is all_reduce's: each collective has a factor of its own": 2 * (w - 1) / w / beta,
        "the factor is divided by W: each of W ranks sends its part at the same time": factor * w / beta,
        "that is the bus bandwidth at the largest size, with the latency still in it; beta is without": factor
        * size
        / t,
        "the factor multiplies the bandwidth; it does not divide it": 1 / factor / beta,
        "bytes in a second, not 10^9 of them": factor / beta / 1e9,
        "bytes in a second, not 2^30 of them": factor / beta / 2**30,
        "bytes, not bits": 8 * factor / beta,
    }
    otherwise = "the factor is 2 (W - 1) / W, (W - 1) / W or 1, by the collective; times 1 / beta"
    return number_fault(f"{_said(case)}: bus bandwidth in bytes a second", answer[2], factor / beta, slips, otherwise)


def _gather_fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    w, (_, beta) = case.world_size, right_line(case)
    share = (
        "an all_gather's bytes are those of all ranks together, as nccl-tests counts them: W times what one rank gives"
    )
    if same(answer[1], beta * w):
        return Fault(f"{_said(case)}: beta {beta:.6g}", f"{answer[1]:.6g}", cause=share)
    return _line_fault(case, answer) or _bus_fault(case, answer)


COST = Exercise(
    "13.2",
    "What a message costs",
    "message_cost",
    20,
    (
        Check("line", "times on a line: alpha and beta", 1),
        Check("relative", "times beside it: the smallest relative errors", 2),
        Check("bus", "the bus bandwidth", 2),
        Check("bytes", "an all_gather", 1),
    ),
    cost_judge,
    refused=("ddp_course.scaling.collective_cost.fit_link", "ddp_course.scaling.collective_cost.bus_factor"),
    hints=(
        (r"KeyError|UnboundLocalError", "the collectives are all_reduce, all_gather, reduce_scatter and broadcast"),
        (
            r"singular|LinAlgError|ZeroDivisionError",
            "the equations have no answer; are sizes and times in their places?",
        ),
        (r"missing \d required|takes \d+ positional", "the four arguments come in the order of the text"),
        (r"no result after", "no search is needed: two equations with two unknowns"),
    ),
)
