"""A gradient is not what it should be: how did it come to this?

Each mistake leaves another number behind: W times the mean, a W-th of it, the rank's own, rank 0's. So the number tells
the mistake. Read next: `start.py`.
"""

from __future__ import annotations

from dataclasses import replace

from ddp_course.grading.compare import close, factor, flat, is_factor, short
from ddp_course.grading.exercise import Fault
from judges.ddp_from_scratch.nets import Gradients, Task, Truth

TOLERANCE = 1e-9
FIRST_HALF = ("all_reduce", "all_gather", "reduce", "reduce_scatter", "gather", "all_to_all")  # bring values together
NOTHING_SENT = "no gradient was sent to another rank"
OWN = "this is the rank's own gradient; the mean over the ranks must come into .grad itself, not into a copy"
ZERO = "a gradient that is missing on some ranks counts as zero there: give zeros to the sum, and set .grad to the mean"
STAYS_NONE = (
    "no rank has this gradient, so it must stay None; with zeros, momentum or weight decay would move the weight"
)

MIXTURE = "a mixture: one rank's gradient met another parameter's, or a part of the ranks is missing in the sum"


def gradient_fault(
    found: Gradients, step: int, task: Task, right: Gradients, own: list[Gradients] | None, rank: int, sent: bool = True
) -> Fault | None:
    """Compare one rank's gradients of one step with those of one process, and guess how they went wrong.

    Args:
        own: what each rank's backward alone would give; None where that is not known.
        sent: whether the rank took part in any collective.
    """
    for name, expected in right.items():
        if _same(found[name], expected):
            continue
        begins = "None" if expected is None else f"{short(flat(expected))}"
        cause = _cause(found, name, right, own, rank, task)
        if not sent and (own is None or len(own) > 1):
            cause = NOTHING_SENT
        return Fault(
            f"in step {step + 1}, the gradient of {name} is {begins}",
            "None" if found[name] is None else short(flat(found[name])),
            rank,
            cause,
        )
    return None


def _same(found: list | None, expected: list | None) -> bool:
    return found is None if expected is None else found is not None and close(found, expected, TOLERANCE)


def _cause(found: Gradients, name: str, right: Gradients, own: list[Gradients] | None, rank: int, task: Task) -> str:
    grad, mean = found[name], right[name]
    if mean is None:
        return STAYS_NONE
    had = [theirs[name] for theirs in own] if own else []
    some = sum(theirs is not None for theirs in had)
    if grad is None:
        if all(value is None for value in found.values()):
            return "all gradients are None; they must be in the .grad of the module's own parameters"
        return ZERO if some < len(had) or not had else "backward gave a gradient here, and it is gone"
    world_size = len(task.uses[0])
    if 0 < some < len(had) and is_factor(grad, mean, len(had) / some):
        return "this is the mean over the ranks that have the gradient; divide by the number of all ranks"
    if is_factor(grad, mean, world_size):
        return "gradients are summed over the ranks, not averaged: divide by the world size"
    if is_factor(grad, mean, 1 / world_size):
        return "gradients are divided by the world size twice; once is enough, before the sum or after it"
    if is_factor(grad, mean, world_size / task.rows) or is_factor(grad, mean, 1 / task.rows):
        return "this is divided by the number of rows; the loss is a mean over rows already: divide by the world size"
    return _own_cause(found, name, right, had, rank) or _general_cause(grad, mean)


def _own_cause(found: Gradients, name: str, right: Gradients, had: list, rank: int) -> str:
    """The gradient is one rank's alone, or a part of it."""
    grad = found[name]
    if not had or had[rank] is None:
        zero = had and not any(flat(grad))
        return ZERO if zero else ""
    if close(grad, had[rank], TOLERANCE):
        trained = [n for n, value in right.items() if value is not None]
        averaged = [n for n in trained if found[n] is not None and close(found[n], right[n], TOLERANCE)]
        if averaged:
            return f"{name} was left out of the average, and {averaged[0]} was not: go through all parameters"
        return OWN
    if is_factor(grad, had[rank], 1 / len(had)):
        return (
            "this is the rank's own gradient, divided: the sum over the ranks did not come into .grad, or was not "
            "waited for"
        )
    if had[0] is not None and close(grad, had[0], TOLERANCE):
        return "this is rank 0's gradient; a mean needs a sum over the ranks, not a broadcast"
    return ""


def _general_cause(grad: list, mean: list) -> str:
    if (times := factor(grad, mean)) is not None:
        return f"this is {times:.3g} times the mean; divide by the world size, once"
    return MIXTURE


def first_fault(task: Task, notes: list[dict], whole: Truth, steps: range, missing: bool | None = None) -> Fault | None:
    """Return the first wrong gradient of any rank in these steps.

    Args:
        missing: True judges only gradients that no rank has, False only those that some rank has.
    """
    for rank, note in rank_0_last(notes):
        for step in steps:
            right = {n: g for n, g in whole.gradients[step].items() if missing is None or (g is None) == missing}
            own, found = whole.own if step == 0 else None, note["steps"][step]
            fault = gradient_fault(found["gradients"], step, task, right, own, rank, found["calls"] > 0)
            if (
                fault
                and fault.cause == MIXTURE
                and not gradient_fault(notes[0]["steps"][step]["gradients"], step, task, right, own, 0)
            ):
                return replace(fault, cause="rank 0 has the mean, the others have not: reduce leaves it on dst only")
            if fault:
                return fault
    return None


def rank_0_last(notes: list) -> list[tuple[int, dict]]:
    """Return ranks with their notes; on rank 0, its own gradient and a gradient from rank 0 look alike."""
    return [*enumerate(notes)][1:] + [(0, notes[0])]


def bytes_brought(calls: list) -> int:
    """Bytes that a rank gave to collectives which bring values together; giving out the result is not counted."""
    return sum(call.n_bytes for call in calls if call.op in FIRST_HALF)
