"""Which faults are there, in the order in which lesson 12 meets them?

First those that are loud: the ranks do not meet, or they meet and then wait for each other. Then what else people file
about DDP, and those that say nothing and only train worse. `INCIDENTS` are programs of real projects, each a file.

Read next: the file of a family, such as `collectives.py`.
"""

from __future__ import annotations

from ddp_course.diagnose.faults import (
    branches,
    collectives,
    docker,
    filed,
    loops,
    meeting,
    processes,
    silent,
)
from ddp_course.diagnose.faults.fault import Fault
from ddp_course.diagnose.faults.incidents import INCIDENTS

__all__ = ["FAULTS", "FILED", "INCIDENTS", "LOUD", "SILENT"]

LOUD = (meeting, collectives, branches, loops, processes, docker)
FILED = (filed,)
SILENT = (silent,)
FAULTS: dict[str, Fault] = {fault.name: fault for family in LOUD + FILED + SILENT for fault in family.FAULTS}
