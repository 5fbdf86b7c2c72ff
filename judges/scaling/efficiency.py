"""14.1 `efficiency(...)`: what did the ranks bring, and how sure is that?

A pure function, judged on planted rounds. Each round is slowed by a factor of its own, as on a busy machine, and its
first steps are slow. So a mean of quotients, a mean of rates, a median, a warm-up left in, and each other slip give
numbers of their own. In all tables `a` is what the ranks' seconds would be at best, by round, and `b` what they are.

Read next: `message_cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch

from ddp_course.grading.vocabulary.compare import close, flat, short
from ddp_course.grading.vocabulary.expect import called, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.scaling.slips import numbers

STEPS, NAMES = 6, "value, low, high"
T = {2: 12.706, 4: 3.182, 5: 2.776, 6: 2.571}  # Student's t for 95 %, by the number of rounds
Rounds = list[list[float]]
Cut = Callable[[Rounds, int], Rounds]  # (rounds, warmup) -> what is left of them


class Case(NamedTuple):
    """The arguments of the learner's function."""

    alone: Rounds
    together: Rounds
    world_size: int
    mode: str
    warmup: int
    t: float


def rounds(rng: Random) -> list[Round]:
    """Weak, strong, and both with a warm-up; one of each with an interval that reaches beyond 0 and 1."""
    cases = [(mode, _case(rng, mode, few=not n)) for mode in ("weak", "strong") for n in range(3)]
    return [Round(1, [*cases, ("warm", _case(rng, "weak", 2)), ("warm", _case(rng, "strong", 1))], init=False)]


def _case(rng: Random, mode: str, warmup: int = 0, few: bool = False) -> Case:
    """Rounds in which both runs are slowed alike; one of them much. Few: two, and ranks whose caches help them."""
    count, world_size = 2 if few else rng.choice((4, 5, 6)), rng.choice((2, 4, 8))
    base, kept = rng.uniform(0.05, 0.2), rng.uniform(*((1.05, 1.2) if few else (0.55, 0.85)))
    fair = base / (world_size if mode == "strong" else 1) / kept
    slow = [rng.uniform(1, 1.3) for _ in range(count - 1)]
    slow.insert(rng.randrange(count), 2.5)

    def run(step_s: float, noise: float) -> list[float]:
        cold = [3.0 + rng.random() if step < warmup else 1.0 for step in range(STEPS)]
        tilt = rng.uniform(0.85, 1.15)
        return [round(step_s * noise * tilt * c * rng.uniform(0.97, 1.06), 6) for c in cold]

    alone, together = ([run(step_s, noise) for noise in slow] for step_s in (base, fair))
    return Case(alone, together, world_size, mode, warmup, T[count])


# --- What is right, with knobs for what is not -----------------------------------------------------


def each(rounds: Rounds, warmup: int) -> Rounds:
    """Leave out the first steps of every round."""
    return [steps[warmup:] for steps in rounds]


def sides(seen: Seen, cuts: tuple[Cut, Cut] = (each, each), scaled: bool = True) -> list[torch.Tensor]:
    """Return `a` and `b`."""
    share = 1 / seen.case.world_size if scaled and seen.case.mode == "strong" else 1
    kept = (cut(rounds, seen.case.warmup) for cut, rounds in zip(cuts, seen.case[:2], strict=True))
    a, b = (torch.tensor([sum(steps) / len(steps) for steps in rounds], dtype=torch.float64) for rounds in kept)
    return [share * a, b]


def value(seen: Seen, of: Callable = lambda a, b: a.sum() / b.sum(), times: float = 1, **cuts: tuple) -> torch.Tensor:
    """Return the quotient of sums."""
    return times * of(*sides(seen, **cuts))


