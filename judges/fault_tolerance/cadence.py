"""15.3 `plan_saves(...)`: how many steps lie between two saves, and what share of the time is lost? A pure function.

Two distances that lose the same are equally good, so what is compared of a distance is what is lost at it.

Source: Young 1974, A first order approximation to the optimum checkpoint interval.
Read next: `background.py`.
"""

from __future__ import annotations

import math
from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.rounds import Round, Seen

NEARLY = 1e-7  # ten thousand steps or one more, say, lose the same
HOUR = 3600.0


def cases(rng: Random) -> list[Round]:
    """One node, then several, then so few steps between saves that it matters how they are rounded."""
    named = []
    for name, nodes in [("one", (1,))] * 4 + [("several", (3, 7, 16))] * 3:
        step_s, save_s, mtbf_s = rng.choice((0.25, 0.4, 0.5)), round(rng.uniform(5, 30), 1), rng.randint(20, 60) * HOUR
        named.append((name, (step_s, save_s, mtbf_s, rng.choice(nodes), float(rng.randint(60, 300)))))
    named.append(("one", (0.001, *named[0][1][1:])))  # hundreds of thousands of steps
    for steps in (1.38, 1.46, 2.42, 2.47, 0.2):  # the root, on both sides of where the best whole number changes
        step_s, mtbf_s = float(rng.randint(40, 90)), rng.randint(2, 5) * HOUR
        named.append(("few", (step_s, (steps * step_s) ** 2 / 2 / mtbf_s, mtbf_s, 1, 30.0)))
    return [Round(1, named, init=False)]


def lost(seen: Seen, every: float) -> float:
    """Seconds lost for each second of steps, at this distance."""
    step_s, save_s, node_mtbf_s, nodes, restart_s = seen.case
    return save_s / (every * step_s) + (every * step_s / 2 + restart_s) * nodes / node_mtbf_s


def best(seen: Seen) -> str | float:
    every, _ = seen["value"]
    return "no whole number of steps" if every != int(every) or every < 1 else lost(seen, every)


def share(seen: Seen) -> str:
    """Whether it is that of the distance, be that the best one or not."""
    every, found = seen["value"]
    right = lost(seen, every)
    return "what is lost at `every`" if close(found, right) else f"{found:.6g}, where {right:.6g} is lost at {every}"


def whole(seen: Seen) -> list:
    """Few steps tell the share at the whole number from that at the root; another slip fails the checks before."""
    step_s, save_s, node_mtbf_s, nodes, _ = seen.case
    root = math.sqrt(2 * save_s * node_mtbf_s / nodes) / step_s
    every, found = seen["value"]
    of_root = close(found, lost(seen, root)) and not close(found, lost(seen, every))
    return [best(seen), f"a share at {'the root' if of_root else '`every`'}"]


def said(seen: Seen) -> str:
    step_s, save_s, node_mtbf_s, nodes, restart_s = seen.case
    machines = f"{nodes} node{'s' * (nodes > 1)}, each fails every {node_mtbf_s / HOUR:g} h"
    return f"steps of {step_s:g} s, saves of {save_s:.3g} s, restarts of {restart_s:g} s, {machines}; lost at `every`:"


MISTAKES = """
the factor 2 forgotten | best nodes whole | a factor of 2 is missing under the root: only half a distance is lost
    math.sqrt(2 * save_s => math.sqrt(save_s
seconds | best nodes whole | these are seconds; divide by step_s to have steps
     / step_s) => )
step_s under the root | best nodes whole | step_s belongs outside of the root
    mtbf_s) / step_s) => mtbf_s / step_s))
failures of one node | nodes | with more nodes, some node fails more often: divide node_mtbf_s by nodes
    mtbf_s = node_mtbf_s / nodes => mtbf_s = node_mtbf_s
more nodes fail less | nodes | more nodes fail more often: divide node_mtbf_s by nodes
    node_mtbf_s / nodes => node_mtbf_s * nodes
no restart | share nodes | the restart is forgotten: each failure costs restart_s too
     + restart_s) => )
the whole distance | share nodes whole | a failure comes half way between two saves: half the distance is done again
    apart_s / 2 => apart_s
no saves | share nodes | the saves themselves cost time too: save_s for each distance
    return every, share(every) => return every, share(every) - save_s / every / step_s
steps for seconds | share nodes whole | a distance of so many steps lasts every * step_s seconds
    apart_s = every * step_s => apart_s = every
against all seconds | share nodes | measure against the seconds of steps, not against all seconds
    return every, share(every) => return every, share(every) / (1 + share(every))
in percent | share nodes | a share is no percentage: do not multiply by 100
    return every, share(every) => return every, 100 * share(every)
rounded | whole
| rounding is not enough: the share is no straight line. Compare the whole numbers below and above the root
    math.floor => round
    min(below, below + 1, key=share) => below
the share at the root | whole | that is what is lost at the root; say what is lost at `every`, the whole number
    , share(every) => , share(math.sqrt(2 * save_s * mtbf_s) / step_s)
not whole | best nodes whole | steps are whole, and there is at least one between two saves
    min(below, below + 1, key=share) => math.sqrt(2 * save_s * mtbf_s) / step_s
no step between two saves | all | there is at least one step between two saves
    max(1, => max(0,
the share alone | all | return the number of steps and the share that is lost
    return every, share(every) => return share(every)
all numbers are tried | all | do not try every number of steps; a root says where to look | hangs
    min(below, below + 1, key=share) => min(range(1, 10**12), key=share)
one formula for both | all | half the distance is done again | tests
    def plan_saves(step_s, save_s, node_mtbf_s, nodes, restart_s):
        rate = nodes / node_mtbf_s
        every = max(1, round(math.sqrt(save_s / rate) / step_s))
        return every, save_s / (every * step_s) + rate * (every * step_s + restart_s)
"""

RIGHT = """
no root, by stepping, in a list of tensors
    def plan_saves(step_s, save_s, node_mtbf_s, nodes, restart_s):
        saving, failing = save_s / step_s, nodes * step_s / (2 * node_mtbf_s)
        every, step = 1, 1 << 20
        while step:
            while (every + step) * (every + step - 1) < saving / failing:
                every += step
            step >>= 1
        share = saving / every + failing * every + restart_s * nodes / node_mtbf_s
        return [torch.tensor(every), torch.tensor(share, dtype=torch.float64)]
"""

CADENCE = exercise(
    *("15.3", "How often to save", "plan_saves", 15),
    cases=cases,
    said=said,
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=NEARLY,
    checks={
        "share": ("the share of the time that is lost", 1, "one", share,
                  "the sum of two: saves in one second of steps, and failures in one second of steps"),
        "best": ("the distance between saves that loses least", 1, "one", best,
                 "the best distance is where a longer one loses as much as a shorter one saves"),
        "nodes": ("the same for several nodes", 1, "several", lambda seen: [best(seen), share(seen)],
                  "with twice as many nodes a failure comes twice as often, and nothing else changes"),
        "whole": ("where the whole number matters", 1, "few", whole,
                  "look at the whole numbers below and above the root, and take the one that loses less"),
    },
    hints={
        r"ZeroDivisionError": "there is at least one step between two saves: max(1, ...)",
        "limit": "do not try every number of steps; a root says where to look",
        r"missing \d required|takes \d+ positional": "the five arguments come in the order of the text",
    },
)  # fmt: skip
