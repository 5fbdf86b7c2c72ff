"""11.1 `rate_at(...)`: is the learning rate right at every step, whatever was asked before?

A pure function. Each typical slip, such as a warm-up that counts steps in place of epochs, gives a rate of its own,
which the judge knows. Each check has settings in which only its own part of the formula matters.

Source: Goyal et al. 2017 (arXiv 1706.02677), sections 2.1 and 2.2.
Read next: `shift.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

DIVIDED = "ZeroDivisionError"
NO_WARMUP = "with warmup 0 there is no warm-up to divide by; ask `step < warm-up steps` first"

UNSHARED = "the ranks share the rows: an epoch has rows / (local_batch * world_size) steps, rounded up"


class Case(NamedTuple):
    """The arguments of the learner's function, in its order."""

    step: int
    rows: int
    local_batch: int
    world_size: int
    epochs: int
    warmup: float
    base_lr: float
    base_batch: int


def driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Return the learner's rates, asked in order, and once more from the last to the first."""
    forth = [_asked(function, case) for case in cases]
    back = [_asked(function, case) for case in reversed(cases)]
    return [forth, back[::-1]]


def _asked(function: Callable, case: Case) -> Any:
    try:
        return plain(function(*case))
    except ZeroDivisionError:
        if case.warmup:
            raise
        return DIVIDED  # it costs the cases without a warm-up, and no others


def right(case: Case, **other: float) -> float:
    """Return the rate; `other` replaces parts of the formula by those of a slip."""
    c = case
    steps = other.get("steps", math.ceil(c.rows / (c.local_batch * c.world_size)))
    warm, end = other.get("warm", c.warmup * steps), other.get("end", c.epochs * steps)
    peak = other.get("peak", c.base_lr * c.local_batch * c.world_size / c.base_batch)
    if c.step < warm:
        first = other.get("first", c.base_lr)
        return first + (peak - first) * (c.step + other.get("ahead", 0)) / warm
    return peak * (1 + math.cos(math.pi * (c.step - other.get("behind", warm)) / (end - other.get("less", warm)))) / 2


def rate_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Near the peak, without a warm-up; the warm-up, the cosine, and rows that do not fill the last batch."""
    even = [_settings(rng, uneven=False) for _ in range(3)]
    # So many epochs that step 1 is at the peak still, whatever the curve. Step 0 is a case of its own: `step <= warm`.
    peaks = [case._replace(warmup=0.0, step=1, epochs=900) for case in even]
    at_once = [even[0]._replace(warmup=0.0, step=0)]
    rising = [_at(rng, case, 0.2, 0.9) for case in even]
    # Here the scale is 1, so that a slip in the scaling costs no points that belong to the cosine.
    falling = [_at(rng, _unscaled(case), 1.3, 0.95 * case.epochs / case.warmup) for case in even]
    odd = [_at(rng, _unscaled(_settings(rng, uneven=True)), 1.5, 1.9) for _ in range(4)]
    cases = peaks + rising + at_once + falling + odd
    forth, back = answer.run(driver, 1, cases, init=False)[0]
    for key, fault in _lines(cases, forth):
        yield key, fault and replace(fault, cause=UNSHARED) if _shares_nothing(rising, forth[3:6]) else fault
    yield "pure", _pure_fault(cases, forth, back)


def _shares_nothing(rising: list[Case], found: list[Any]) -> bool:
    """Whether the warm-up has as many steps as one rank alone would take. The other cases cannot tell for sure."""
    alone = [right(case, steps=case.rows / case.local_batch) for case in rising]
    return all(close(rate, value, 1e-5) for rate, value in zip(found, alone, strict=True))


def _lines(cases: list[Case], forth: list[Any]) -> Iterator[tuple[str, Fault | None]]:
    yield "peak", _first(_peak_slips, cases[:3], forth[:3], 1e-3)
    yield "warmup", _first(_warmup_slips, cases[3:7], forth[3:7])
    yield "cosine", _first(_cosine_slips, cases[7:10], forth[7:10])
    yield "steps", _first(_step_slips, cases[10:], forth[10:])


def _settings(rng: Random, *, uneven: bool) -> Case:
    world_size, local_batch = rng.choice((2, 4, 6)), rng.choice((8, 24))
    steps = rng.randint(20, 40)
    rows = steps * world_size * local_batch - (rng.randint(2, world_size * local_batch - 1) if uneven else 0)
    base_lr, base_batch = rng.choice((0.04, 0.1)), rng.choice((32, 128))
    return Case(0, rows, local_batch, world_size, rng.randint(6, 9), rng.choice((1.5, 2.5)), base_lr, base_batch)


def _unscaled(case: Case) -> Case:
    return case._replace(base_batch=case.local_batch * case.world_size)


def _at(rng: Random, case: Case, low: float, high: float) -> Case:
    """The case at a step between `low` and `high` times the warm-up's length."""
    warm = case.warmup * math.ceil(case.rows / (case.local_batch * case.world_size))
    return case._replace(step=rng.randint(math.ceil(low * warm), math.floor(high * warm)))