def left(a: torch.Tensor, b: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the standard error of the value, by what each round leaves over: one degree of freedom is gone."""
    return ((a - value * b) ** 2).sum().div(len(a) * (len(a) - 1)).sqrt() / b.mean()


def interval(seen: Seen, of: Callable = left, times: float = 1, scaled: bool = True) -> Any:
    """Return value, low and high: t standard errors below and above."""
    v = value(seen)
    if seen.case.warmup and not close(seen["value"][0], v):
        return seen["value"]  # what a warm-up does to the value has a line of its own
    half = times * seen.case.t * of(*sides(seen, scaled=scaled), v)
    return torch.stack([v, v - half, v + half])


def _value_mistakes(seen: Seen) -> dict[str, dict]:
    w, weak = seen.case.world_size, seen.case.mode == "weak"
    cut = {
        "the warm-up is still in it: leave out the first steps of every round": (whole := lambda r, n: r, whole),
        "whole rounds are left out; the warm-up is the first steps of each": [lambda r, n: r[n:]] * 2,
        "the first round alone is cut; each round begins with a warm-up": [lambda r, n: [r[0][n:], *r[1:]]] * 2,
        "one rank keeps its warm-up: cut both": (whole, each),
        "the W ranks keep their warm-up: cut both": (each, whole),
        "the last steps are cut instead of the first": [lambda r, n: [steps[:-n] for steps in r]] * 2,
        "one step is cut, whatever `warmup` says": [lambda r, n: each(r, 1)] * 2,
    }  # fmt: skip
    divided = (
        "in weak scaling every rank has as many rows as the one alone: the steps are compared as they are"
        if weak
        else "in strong scaling the ranks divide one batch: a step that takes 1 / W of the time is efficiency 1"
    )
    return {cause: {"cuts": cuts} for cause, cuts in cut.items() if seen.case.warmup} | {
        "that is a mean of the rounds' quotients, in which a round that was slow by chance counts like any other; "
        "divide all seconds of the one by all seconds of the other":
            {"of": lambda a, b: (a / b).mean()},
        "that is a quotient of mean rates; a rate is rows by seconds, so add up the seconds and divide once":
            {"of": lambda a, b: (1 / b).mean() / (1 / a).mean()},
        "that is how many times slower the ranks are: turn the quotient round": {"of": lambda a, b: b.sum() / a.sum()},
        divided: {"times": 1 / w if weak else w},
        "that is the speedup: for the efficiency, divide by the number of ranks": {"times": w},
        "W is divided by twice": {"times": 1 / w},
        "that is a quotient of medians; the rounds that were slow took time too":
            {"of": lambda a, b: a.quantile(0.5) / b.quantile(0.5)},
        "that is a quotient of the best rounds; the others took time too": {"of": lambda a, b: a.min() / b.min()},
        "an efficiency is no percentage: 1 is all": {"times": 100},
    }  # fmt: skip


def _interval_mistakes(seen: Seen) -> dict[str, dict]:
    t, n, swapped = seen.case.t, len(seen.case.alone), "the lower end comes first: (value, low, high)"
    return {swapped: {"times": -1}} if seen.case.warmup else {
        swapped: {"times": -1},
        "that is one standard error: multiply it by t": {"times": 1 / t},
        "1.96 is for many rounds; few need the t that is given": {"times": 1.96 / t},
        "that is the spread of the rounds; their mean is known better, by the root of their number": {"times": n**0.5},
        "divide by n - 1, not by n: one number has been taken from these rounds already": {"times": (1 - 1 / n) ** 0.5},
        "divide by the mean seconds of the W ranks: the quotient has no unit": {"times": sides(seen)[1].mean()},
        "the whole interval is twice as wide: t standard errors on each side": {"times": 1 / 2},
        "t standard errors on each side, not twice as many": {"times": 2},
        "the runs are taken as if they had nothing in common; a slow round slows both, and the quotient stays":
            {"of": lambda a, b, v: v * ((a.std() / a.mean()) ** 2 + (b.std() / b.mean()) ** 2).div(len(a)).sqrt()},
        "that is the interval of a mean of quotients": {"of": lambda a, b, v: (a / b).std() / len(a) ** 0.5},
        "in strong scaling `a` is a W-th of the seconds of one rank, here too": {"scaled": False},
    }  # fmt: skip


def _otherwise(seen: Seen, found: list[float]) -> str:
    if not close(found[0], value(seen)):
        return "first let the value itself be right"
    if abs(found[1] + found[2] - 2 * found[0]) > 1e-6 * found[0]:
        return "the interval reaches as far below the value as above it: t standard errors"
    if seen.case.warmup:
        return "a and b leave the warm-up out too: the interval is made of the value's steps"
    return "what each round leaves over is a - value * b, with a and b as in the value's sums"


def _said(seen: Seen, right: torch.Tensor) -> str:
    warm = f", warm-up of {seen.case.warmup}" if seen.case.warmup else ""
    case = f"{seen.case.world_size} ranks, {seen.case.mode} scaling, {len(seen.case.alone)} rounds{warm}"
    return f"{case}: {short(flat(right))}"


cause = "all seconds of one rank by all seconds of the W ranks; in strong scaling a W-th of it"
right = numbers(NAMES, equals(_said, value, turned(value, _value_mistakes), cause, of=lambda seen: seen["value"][0]))
sure = numbers(NAMES, equals(_said, interval, turned(interval, _interval_mistakes), _otherwise))

EFFICIENCY = exercise(
    "14.1",
    "What the ranks brought, and how sure that is",
    "efficiency",
    20,
    act=called,
    rounds=rounds,
    checks={
        "weak": ("weak scaling", 2, right, "weak"),
        "strong": ("strong scaling", 1, right, "strong"),
        "warmup": ("the warm-up is left out", 1, right, "warm"),
        "interval": ("the interval", 2, sure, "weak strong warm"),
    },
    refused=(
        "ddp_course.scaling.intervals.ratio_interval",
        "ddp_course.scaling.intervals.mean_interval",
        "ddp_course.scaling.efficiency.Scaling",
    ),
    hints={
        r"ZeroDivisionError": "nothing is left to divide by; is the warm-up cut from the steps of each round?",
        r"missing \d required|takes \d+ positional": "the six arguments come in the order of the text",
        "limit": "nothing here needs a loop without an end",
    },
)
