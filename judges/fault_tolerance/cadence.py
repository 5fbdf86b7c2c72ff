"""14.3 `plan_saves(...)`: how many steps lie between two saves, and what share of the time is lost?

A pure function, judged by trying every distance between saves. Each typical slip, such as a forgotten factor of 2,
lands on a distance and a share of its own, which the judge knows.

Source: Young 1974, A first order approximation to the optimum checkpoint interval.
Read next: `background.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

NEARLY = 1e-7  # two distances whose shares differ by less are equally good; ten thousand steps or one more, say
HOUR = 3600.0

Case = tuple[float, float, float, int, float]  # step_s, save_s, node_mtbf_s, nodes, restart_s


def driver(rank: int, world_size: int, function: Callable, cases: list[Case]) -> list[Any]:
    """Return the learner's plan for each case."""
    return [plain(function(*case)) for case in cases]


def cadence_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """One node, then several, then so few steps between saves that it matters how they are rounded."""
    one = [_case(rng, nodes=1) for _ in range(4)]
    several = [_case(rng, nodes=rng.choice((3, 7, 16))) for _ in range(3)]
    rounded = [_near(rng, steps) for steps in (1.46, 2.47, 0.2)]
    cases = one + several + rounded
    plans = answer.run(driver, 1, cases, init=False)[0]
    found = list(zip(cases, plans, strict=True))
    share = _first(_share_fault, found[:4])
    yield "share", share
    yield "best", _first(_best_fault, found[:4])
    yield "nodes", _first(_nodes_fault, found[4:7])
    # Few steps tell the share at the whole number from that at the root; another slip was named before.
    yield "whole", _first(_whole_fault, found[7:]) or (None if share else _first(_share_fault, found[7:]))


def _case(rng: Random, nodes: int) -> Case:
    step_s, save_s = rng.choice((0.25, 0.4, 0.5)), rng.uniform(5, 30)
    return step_s, round(save_s, 1), rng.randint(20, 60) * HOUR, nodes, float(rng.randint(60, 300))


def _near(rng: Random, steps: float) -> Case:
    """A case whose best distance, if it need not be whole, is `steps`."""
    step_s, mtbf_s = float(rng.randint(40, 90)), rng.randint(2, 5) * HOUR
    return step_s, (steps * step_s) ** 2 / 2 / mtbf_s, mtbf_s, 1, 30.0


def share_lost(every: float, case: Case) -> float:
    """Seconds lost for each second of steps: for saving, for what is done again, and for restarts."""
    step_s, save_s, node_mtbf_s, nodes, restart_s = case
    apart_s = every * step_s
    return save_s / apart_s + (apart_s / 2 + restart_s) * nodes / node_mtbf_s


def best_every(case: Case) -> int:
    """The best distance, by trying: on both sides of it the share grows."""
    step_s, save_s, node_mtbf_s, nodes, _ = case
    near = math.sqrt(2 * save_s * node_mtbf_s / nodes) / step_s
    return min(range(max(1, int(near) - 3), int(near) + 5), key=lambda every: share_lost(every, case))


def _first(fault_of: Callable, found: list[tuple[Case, Any]]) -> Fault | None:
    return next(filter(None, (_form_fault(case, plan) or fault_of(case, plan) for case, plan in found)), None)


def _said(case: Case) -> str:
    step_s, save_s, node_mtbf_s, nodes, restart_s = case
    machines = f"{nodes} node{'s' * (nodes > 1)}, each fails every {node_mtbf_s / HOUR:g} h"
    return f"steps of {step_s:g} s, saves of {save_s:.3g} s, restarts of {restart_s:g} s, {machines}"


def _form_fault(case: Case, plan: Any) -> Fault | None:
    numbers = flat(plan)
    if isinstance(plan, list) and len(plan) == 2 and numbers and all(map(math.isfinite, numbers)):
        if numbers[0] != int(numbers[0]) or numbers[0] < 1:
            cause = "steps are whole, and there is at least one between two saves"
            return Fault(f"{_said(case)}: a whole number of steps", short(numbers[0]), cause=cause)
        return None
    found = short(plan)
    return Fault("two numbers, (every, share)", found, cause="return the number of steps and the share that is lost")


