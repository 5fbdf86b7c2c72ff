"""13.1 `efficiency(...)`: what did the ranks bring, and how sure is that?

A pure function, judged on planted rounds. Each round is slowed by a factor of its own, as on a busy machine, and its
first steps are slow. So a mean of quotients, a mean of rates, a median, a warm-up left in, and each other slip give
numbers of their own.

Read next: `message_cost.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from judges.scaling.slips import first_fault, form_fault, number_fault, same

STEPS = 6
T = {4: 3.182, 5: 2.776, 6: 2.571}  # Student's t for 95 %, by the number of rounds
NAMES = "value, low, high"

Rounds = list[list[float]]


class Case(NamedTuple):
    """The arguments of the learner's function."""

    alone: Rounds
    together: Rounds
    world_size: int
    mode: str
    warmup: int
    t: float


class Worked(NamedTuple):
    """What the case comes to."""

    value: float
    half: float  # half of the interval


def driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Return the learner's answer for each case."""
    return [plain(function(*case)) for case in cases]


def efficiency_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Weak, strong, both with a warm-up, and the intervals of all."""
    weak = [_case(rng, "weak") for _ in range(3)]
    strong = [_case(rng, "strong") for _ in range(3)]
    warm = [_case(rng, mode, warmup) for mode, warmup in (("weak", 2), ("strong", 1))]
    found = answer.run(driver, 1, weak + strong + warm, init=False)[0]
    yield "weak", first_fault(weak, found[:3], _value_fault)
    yield "strong", first_fault(strong, found[3:6], _value_fault)
    yield "warmup", first_fault(warm, found[6:], _warm_fault)
    yield "interval", first_fault(weak + strong + warm, found, _interval_fault)


def _case(rng: Random, mode: str, warmup: int = 0) -> Case:
    """Rounds in which both runs are slowed alike; one of them much."""
    rounds, world_size = rng.choice((4, 5, 6)), rng.choice((2, 4, 8))
    base, kept = rng.uniform(0.05, 0.2), rng.uniform(0.55, 0.85)
    fair = base / (world_size if mode == "strong" else 1) / kept
    slow = [rng.uniform(1, 1.3) for _ in range(rounds - 1)]
    slow.insert(rng.randrange(rounds), 2.5)

    def run(step_s: float, noise: float) -> list[float]:
        cold = [3.0 + rng.random() if step < warmup else 1.0 for step in range(STEPS)]
        tilt = rng.uniform(0.85, 1.15)
        return [round(step_s * noise * tilt * c * rng.uniform(0.97, 1.06), 6) for c in cold]

    return Case(
        [run(base, noise) for noise in slow], [run(fair, noise) for noise in slow], world_size, mode, warmup, T[rounds]
    )


def worked(case: Case) -> Worked:
    """The quotient of sums, and the standard error of what each round leaves over, t times."""
    alone, together = _means(case.alone, case.warmup), _means(case.together, case.warmup)
    above = [fair_share(case) * a for a in alone]
    value = sum(above) / sum(together)
    left = [a - value * b for a, b in zip(above, together, strict=True)]
    return Worked(value, case.t * _spread(left) / math.sqrt(len(left)) / mean(together))


def fair_share(case: Case) -> float:
    return 1 / case.world_size if case.mode == "strong" else 1.0


def _means(rounds: Rounds, warmup: int) -> list[float]:
    return [mean(steps[warmup:]) for steps in rounds]


def _spread(left: list[float]) -> float:
    """The standard deviation around 0, with one degree of freedom less than there are rounds."""
    return math.sqrt(sum(x * x for x in left) / (len(left) - 1))


def _said(case: Case) -> str:
    warm = f", warm-up of {case.warmup}" if case.warmup else ""
    return f"{case.world_size} ranks, {case.mode} scaling, {len(case.alone)} rounds{warm}"


def _value_slips(case: Case) -> dict[str, float]:
    alone, together, share = _means(case.alone, 0), _means(case.together, 0), fair_share(case)
    value = share * sum(alone) / sum(together)
    if case.mode == "weak":
        divided = "in weak scaling every rank has as many rows as the one alone: the steps are compared as they are"
    else:
        divided = "in strong scaling the ranks divide one batch: a step that takes 1 / W of the time is efficiency 1"
    mean_of_ratios = share * mean(a / b for a, b in zip(alone, together, strict=True))
    return {
        "that is a mean of the rounds' quotients, in which a round that was slow by chance counts like any other; "
        "divide all seconds of the one by all seconds of the other": mean_of_ratios,
        "that is a quotient of mean rates; a rate is rows by seconds, so add up the seconds and divide once": share
        * mean(1 / b for b in together)
        / mean(1 / a for a in alone),
        "that is how many times slower the ranks are: turn the quotient round": 1 / value,
        divided: value / case.world_size if case.mode == "weak" else value * case.world_size,
        "that is the speedup: for the efficiency, divide by the number of ranks": value * case.world_size,
        "W is divided by twice": value / case.world_size,
        "that is a quotient of medians; the rounds that were slow took time too": share
        * median(alone)
        / median(together),
        "that is a quotient of the best rounds; the others took time too": share * min(alone) / min(together),
        "an efficiency is no percentage: 1 is all": 100 * value,
    }


def _value_fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    otherwise = "all seconds of one rank by all seconds of the W ranks; in strong scaling a W-th of it"
    return number_fault(_said(case), answer[0], worked(case).value, _value_slips(case), otherwise)


def _warm_fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    share, kept = fair_share(case), case.warmup

    def quotient(alone: Rounds, together: Rounds) -> float:
        return share * sum(map(mean, alone)) / sum(map(mean, together))

    def cut(rounds: Rounds) -> Rounds:
        return [steps[kept:] for steps in rounds]

    slips = {
        "the warm-up is still in it: leave out the first steps of every round": quotient(case.alone, case.together),
        "whole rounds are left out; the warm-up is the first steps of each": quotient(
            case.alone[kept:], case.together[kept:]
        ),
        "the first round alone is cut; each round begins with a warm-up": quotient(
            [case.alone[0][kept:], *case.alone[1:]], [case.together[0][kept:], *case.together[1:]]
        ),
        "one rank keeps its warm-up: cut both": quotient(case.alone, cut(case.together)),
        "the W ranks keep their warm-up: cut both": quotient(cut(case.alone), case.together),
        "the last steps are cut instead of the first": quotient(
            [s[:-kept] for s in case.alone], [s[:-kept] for s in case.together]
        ),
        "one step is cut, whatever `warmup` says": quotient(
            [s[1:] for s in case.alone], [s[1:] for s in case.together]
        ),
    }
    if fault := number_fault(_said(case), answer[0], worked(case).value, slips, ""):
        if fault.cause:
            return fault
        return _value_fault(case._replace(alone=cut(case.alone), together=cut(case.together), warmup=0), answer)
    return None


def _interval_fault(case: Case, answer: Any) -> Fault | None:
    if fault := form_fault(answer, NAMES):
        return fault
    right, (value, low, high) = worked(case), answer
    what = f"{_said(case)}: from value - {right.half:.6g} to value + {right.half:.6g}"
    shown = f"from {value:.6g} {low - value:+.6g} to {value:.6g} {high - value:+.6g}"
    if low > high:
        return Fault(what, shown, cause="the lower end comes first: (value, low, high)")
    if not same(value - low, high - value) and abs((value - low) - (high - value)) > 1e-9:
        return Fault(what, shown, cause="the interval reaches as far below the value as above it: t standard errors")
    if not same(value, right.value):
        # What a warm-up does to the value has a line of its own.
        return None if case.warmup else Fault(what, shown, cause="first let the value itself be right")
    if same(high - value, right.half):
        return None
    if case.warmup:  # the cases without have their own causes, and come first
        return Fault(what, shown, cause="a and b leave the warm-up out too: the interval is made of the value's steps")
    cause = next((c for c, half in _half_slips(case, right).items() if same(high - value, half)), "")
    otherwise = "what each round leaves over is a - value * b, with a and b as in the value's sums"
    return Fault(what, shown, cause=cause or otherwise)


def _half_slips(case: Case, right: Worked) -> dict[str, float]:
    alone, together, share = _means(case.alone, 0), _means(case.together, 0), fair_share(case)
    rounds, above = len(alone), [share * a for a in alone]
    quotients = [a / b for a, b in zip(above, together, strict=True)]
    apart = [_spread([x - mean(side) for x in side]) / mean(side) for side in (above, together)]
    return {
        "that is one standard error: multiply it by t": right.half / case.t,
        "1.96 is for many rounds; few need the t that is given": right.half / case.t * 1.96,
        "that is the spread of the rounds; their mean is known better, by the root of their number": right.half
        * math.sqrt(rounds),
        "divide by n - 1, not by n: one number has been taken from these rounds already": right.half
        * math.sqrt((rounds - 1) / rounds),
        "divide by the mean seconds of the W ranks: the quotient has no unit": right.half * mean(together),
        "the whole interval is twice as wide: t standard errors on each side": right.half / 2,
        "t standard errors on each side, not twice as many": right.half * 2,
        "the runs are taken as if they had nothing in common; a slow round slows both, and the quotient stays": case.t
        * right.value
        * math.hypot(*apart)
        / math.sqrt(rounds),
        "that is the interval of a mean of quotients": case.t
        * _spread([q - mean(quotients) for q in quotients])
        / math.sqrt(rounds),
        "in strong scaling `a` is a W-th of the seconds of one rank, here too": case.t
        * _spread([a - right.value * b for a, b in zip(alone, together, strict=True)])
        / math.sqrt(rounds)
        / mean(together),
    }


EFFICIENCY = Exercise(
    "13.1",
    "What the ranks brought, and how sure that is",
    "efficiency",
    20,
    (
        Check("weak", "weak scaling", 2),
        Check("strong", "strong scaling", 1),
        Check("warmup", "the warm-up is left out", 1),
        Check("interval", "the interval", 2),
    ),
    efficiency_judge,
    refused=(
        "ddp_course.scaling.intervals.ratio_interval",
        "ddp_course.scaling.intervals.mean_interval",
        "ddp_course.scaling.efficiency.Scaling",
    ),
    hints=(
        (r"ZeroDivisionError", "nothing is left to divide by; is the warm-up cut from the steps of each round?"),
        (r"missing \d required|takes \d+ positional", "the six arguments come in the order of the text"),
        (r"no result after", "nothing here needs a loop without an end"),
    ),
)
