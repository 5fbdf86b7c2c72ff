"""Which rank do the others wait for?

A slow rank is hard to see: a collective lets nobody pass before all have come, so every rank shows the same step
time. What differs is when each rank comes to the collective. The launcher notes that for every
collective, so the rank that comes last, and by how much, can be read from records that are there already.

Left out on purpose: clocks of several machines, which differ by milliseconds. There, compare how long each rank
computes between two collectives, measured by the rank itself.
Read next: `faults/loops.py`, which slows a rank down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from ddp_course.diagnose.recognise import Diagnosis
from ddp_course.launcher.rank_status import Collective

LAST_SHARE = 0.7  # of the collectives: fewer is chance
WAITED_SHARE = 0.25  # of a step: less is not worth fixing
LEAST_COLLECTIVES = 4


def find_straggler(records: Sequence[Sequence[Collective]]) -> Diagnosis:
    """Say whether one rank holds the others up.

    Args:
        records: what `interception.recorded()` returned on each rank of one host, by rank.
    Returns:
        The fault "straggler" with its rank when the same rank comes last to most collectives, and the others could
        have begun a good part of a step earlier without it.
    """
    meetings = arrivals(records)
    if len(records) < 2 or len(meetings) < LEAST_COLLECTIVES:
        return Diagnosis(None, None, f"{len(meetings)} collectives of {len(records)} ranks are too few to compare")
    last, times = Counter(max(range(len(came)), key=came.__getitem__) for came in meetings).most_common(1)[0]
    waited_s = median(came[last] - max(came[:last] + came[last + 1 :]) for came in meetings)
    step_s = median(max(after) - max(before) for before, after in zip(meetings, meetings[1:], strict=False))
    evidence = (
        f"rank {last} came last to {times} of {len(meetings)} collectives; it alone costs the others "
        f"{max(0.0, waited_s) * 1e3:.0f} ms of a step of {step_s * 1e3:.0f} ms"
    )
    slow = times >= LAST_SHARE * len(meetings) and waited_s >= WAITED_SHARE * step_s
    return Diagnosis("straggler", last, evidence) if slow else Diagnosis(None, None, f"no rank is slow: {evidence}")


def arrivals(records: Sequence[Sequence[Collective]]) -> list[list[float]]:
    """When each rank came to each collective of the default group that all of them recorded, in seconds."""
    entered = [{call.seq: call.entered_ns for call in calls if not call.group} for calls in records]
    common = sorted(set.intersection(*map(set, entered))) if entered else []
    start_ns = min((times[seq] for times in entered for seq in common), default=0)
    return [[(times[seq] - start_ns) / 1e9 for times in entered] for seq in common]