def _share_fault(case: Case, plan: list) -> Fault | None:
    """Whether the share belongs to the number of steps beside it, be that the best or not."""
    every, share = plan
    right = share_lost(every, case)
    if close(share, right, 1e-6):
        return None
    step_s, save_s, node_mtbf_s, nodes, restart_s = case
    apart_s, mtbf_s = every * step_s, node_mtbf_s / nodes
    slips = {
        save_s / apart_s + apart_s / 2 / mtbf_s: "the restart is forgotten: each failure costs restart_s too",
        save_s / apart_s + (apart_s + restart_s) / mtbf_s: "a failure comes between two saves, on average half way: "
        "half the distance is done again",
        apart_s / 2 / mtbf_s + restart_s / mtbf_s: "the saves themselves cost time too: save_s for each distance",
        share_lost(every, (step_s, save_s, node_mtbf_s, 1, restart_s)): "with more nodes, some node fails more often: "
        "divide the time between failures by their number",
        save_s / every + (every / 2 + restart_s) / mtbf_s: "a distance of so many steps lasts every * step_s seconds",
        100 * right: "a share is no percentage: do not multiply by 100",
        share_lost(math.sqrt(2 * save_s * mtbf_s) / step_s, case): "that is what is lost at the root; say what is lost "
        "at `every`, the whole number that you return",
        **dict.fromkeys(
            (share_lost(max(1, every - 1), case), share_lost(every + 1, case)),
            "that is what is lost one step beside `every`, not at the number that you return",
        ),
        right / (1 + right): "measure against the seconds of steps, not against all seconds",
    }
    cause = next((said for value, said in slips.items() if close(share, value, 1e-6)), "")
    cause = cause or "the sum of two: saves in one second of steps, and failures in one second of steps"
    return Fault(f"{_said(case)}, a save every {every:g} steps: {right:.5g} is lost", short(share), cause=cause)


def _best_fault(case: Case, plan: list) -> Fault | None:
    every, best = plan[0], best_every(case)
    if share_lost(every, case) <= share_lost(best, case) * (1 + NEARLY):
        return None
    step_s, save_s, node_mtbf_s, nodes, _ = case
    mtbf_s = node_mtbf_s / nodes
    slips = {
        math.sqrt(save_s * mtbf_s) / step_s: "a factor of 2 is missing under the root: only half a distance is lost",
        math.sqrt(2 * save_s * mtbf_s): "these are seconds; divide by step_s to have steps",
        math.sqrt(2 * save_s * node_mtbf_s) / step_s: "with more nodes, some node fails more often: divide node_mtbf_s",
        math.sqrt(2 * save_s * node_mtbf_s * nodes) / step_s: "more nodes fail more often: divide node_mtbf_s by nodes",
        math.sqrt(2 * save_s * mtbf_s / step_s): "step_s belongs outside of the root",
        best: "a step beside: there are two whole numbers around the root; take the one that loses less",
    }
    near = [said for value, said in slips.items() if abs(every - value) <= 1.01 and (nodes > 1 or "node" not in said)]
    cause = near[0] if near else "the best distance is where a longer one loses as much as a shorter one saves"
    found = f"{every:g} steps, {share_lost(every, case):.5g} is lost"
    return Fault(f"{_said(case)}: {best} steps, {share_lost(best, case):.5g} is lost", found, cause=cause)


def _nodes_fault(case: Case, plan: list) -> Fault | None:
    return _best_fault(case, plan) or _share_fault(case, plan)


def _whole_fault(case: Case, plan: list) -> Fault | None:
    fault = _best_fault(case, plan)
    if fault is None or abs(plan[0] - best_every(case)) > 1:
        return fault
    cause = "rounding is not enough: the share is no straight line. Compare the whole numbers below and above the root"
    return Fault(fault.expected, fault.found, cause=cause)


CADENCE = Exercise(
    "14.3",
    "How often to save",
    "plan_saves",
    15,
    (
        Check("share", "the share of the time that is lost", 1),
        Check("best", "the distance between saves that loses least", 1),
        Check("nodes", "the same for several nodes", 1),
        Check("whole", "where the whole number matters", 1),
    ),
    cadence_judge,
    hints=(
        (r"ZeroDivisionError", "there is at least one step between two saves: max(1, ...)"),
        (r"no result after", "do not try every number of steps; a root says where to look"),
        (r"missing \d required|takes \d+ positional", "the five arguments come in the order of the text"),
    ),
)