def _first(slips_of: Callable, cases: list[Case], found: list[Any], tolerance: float = 1e-6) -> Fault | None:
    faults = (_fault(slips_of, case, rate, tolerance) for case, rate in zip(cases, found, strict=True))
    return next(filter(None, faults), None)


def _fault(slips_of: Callable, case: Case, rate: Any, tolerance: float) -> Fault | None:
    said = ", ".join(f"{name} {value:g}" for name, value in case._asdict().items())
    numbers = flat(rate)
    if rate == DIVIDED or (numbers and not case.warmup and not math.isfinite(numbers[0])):
        return Fault(f"{said}: {right(case):.6g}", rate if rate == DIVIDED else short(rate), cause=NO_WARMUP)
    if numbers is None or len(numbers) != 1 or not math.isfinite(numbers[0]):
        return Fault(f"{said}: one number", short(rate), cause="return the learning rate of the step, a float")
    if close(rate, right(case), tolerance):
        return None
    slips = [(value, words) for value, words in (*slips_of(case), *_peak_slips(case)) if math.isfinite(value)]
    cause = next((words for value, words in slips if close(rate, value, max(tolerance, 1e-5))), "")
    return Fault(f"{said}: {right(case):.6g}", short(numbers[0]), cause=cause or _part(case))


def _part(case: Case) -> str:
    if case.warmup and case.step < case.warmup * math.ceil(case.rows / (case.local_batch * case.world_size)):
        return "in the warm-up the rate goes in a straight line from base_lr to the peak"
    return "after the warm-up: peak * (1 + cos(pi * x)) / 2, with x from 0 at the warm-up's end to 1 at the run's end"


def _peak_slips(case: Case) -> list[tuple[float, str]]:
    scale = case.local_batch * case.world_size / case.base_batch
    peaks = {
        case.base_lr: "the rate is not scaled: a global batch k times base_batch wants k times base_lr",
        case.base_lr * case.world_size: "the scale is the global batch divided by base_batch, not the number of ranks",
        case.base_lr * case.local_batch / case.base_batch: "that scales by one rank's batch; the global batch is "
        "local_batch * world_size",
        case.base_lr / scale: "a larger batch wants a larger rate: multiply by global batch / base_batch",
        case.base_lr * math.sqrt(scale): "that is the square root; the linear rule multiplies by the scale itself",
    }
    return [(right(case, peak=peak), words) for peak, words in peaks.items()]


def _warmup_slips(case: Case) -> list[tuple[float, str]]:
    peak = case.base_lr * case.local_batch * case.world_size / case.base_batch
    return [
        (peak, "there is no warm-up: for the first `warmup` epochs the rate rises"),
        (case.base_lr, "the rate stays at base_lr during the warm-up; it rises to the scaled peak"),
        (right(case, first=0.0), "the warm-up begins at base_lr, not at 0, at which the first step would do nothing"),
        (right(case, ahead=1), "step 0 has base_lr itself: rise by step / warm-up steps, not by step + 1"),
        (right(case, first=0.0, ahead=1), "the warm-up begins at base_lr, at step 0"),
        (right(case, warm=case.warmup), "`warmup` counts epochs; multiply by the steps of an epoch"),
        (right(case, warm=0.0), "there is no warm-up: for the first `warmup` epochs the rate rises"),
        *_unshared(case),
    ]


