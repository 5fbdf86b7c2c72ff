"""Which faults are there, in the order in which lesson 12 meets them?

First those that are loud: the ranks do not meet, or they meet and then wait for each other. Then those that say
nothing and only train worse.

Read next: the file of a family, such as `collectives.py`.
"""

from __future__ import annotations

from ddp_course.diagnose.faults import (
    branches,
    collectives,
    docker,
    loops,
    meeting,
    processes,
    silent_files,
    silent_model,
    silent_rows,
)
from ddp_course.diagnose.faults.fault import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        *meeting.FAULTS,
        *collectives.FAULTS,
        *branches.FAULTS,
        *loops.FAULTS,
        *processes.FAULTS,
        *docker.FAULTS,
        *silent_rows.FAULTS,
        *silent_files.FAULTS,
        *silent_model.FAULTS,
    )
}
