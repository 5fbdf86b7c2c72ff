"""How often does a rank talk, and do rows travel? A view for a check of `differential.exercise`.

Read next: `judges/logging/mean.py`, where sums and counts travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_course.grading.differential import HOLDS
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.rounds import Seen

NEVER = "the ranks never talked, so no rank can know what the others hold"
OFTEN = "each collective has a price of its own; put the numbers into one tensor (objects make two)"


def talks(at_most: int, what: str, less_than: Callable[[Seen], int], of: str = "calls") -> Callable[[Seen], Any]:
    """Return a view that gives a fault unless a rank makes one to `at_most` collectives, which carry `what`.

    Args:
        less_than: the bytes of this rank's rows, of which fewer may travel.
        of: the name of the note that has the collectives.
    """
    expected = f"at most {at_most} collective{'s' * (at_most > 1)}, with {what}"

    def view(seen: Seen) -> Any:
        times, n_bytes, rows = len(seen[of]), sum(call.n_bytes for call in seen[of]), less_than(seen)
        if not times:
            return Fault(expected, "no collective", seen.rank, NEVER)
        if times > at_most:
            return Fault(expected, f"{times} collectives", seen.rank, OFTEN)
        if n_bytes < rows:
            return HOLDS
        found = f"{n_bytes} bytes, where this rank's rows have {rows}"
        return Fault(expected, found, seen.rank, f"the rows travel; work on each rank first, and send {what}")

    return view
