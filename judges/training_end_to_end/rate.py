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

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, flat, short
from ddp_course.grading.vocabulary.expect import Expect, equals, exercise, first_fault, nothing
from ddp_course.grading.vocabulary.play import Note, Round, Seen

DIVIDED, NO_STEPS = "ZeroDivisionError", "ZeroDivisionError, with few rows"
NO_WARMUP = "with warmup 0 there is no warm-up to divide by; ask `step < warm-up steps` first"
UNSHARED = "the ranks share the rows: an epoch has rows / (local_batch * world_size) steps, rounded up"


class Setting(NamedTuple):
    """The arguments of the learner's function, in its order."""

    step: int
    rows: int
    local_batch: int
    world_size: int
    epochs: int
    warmup: float
    base_lr: float
    base_batch: int

    @property
    def batch(self) -> int:
        """Rows of all ranks."""
        return self.local_batch * self.world_size

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.rows / self.batch)


def act(function, case: list[Setting], rank: int, world_size: int) -> Note:
    """Ask for the rates in order, and once more from the last to the first."""

    def rate(setting: Setting) -> Any:
        try:
            return plain(function(*setting))
        except ZeroDivisionError:  # it costs the settings without a warm-up, or with few rows, and no others
            return NO_STEPS if setting.warmup else DIVIDED

    rates, again = [rate(setting) for setting in case], [rate(setting) for setting in case[::-1]][::-1]
    changed = (
        f"step {setting.step}: first {short(one)}, then {short(two)}"
        for setting, one, two in zip(case, rates, again, strict=True)
        if repr(one) != repr(two)  # nan is not equal to itself
    )
    return Note(rates=rates, changed=next(changed, ""))


