"""11.4 `faults_of(logs)`: three faults at a time, found in what the ranks of a job have logged.

The incidents are those of `ddp-course drill`: real trainings on three ranks, a moment ago, with other faults on other
ranks each time. Read `ddp_course/diagnose/drill.py` first.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from ddp_course.diagnose.drill import BLAMED, CHANNELS, Faults, drawn
from ddp_course.diagnose.drill_job import happen
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import called, exercise
from ddp_course.grading.vocabulary.play import Note, Round, Seen

LEVEL = 9
EVIDENCE = {
    "same-rows": "in every epoch all ranks have the same rows",
    "missing-set-epoch": "each rank has rows of its own, in the same order in every epoch",
    "not-averaged": "from the first step on no two ranks have the same weights",
    "drift": "two ranks have the same weights in every step; from some step on the third has others",
    "straggler": "compare `own` of the ranks, over all steps",
}


def rounds(rng: Random) -> list[Round]:
    """Incidents in which each fault of rows and weights occurs, and a drift of rank 0 and of another."""
    wanted = [
        lambda faults: "same-rows" in faults and faults.get("drift") == 0,
        lambda faults: "missing-set-epoch" in faults and faults.get("drift", 0) > 0,
        lambda faults: "not-averaged" in faults and faults["straggler"] == 0,
        lambda faults: faults["straggler"] > 0,
    ]
    incidents = []
    for fits in rng.sample(wanted, len(wanted)):
        seed = next(seed for seed in iter(lambda: rng.randrange(10_000), None) if fits(drawn(LEVEL, seed).faults))
        incidents.append(("incident", ([_logs(seed)], drawn(LEVEL, seed).faults)))
    return [Round(1, incidents, raises=(Exception,), init=False)]


def _logs(seed: int) -> list[str]:
    """What the ranks of an incident have written."""
    with tempfile.TemporaryDirectory() as folder:
        happen(LEVEL, seed, Path(folder))
        return [_larger(path.read_text()) for path in sorted(Path(folder).glob("rank*.log"))]


def _larger(log: str) -> str:
    """The log of a model with more weights, of whose sum a drift is a small part."""
    return re.sub(r"weights (\S+)", lambda found: f"weights {float(found[1]) + 40:.6f}", log)


def act(function, case: tuple[list, Faults], rank: int, world_size: int) -> Any:
    """A case has the arguments, and what is right."""
    found = called(function, case[0], rank, world_size)
    if not isinstance(found, dict):
        return Note(kind=type(found).__name__)
    return Note(faults=[[str(name), None if rank is None else int(rank)] for name, rank in found.items()])


def form(seen: Seen) -> str:
    """Say what is wrong with a result that is no answer."""
    if seen["error"]:
        return f"the function raised {seen['error']}: {seen['message']}"
    if seen["faults"] is None:
        return 'return a dictionary from fault to rank, such as {"drift": 1, "same-rows": None}'
    if unknown := [name for name, _ in seen["faults"] if name not in BLAMED]:
        return f"no fault is called {unknown[0]!r}; there are {', '.join(sorted(BLAMED))}"
    return ""


def faults_in(*channels: str):
    """Expect the right faults of these channels, each with its rank."""
    names = {name for channel in channels for name in CHANNELS[channel]}

    def expect(seen: Seen) -> Fault | None:
        right = {name: rank for name, rank in seen.case[1].items() if name in names}
        if cause := form(seen):
            return Fault(str(right), seen["error"] or seen["kind"] or str(seen["faults"]), cause=cause)
        found = {name: rank for name, rank in seen["faults"] if name in names}
        if found == right:
            return None
        return Fault(str(right), str(found), cause=_cause(found, right), report=_excerpt(seen.case[0][0]))

    return expect


def _cause(found: dict, right: dict) -> str:
    for name, rank in right.items():
        if name not in found:
            return EVIDENCE[name]
        if found[name] != rank:
            return f"{name} is right, and {'no one rank is to blame' if rank is None else 'the rank is another one'}"
    return f"the logs do not show {next(name for name in found if name not in right)}"


def _excerpt(logs: list[str]) -> str:
    lines = [f"rank {rank}: {text.splitlines()[2][:95]}" for rank, text in enumerate(logs)]
    return "\n".join([*lines, "(each log goes on)"])


INCIDENT = exercise(
    "11.4",
    "Three faults in one job (stretch)",
    "faults_of",
    25,
    act=act,
    rounds=rounds,
    checks={
        "rows": ("what is wrong with the rows is named", 2, faults_in("rows"), "incident"),
        "weights": ("what is wrong with the weights is named, with its rank", 2, faults_in("weights"), "incident"),
        "time": ("the slow rank is named", 1, faults_in("time"), "incident"),
        "whole": ("nothing is named that is not there", 1, faults_in(*CHANNELS), "incident"),
    },
    refused=("ddp_course.diagnose.drill.solve",),
)
