"""15.3 `plan_saves(...)`: how many steps lie between two saves, and what share of the time is lost?

A pure function, judged by trying every distance between saves. Each typical slip, such as a forgotten factor of 2,
lands on a distance and a share of its own: those of a case with one field changed.

Source: Young 1974, A first order approximation to the optimum checkpoint interval.
Read next: `background.py`.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, flat, short
from ddp_course.grading.vocabulary.expect import all_of, called, equals, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Round, Seen

NEARLY = 1e-7  # two distances whose shares differ by less are equally good; ten thousand steps or one more, say
HOUR = 3600.0


class Case(NamedTuple):
    """What the learner's function is given."""

    step_s: float
    save_s: float
    node_mtbf_s: float
    nodes: int
    restart_s: float

    def lost(self, every: float, half: float = 2) -> float:
        """Seconds lost for each second of steps: for saving, for what is done again, and for restarts."""
        apart_s = every * self.step_s
        return self.save_s / apart_s + (apart_s / half + self.restart_s) * self.nodes / self.node_mtbf_s

    def root(self, two: float = 2) -> float:
        """The best distance, if it need not be whole."""
        return math.sqrt(two * self.save_s * self.node_mtbf_s / self.nodes) / self.step_s

    def best(self) -> int:
        """The best distance, by trying: on both sides of it the share grows."""
        return min(range(max(1, int(self.root()) - 3), int(self.root()) + 5), key=self.lost)

    def __str__(self) -> str:
        machines = f"{self.nodes} node{'s' * (self.nodes > 1)}, each fails every {self.node_mtbf_s / HOUR:g} h"
        return f"steps of {self.step_s:g} s, saves of {self.save_s:.3g} s, restarts of {self.restart_s:g} s, {machines}"


def rounds(rng: Random) -> list[Round]:
    """One node, then several, then so few steps between saves that it matters how they are rounded."""
    cases = []
    for name, nodes in [("one", (1,))] * 4 + [("several", (3, 7, 16))] * 3:
        step_s, save_s, mtbf_s = rng.choice((0.25, 0.4, 0.5)), round(rng.uniform(5, 30), 1), rng.randint(20, 60) * HOUR
        cases.append((name, Case(step_s, save_s, mtbf_s, rng.choice(nodes), float(rng.randint(60, 300)))))
    cases.append(("one", cases[0][1]._replace(step_s=0.001)))  # hundreds of thousands of steps
    for steps in (1.38, 1.46, 2.42, 2.47, 0.2):  # the root, on both sides of where the best whole number changes
        step_s, mtbf_s = float(rng.randint(40, 90)), rng.randint(2, 5) * HOUR
        cases.append(("few", Case(step_s, (steps * step_s) ** 2 / 2 / mtbf_s, mtbf_s, 1, 30.0)))
    return [Round(1, cases, init=False)]


def form(seen: Seen) -> Fault | None:
    """Two numbers, of which the first is whole."""
    plan, numbers = seen["value"], flat(seen["value"])
    two = isinstance(plan, list) and len(plan) == 2 and plan == numbers and all(map(math.isfinite, numbers))
    return first_mistake(f"{seen.case}: two numbers, (every, share), and `every` is whole", {
        "return the number of steps and the share that is lost": not two and short(plan),
        "steps are whole, and there is at least one between two saves":
            two and (numbers[0] != int(numbers[0]) or numbers[0] < 1) and short(numbers[0]),
    })  # fmt: skip


def share_slips(seen: Seen) -> list[tuple[str, float]]:
    """Mistakes in the share, whatever the distance is."""
    case, every = seen.case, seen["value"][0]
    right = case.lost(every)
    return [
        ("the restart is forgotten: each failure costs restart_s too", case._replace(restart_s=0).lost(every)),
        ("a failure comes half way between two saves: half the distance is done again", case.lost(every, half=1)),
        ("the saves themselves cost time too: save_s for each distance", case._replace(save_s=0).lost(every)),
        (f"{MORE_NODES}: divide the time between failures by their number", case._replace(nodes=1).lost(every)),
        ("a distance of so many steps lasts every * step_s seconds", case._replace(step_s=1).lost(every)),
        ("a share is no percentage: do not multiply by 100", 100 * right),
        ("measure against the seconds of steps, not against all seconds", right / (1 + right)),
    ]


def beside_slips(seen: Seen) -> list[tuple[str, float]]:
    """Shares that belong to another distance."""
    case, every = seen.case, seen["value"][0]
    said = "the whole number that you return"
    return [
        (f"that is what is lost at the root; say what is lost at `every`, {said}", case.lost(case.root())),
        (f"that is what is lost one step below `every`, not at {said}", case.lost(max(1, every - 1))),
        (f"that is what is lost one step above `every`, not at {said}", case.lost(every + 1)),
    ]


MORE_NODES = "with more nodes, some node fails more often"
share = equals(
    lambda seen, right: f"{seen.case}, a save every {seen['value'][0]:g} steps: {right:.5g} is lost",
    lambda seen: seen.case.lost(seen["value"][0]),  # be that the best distance or not
    lambda seen: share_slips(seen) + beside_slips(seen),
    "the sum of two: saves in one second of steps, and failures in one second of steps",
    of=lambda seen: seen["value"][1],
)


def share_of_few(seen: Seen) -> Fault | None:
    """Few steps tell the share at the whole number from that at the root; another slip was named before."""
    named = any(close(seen["value"][1], value) for _, value in share_slips(seen))
    return None if named else share(seen)


def best(seen: Seen) -> Fault | None:
    """No other distance loses less."""
    case, every, few = seen.case, seen["value"][0], seen.case.root() < 3
    right, found = case.best(), f"{every:g} steps, {case.lost(every):.5g} is lost"
    if case.lost(every) <= case.lost(right) * (1 + NEARLY):
        return None

    def near(steps: float, nodes: int = 1) -> str:
        return found if abs(every - steps) <= 1.01 and case.nodes >= nodes else ""

    return first_mistake(f"{case}: {right} steps, {case.lost(right):.5g} is lost", {
        "rounding is not enough: the share is no straight line. Compare the whole numbers below and above the root":
            few and near(right),
        "a factor of 2 is missing under the root: only half a distance is lost": near(case.root(two=1)),
        "these are seconds; divide by step_s to have steps": near(case._replace(step_s=1).root()),
        f"{MORE_NODES}: divide node_mtbf_s": near(case._replace(nodes=1).root(), nodes=2),
        "more nodes fail more often: divide node_mtbf_s by nodes": near(case._replace(nodes=1 / case.nodes).root(), 2),
        "step_s belongs outside of the root": near(case._replace(step_s=math.sqrt(case.step_s)).root()),
        "a step beside: there are two whole numbers around the root; take the one that loses less": near(right),
        "the best distance is where a longer one loses as much as a shorter one saves": found,
    })  # fmt: skip


CADENCE = exercise(
    "15.3",
    "How often to save",
    "plan_saves",
    15,
    act=called,
    rounds=rounds,
    checks={
        "share": ("the share of the time that is lost", 1, all_of(form, share), "one"),
        "best": ("the distance between saves that loses least", 1, all_of(form, best), "one"),
        "nodes": ("the same for several nodes", 1, all_of(form, best, share), "several"),
        "whole": ("where the whole number matters", 1, all_of(form, best, share_of_few), "few"),
    },
    hints={
        r"ZeroDivisionError": "there is at least one step between two saves: max(1, ...)",
        "limit": "do not try every number of steps; a root says where to look",
        r"missing \d required|takes \d+ positional": "the five arguments come in the order of the text",
    },
)
