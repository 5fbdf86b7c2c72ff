"""11.4 `faults_of(logs)`: three faults at a time, found in what the ranks of a job have logged.

The incidents are those of `ddp-course drill`: real trainings on three ranks, a moment ago, with other faults on other
ranks each time. Read `ddp_course/diagnose/drill.py` first.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable
from numbers import Number
from pathlib import Path
from random import Random
from typing import Any

from ddp_course.diagnose.drill import CHANNELS, drawn
from ddp_course.diagnose.drill_job import happen
from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

LEVEL = 9


def cases(rng: Random) -> list[Round]:
    """Incidents in which each fault of rows and weights occurs, and a drift of rank 0 and of another."""
    wanted = [
        lambda faults: "same-rows" in faults and faults.get("drift") == 0,
        lambda faults: "missing-set-epoch" in faults and faults.get("drift", 0) > 0,
        lambda faults: "not-averaged" in faults and faults["straggler"] == 0,
        lambda faults: faults["straggler"] > 0,
    ]
    seeds = []
    for fits in rng.sample(wanted, len(wanted)):
        seeds.append(next(n for n in iter(lambda: rng.randrange(10_000), None) if fits(drawn(LEVEL, n).faults)))
    return [Round(1, [("incident", logs(seed)) for seed in seeds], init=False)]


@functools.cache  # an answer and the solution read the same logs
def logs(seed: int) -> list[str]:
    """What the ranks of an incident have written."""
    with tempfile.TemporaryDirectory() as folder:
        happen(LEVEL, seed, Path(folder))
        return [_larger(path.read_text()) for path in sorted(Path(folder).glob("rank*.log"))]


def _larger(log: str) -> str:
    """The log of a model with more weights, of whose sum a drift is a small part."""
    return re.sub(r"weights (\S+)", lambda found: f"weights {float(found[1]) + 40:.6f}", log)


def act(function: Callable, case: list[str], rank: int, world_size: int) -> Any:
    found = function(case)
    if not isinstance(found, dict):
        return plain(found)
    ranks = {str(name): int(rank) if isinstance(rank, Number) else plain(rank) for name, rank in found.items()}
    return Note(value=ranks)


def faults_in(channel: str) -> Callable[[Seen], Any]:
    """The faults of a channel, and those of none."""
    others = set().union(*(faults for name, faults in CHANNELS.items() if name != channel))
    return lambda seen: {name: rank for name, rank in seen["value"].items() if name not in others}


def said(seen: Seen) -> str:
    return "\n".join(f"rank {rank} logs {log.splitlines()[2][:80]} ..." for rank, log in enumerate(seen.case)) + "\n"


MISTAKES = """
ranks not compared | rows whole | same-rows: compare the rows of the ranks in each step; here all have the same
    rows[0] == rows[1]: => False:
epochs not compared | rows whole
| missing-set-epoch: compare a rank's rows in two epochs; here they are the same, in order
    rows[0][0] == rows[0][1]: => False:
rank 0 drifts | weights whole | drift is right, and the rank is another one: whose weights are alone in a step?
    weights.count(each) == 1) => True)
the last rank drifts | weights whole | drift is right, and the rank is another one: whose weights are alone in a step?
    weights.count(each) == 1) => rank == 2)
other weights than rank 0's | weights whole | drift is right, and the rank is another one: rank 0 itself may drift
    next(rank for rank, each in enumerate(weights) if weights.count(each) == 1) => 1 if weights[0] != weights[1] else 2
nearly the same | weights whole
| drift: two ranks have the same weights in every step, and the third from some step on not quite
    weights = [step[2] for step in here] => weights = [round(float(step[2]) / 4) for step in here]
any difference is a drift | weights whole | not-averaged: from the first step on no two ranks have the same weights
    if len(set(weights)) == 3: => if len(set(weights)) == 4:
    if len(set(weights)) == 2: => if len(set(weights)) > 1:
any difference is not-averaged | weights whole
| drift: two ranks have the same weights in every step; a third has others
    if len(set(weights)) == 3: => if len(set(weights)) > 1:
the fastest rank | time whole
| straggler is right, and the rank is another one: the one with the largest median of `own`
    own.index(max(own)) => own.index(min(own))
the slowest step | time whole
| straggler is right, and the rank is another one: step 0 is slow by no fault; take a median
    median(float(step[3]) => max(float(step[3])
    max(own) > 3 * median(own): => True:
no time | time whole | straggler: compare `own` of the ranks, over all steps
    max(own) > 3 * median(own): => False:
a list | all | return a dictionary from fault to rank, such as {"drift": 1, "same-rows": None}
    return found => return sorted(found)
another name | all | no fault has this name: they are those of the table
    "straggler" => "slow"
the last lines, by position | rows weights whole | compare the rows of the ranks in each step | tests
    def faults_of(logs):
        table = [[each.split() for each in text.splitlines() if each.startswith("step")] for text in logs]
        last = [of_rank[-1][9] for of_rank in table]
        slow = [median(float(each[11]) for each in of_rank) for of_rank in table]
        odd = max(range(3), key=lambda rank: abs(float(last[rank]) - median(map(float, last))))
        return {"missing-set-epoch": None, "drift": odd, "straggler": slow.index(max(slow))}
the sum of all times | time whole | step 0 is slow by no fault; take a median | tests
    def faults_of(logs):
        found, table = {}, [re.findall(r"epoch (\\d) rows (\\S+) .* weights (\\S+) own (\\S+)", text) for text in logs]
        if [each[1] for each in table[0]] == [each[1] for each in table[2]]:
            found["same-rows"] = None
        elif table[1][0][1] == table[1][len(table[1]) // 3][1]:
            found["missing-set-epoch"] = None
        ends = [of_rank[-1][2] for of_rank in table]
        if len(set(ends)) > 1:
            alone = [rank for rank in range(3) if ends.count(ends[rank]) == 1]
            found |= {"not-averaged": None} if len(alone) == 3 else {"drift": alone[0]}
        slow = [max(float(each[3]) for each in of_rank) for of_rank in table]
        return found | {"straggler": slow.index(max(slow))}
"""

INCIDENT = exercise(
    *("11.4", "Three faults in one job (stretch)", "faults_of", 25),
    cases=cases,
    act=act,
    said=said,
    mistakes=MISTAKES,
    checks={
        "rows": ("what is wrong with the rows is named", 2, "incident", faults_in("rows"),
                 "compare the rows of the ranks in each step, then those of one rank in two epochs"),
        "weights": ("what is wrong with the weights is named, with its rank", 2, "incident", faults_in("weights"),
                    "all differ from the first step on, or one rank's from some step on: in which step, and whose?"),
        "time": ("the slow rank is named", 1, "incident", faults_in("time"),
                 "compare the ranks' medians of `own`, the time before a rank communicates"),
        "whole": ("nothing is named that is not there", 1, "incident", lambda seen: dict(seen["value"].items()),
                  "the dictionary has three entries: one fault of rows, one of weights, one of time"),
    },
    refused=("ddp_course.diagnose.drill.solve",),
)  # fmt: skip