def rounds(rng: Random) -> list[Round]:
    """Near the peak, without a warm-up; the warm-up, the cosine, and rows that do not fill the last batch."""
    even = [_setting(rng, uneven=False) for _ in range(3)]
    # Half of base_batch, and one and a half times as much.
    even[0] = even[0]._replace(base_batch=2 * even[0].batch)
    even[1] = even[1]._replace(local_batch=24, rows=even[1].steps * even[1].world_size * 24)
    even[1] = even[1]._replace(base_batch=even[1].batch * 2 // 3)
    # So many epochs that step 1 is at the peak still, whatever the curve. Step 0 is a setting of its own.
    peaks = [setting._replace(warmup=0.0, step=1, epochs=900) for setting in even]
    # With half of the ranks, an epoch has twice the steps, though rows and local_batch are the same.
    halved = [setting._replace(world_size=setting.world_size // 2) for setting in even]
    rising = [_at(rng, setting, 0.2, 0.9) for setting in (*even, *halved)]
    # Here the scale is 1, so that a slip in the scaling costs no points that belong to the cosine.
    falling = [_at(rng, _unscaled(setting), 1.3, 0.95 * setting.epochs / setting.warmup) for setting in even]
    odd = [_at(rng, _unscaled(_setting(rng, uneven=True)), 1.5, 1.9) for _ in range(4)]
    odd[1] = odd[1]._replace(rows=odd[1].rows // odd[1].batch * odd[1].batch + 1)
    odd.append(odd[2]._replace(rows=odd[2].batch - 1, step=3))  # one step an epoch
    # Here rows * (1 / rows of a step) is a little more than the whole number that rows / rows of a step is.
    odd.append(_unscaled(odd[0]._replace(rows=27 * 77, local_batch=11, world_size=7)))
    settings = [*peaks, *rising, even[0]._replace(warmup=0.0, step=0), *falling, *odd]
    return [Round(1, [("all", settings)], init=False)]


def _setting(rng: Random, *, uneven: bool) -> Setting:
    # An odd number of steps, so that the warm-up ends in the middle of one.
    world_size, local_batch, steps = rng.choice((2, 4, 6)), rng.choice((8, 24)), 2 * rng.randint(10, 20) + 1
    rows = steps * world_size * local_batch - (rng.randint(2, world_size * local_batch - 1) if uneven else 0)
    base_lr, base_batch = rng.choice((0.04, 0.1)), rng.choice((32, 128))
    return Setting(0, rows, local_batch, world_size, rng.randint(6, 9), rng.choice((1.5, 2.5)), base_lr, base_batch)


def _unscaled(setting: Setting) -> Setting:
    return setting._replace(base_batch=setting.batch)


def _at(rng: Random, setting: Setting, low: float, high: float) -> Setting:
    """The setting at a step between `low` and `high` times the warm-up's length."""
    warm = setting.warmup * setting.steps
    return setting._replace(step=rng.randint(math.ceil(low * warm), math.floor(high * warm)))


# --- The formula, and what is made of it -----------------------------------------------------------


def rate(seen: Seen, curve: Callable = lambda x: (1 + math.cos(math.pi * x)) / 2, ahead: int = 0, **other: float):
    """Return the rate; `other` replaces parts of the formula by those of a slip."""
    c = seen.case
    steps, first = other.get("steps", c.steps), other.get("first", c.base_lr)
    warm, end = other.get("warm", c.warmup * steps), other.get("end", c.epochs * steps)
    peak = other.get("peak", c.base_lr * c.batch / c.base_batch)
    if c.step < warm:
        return first + (peak - first) * (c.step + ahead) / warm
    return peak * curve((c.step - other.get("behind", warm)) / (end - other.get("less", warm)))


def _mistakes(seen: Seen) -> list[tuple[str, dict]]:
    c, lr = seen.case, seen.case.base_lr
    warm, end, peak = c.warmup * c.steps, c.epochs * c.steps, lr * c.batch / c.base_batch
    rounded = "the last batch of an epoch may be smaller, and is a step too: round the steps of an epoch up"
    unrounded = "the warm-up's length need not be a whole number of steps: do not round"
    rising = [
        ("there is no warm-up: for the first `warmup` epochs the rate rises", {"first": peak}),
        ("the rate stays at base_lr during the warm-up; it rises to the scaled peak", {"peak": lr}),
        ("the warm-up begins at base_lr, not at 0, at which the first step would do nothing", {"first": 0.0}),
        ("step 0 has base_lr itself: rise by step / warm-up steps, not by step + 1", {"ahead": 1}),
        ("the warm-up begins at base_lr, at step 0", {"first": 0.0, "ahead": 1}),
        ("`warmup` counts epochs; multiply by the steps of an epoch", {"warm": c.warmup}),
        ("there is no warm-up: for the first `warmup` epochs the rate rises", {"warm": 0.0}),
    ]
    falling = [
        ("the cosine begins where the warm-up ends, not at step 0", {"behind": 0.0, "less": 0.0}),
        ("the cosine lasts from the warm-up's end to the run's end: divide by total - warm-up", {"less": 0.0}),
        ("count the cosine's steps from the end of the warm-up", {"behind": 0.0}),
        ("that wave goes below zero: (1 + cos(pi * x)) / 2", {"curve": lambda x: math.cos(math.pi * x)}),
        ("that is a quarter of a wave: (1 + cos(pi * x)) / 2", {"curve": lambda x: math.cos(math.pi * x / 2)}),
        ("that is a straight line down; the cosine falls slowly at first and at last", {"curve": lambda x: 1 - x}),
        ("after the warm-up the rate falls along a cosine, to 0 at the end", {"curve": lambda x: 1}),
        ("x is 1 at the end of the last epoch, one step after the last step", {"end": end - 1}),
        ("x is 1 at the end of the last epoch, which is step epochs * steps of an epoch", {"end": end + 1}),
        ("`epochs` counts epochs; multiply by the steps of an epoch", {"end": c.epochs + 1e-9}),
        ("`warmup` counts epochs; multiply by the steps of an epoch", {"warm": c.warmup}),
    ]
    each, part = c.rows / c.local_batch, c.rows / c.batch
    return [
        *((rounded, {"steps": steps}) for steps in (max(math.floor(part), 1), part, round(part), math.floor(part) + 2)),
        *(rising if c.step < warm else falling),
        *((unrounded, {"warm": whole}) for whole in (math.floor(warm), math.ceil(warm))),
        *((UNSHARED, {"steps": steps}) for steps in (math.ceil(each), math.floor(each), each)),
        ("the rate is not scaled: a global batch k times base_batch wants k times base_lr", {"peak": lr}),
        ("the scale is the global batch divided by base_batch, not the number of ranks", {"peak": lr * c.world_size}),
        ("that scales by one rank's batch; the global batch is local_batch * world_size",
         {"peak": peak / c.world_size}),
        ("a larger batch wants a larger rate: multiply by global batch / base_batch", {"peak": lr**2 / peak}),
        ("that is the square root; the linear rule multiplies by the scale itself", {"peak": (lr * peak) ** 0.5}),
    ]  # fmt: skip


# --- What is expected ------------------------------------------------------------------------------


def _form(found: Any) -> str:
    if found == DIVIDED:
        return NO_WARMUP
    if found == NO_STEPS:
        return "an epoch has one step at least, however few rows there are"
    return "" if len(flat(found) or []) == 1 else "return the learning rate of the step, a float"


def _otherwise(seen: Seen, found: Any) -> str:
    if not math.isfinite(flat(found)[0]):
        return "return the learning rate of the step, a float" if seen.case.warmup else NO_WARMUP
    if seen.case.step < seen.case.warmup * seen.case.steps:
        return "in the warm-up the rate goes in a straight line from base_lr to the peak"
    return "after the warm-up: peak * (1 + cos(pi * x)) / 2, with x from 0 at the warm-up's end to 1 at the run's end"


def _said(seen: Seen, right: float) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in seen.case._asdict().items()) + f": {right:.6g}"


def each(where: slice, tolerance: float = 1e-6) -> Expect:
    """Expect the rate of each of these settings."""

    def slips(seen: Seen) -> Iterator[tuple[str, float]]:
        return ((cause, rate(seen, **knobs)) for cause, knobs in _mistakes(seen))

    one = equals(_said, rate, slips, _otherwise, tolerance=tolerance, form=_form)

    def expect(seen: Seen) -> Fault | None:
        asked = [Seen(case, 0, [Note(value=r)]) for case, r in zip(seen.case, seen["rates"], strict=True)]
        fault = first_fault(map(one, asked[where]))
        # Only the warm-up tells for sure whether an epoch has as many steps as one rank alone would take.
        alone = all(close(s["value"], rate(s, steps=s.case.rows / s.case.local_batch), 1e-5) for s in asked[3:9])
        return replace(fault, cause=UNSHARED) if fault and alone else fault

    return expect


pure = nothing(
    *("changed", "the same rate whenever the same step is asked for"),
    "the function remembers something; compute the rate from the arguments alone",
)

RATE = exercise(
    "11.1",
    "The rate at a step",
    "rate_at",
    15,
    act=act,
    rounds=rounds,
    checks={
        "peak": ("the peak, by the linear scaling rule", 1, each(slice(3), 1e-3), "all"),
        "warmup": ("the warm-up, from base_lr to the peak", 1, each(slice(3, 10)), "all"),
        "cosine": ("the cosine, from the peak to 0", 1, each(slice(10, 13)), "all"),
        "steps": ("the last batch of an epoch is not full", 1, each(slice(13, None)), "all"),
        "pure": ("asked again, in another order", 1, pure, "all"),
    },
    refused=("ddp_course.train.schedule.share_of_rate",),
    hints={"limit": "a loop that never ends; the rate is a formula, no loop is needed"},
)