def _unshared(case: Case) -> list[tuple[float, str]]:
    each = case.rows / case.local_batch
    return [(right(case, steps=steps), UNSHARED) for steps in (math.ceil(each), math.floor(each), each)]


def _cosine_slips(case: Case) -> list[tuple[float, str]]:
    steps = math.ceil(case.rows / (case.local_batch * case.world_size))
    peak = case.base_lr * case.local_batch * case.world_size / case.base_batch
    warm, end = case.warmup * steps, case.epochs * steps
    x = (case.step - warm) / (end - warm)
    return [
        (right(case, behind=0.0, less=0.0), "the cosine begins where the warm-up ends, not at step 0"),
        (right(case, less=0.0), "the cosine lasts from the warm-up's end to the run's end: divide by total - warm-up"),
        (right(case, behind=0.0), "count the cosine's steps from the end of the warm-up"),
        (peak * math.cos(math.pi * x), "that wave goes below zero: (1 + cos(pi * x)) / 2"),
        (peak * math.cos(math.pi * x / 2), "that is a quarter of a wave: (1 + cos(pi * x)) / 2"),
        (peak * (1 - x), "that is a straight line down; the cosine falls slowly at first and at last"),
        (peak, "after the warm-up the rate falls along a cosine, to 0 at the end"),
        (right(case, end=end - 1), "x is 1 at the end of the last epoch, one step after the last step"),
        (right(case, end=end + 1), "x is 1 at the end of the last epoch, which is step epochs * steps of an epoch"),
        (right(case, end=case.epochs), "`epochs` counts epochs; multiply by the steps of an epoch"),
        (right(case, warm=case.warmup), "`warmup` counts epochs; multiply by the steps of an epoch"),
        (right(case, warm=math.floor(warm)), "the warm-up's length need not be a whole number of steps: do not round"),
        (right(case, warm=math.ceil(warm)), "the warm-up's length need not be a whole number of steps: do not round"),
        *_unshared(case),
    ]


def _step_slips(case: Case) -> list[tuple[float, str]]:
    batch = case.local_batch * case.world_size
    rounded_up = "the last batch of an epoch may be smaller, and is a step too: round the steps of an epoch up"
    return [
        (right(case, steps=case.rows // batch), rounded_up),
        (right(case, steps=case.rows / batch), rounded_up),
        (right(case, steps=round(case.rows / batch)), rounded_up),
        (right(case, steps=case.rows // batch + 2), rounded_up),
        *_warmup_slips(case),
        *_cosine_slips(case),
    ]


def _pure_fault(cases: list[Case], forth: list[Any], back: list[Any]) -> Fault | None:
    for case, one, two in zip(cases, forth, back, strict=True):
        if repr(one) != repr(two):  # nan is not equal to itself
            found = f"step {case.step}: first {short(one)}, then {short(two)}"
            cause = "the function remembers something; compute the rate from the arguments alone"
            return Fault("the same rate whenever the same step is asked for", found, cause=cause)
    return None


RATE = Exercise(
    "11.1",
    "The rate at a step",
    "rate_at",
    15,
    (
        Check("peak", "the peak, by the linear scaling rule", 1),
        Check("warmup", "the warm-up, from base_lr to the peak", 1),
        Check("cosine", "the cosine, from the peak to 0", 1),
        Check("steps", "the last batch of an epoch is not full", 1),
        Check("pure", "asked again, in another order", 1),
    ),
    rate_judge,
    refused=("ddp_course.train.schedule.share_of_rate",),
    hints=((r"no result after", "a loop that never ends; the rate is a formula, no loop is needed"),),
)
