"""06.4 `PatientDDP(module)`: what if a parameter takes part on some ranks only?

The steps differ in which ranks need which adapter. Hooks run on those ranks alone, so a collective in each hook hangs.
Read next: lesson 07's exercises, in `judges/gradient_bucketing/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.ddp_from_scratch import nets
from judges.ddp_from_scratch.average import uneven
from judges.ddp_from_scratch.causes import first_fault
from judges.ddp_from_scratch.own_ddp import (
    DDP_HINTS,
    READY,
    start_fault,
    steps_fault,
)
from judges.ddp_from_scratch.training import ddp_driver


def unused_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """All parameters on all ranks first; then steps that differ, with another number of ranks."""
    first, second = rng.choice(nets.WORLDS)
    task = nets.Task(4, rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((0, 1, 2),) * first,) * 2)
    notes, whole = answer.run(ddp_driver, first, task, init=True), nets.truth(task, first)
    yield (
        "used",
        start_fault(task, notes) or first_fault(task, notes, whole, range(1)) or steps_fault(task, notes, whole),
    )
    everyone = (((0, 1, 2),) * second,)
    task = nets.Task(4, task.rows, rng.randint(1, 10**6), (*uneven(second, rng), *everyone, *uneven(second, rng)))
    notes, whole = answer.run(ddp_driver, second, task, init=True), nets.truth(task, second)
    yield "some", first_fault(task, notes, whole, range(1), missing=False)
    yield "none", first_fault(task, notes, whole, range(1), missing=True)
    yield "steps", steps_fault(task, notes, whole)


UNUSED = Exercise(
    "06.4",
    "A parameter that some ranks do not use (stretch)",
    "PatientDDP",
    25,
    (
        Check("used", "with all parameters in use, it is the DDP of 06.3", 1),
        Check("some", "a gradient that is missing on some ranks counts as zero there, and nobody hangs", 2),
        Check("none", "a gradient that is missing on all ranks stays None", 1),
        Check("steps", "five steps, each with other parameters: the weights are those of one process", 1),
    ),
    unused_judge,
    refused=READY,
    hints=(
        (
            r"(?s)never entered|lost the connection|disagree about collective|different sizes|after.*waited in",
            "hooks run, and gradients are there, on some ranks only, so the ranks do not call the same collectives; "
            "talk to nobody in the hooks, and at the end of backward let all ranks agree on who has what. The call at "
            "the end is asked for once in each pass, by whichever hook runs first",
        ),
        (
            r"Final callbacks can only be installed",
            "ask for the call at the end of backward in a parameter's hook, not in forward or in the constructor",
        ),
        (
            r"NoneType",
            "the .grad of a parameter that this rank has not used is None: put zeros there if another rank used it",
        ),
        *DDP_HINTS,
    ),
)
