"""What the exercises of lesson 14 have in common: a tuple of a few numbers. Read next: `message_cost.py`."""

from __future__ import annotations

import math

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import flat, short
from ddp_course.grading.vocabulary.expect import Expect, all_of
from ddp_course.grading.vocabulary.play import Seen


def numbers(names: str, *expects: Expect) -> Expect:
    """Expect as many finite numbers as there are names; then, in turn, what is expected of them."""
    count = len(names.split(", "))

    def form(seen: Seen) -> Fault | None:
        answer = seen["value"]
        found = flat(answer) if isinstance(answer, list) else None
        if found and len(found) == len(answer) == count and all(map(math.isfinite, found)):
            return None
        return Fault(f"{count} numbers, ({names})", short(answer), cause=f"return the tuple ({names}) of plain numbers")

    return all_of(form, *expects)
