"""Which mistake gave this number?

The judges of this lesson know the right number and those that the typical mistakes give for the same case. What is
nearest within a millionth is the answer's name. A case in which two of them meet would blame the wrong one, so the
tests look at every mistake of the bank.

Read next: `efficiency.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Fault

TOLERANCE = 1e-6


def first_fault(
    cases: Sequence[Any], found: Sequence[Any], fault_of: Callable[[Any, Any], Fault | None]
) -> Fault | None:
    """Return the first fault among the cases, or None."""
    return next(filter(None, (fault_of(case, answer) for case, answer in zip(cases, found, strict=True))), None)


def form_fault(answer: Any, names: str) -> Fault | None:
    """Return what is wrong with the form of an answer that should be as many finite numbers as there are names."""
    numbers, count = flat(answer), len(names.split(", "))
    if (
        isinstance(answer, list)
        and numbers
        and len(numbers) == len(answer) == count
        and all(map(math.isfinite, numbers))
    ):
        return None
    return Fault(f"{count} numbers, ({names})", short(answer), cause=f"return the tuple ({names}) of plain numbers")


def number_fault(what: str, found: float, right: float, slips: Mapping[str, float], otherwise: str) -> Fault | None:
    """Return None for the right number, else a fault that names the mistake whose number it is.

    Args:
        what: the case in words.
        slips: by cause, the number that each mistake gives.
        otherwise: the cause to name when it is none of them.
    """
    if same(found, right):
        return None
    cause = next((cause for cause, value in slips.items() if same(found, value)), otherwise)
    return Fault(f"{what}: {right:.6g}", f"{found:.6g}", cause=cause)


def same(found: float, expected: float) -> bool:
    """Whether two numbers agree to a millionth of the expected one; where that is 0, to a billionth of a second."""
    return abs(found) < 1e-9 if expected == 0 else close(found, expected, TOLERANCE)
