"""What did each rank do, in one form, whoever wrote it down?

Two sources become the same plain events: the dumps of torch's Flight Recorder, and the logs of a job. `timed` says
whether they have times. Where they have none, `start` counts what came before: calls of all ranks in dumps, lines of
one rank in logs.

gloo's dumps say when a call was made and never when it was over; NCCL's say both, as torch's watchdog noticed them.

Read next: `replays.py`, the page that shows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_course.diagnose.flight import Dump, call_name, number_of, own_frame
from ddp_course.diagnose.log_lines import Log
from ddp_course.launcher.lines import shown_name

ORDER_OF_CALLS = "These dumps do not say how long a call took, so calls stand in order, one a column. Hatched: no call."
ORDER_OF_LINES = "These lines have no times, so those of each rank stand in the order of its log. Hatched: no line."


_ITEM_SIZE = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "long int": 8, "short": 2}
_ITEM_SIZE |= {"short int": 2, "byte": 1, "unsigned char": 1, "char": 1, "signed char": 1, "bool": 1}


def payload_bytes(counts: Sequence[int], kinds: Sequence[str]) -> int | None:
    """Bytes of tensors with so many elements of these dtypes, as torch's records write them; None if they don't say."""
    sizes = [_ITEM_SIZE.get(kind.lower().removeprefix("c10::")) for kind in kinds]
    if not counts or len(counts) != len(sizes) or None in sizes:
        return None
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


@dataclass(frozen=True)
class Event:
    """Something that one rank did, or wrote."""

    rank: int | None  # None: the records do not say
    name: str
    start: float  # seconds since the first event; without times, a place in the order
    end: float
    lane: str  # one of spans.LANES, or "log"
    bytes: int | None = None  # payload of a collective or message
    line: str = ""  # of the program, or of the log


@dataclass(frozen=True)
class Recording:
    """What is on record of one run."""

    events: list[Event]
    timed: bool
    note: str  # for the reader: what the places of the events mean


def of_dumps(dumps: Mapping[int | None, Dump]) -> Recording:
    """Read Flight Recorder dumps, by rank: with times if they have some of an end, else in order.

    The order of two calls of different groups is that in which they were first made. A call that is not over lasts
    until the last of all times.
    """
    calls = [(rank, entry) for rank, dump in dumps.items() for entry in dump.entries]
    if any(entry.get("time_discovered_completed_ns") for _, entry in calls):
        spans = _times(calls)
        note = "Times as torch's watchdog noticed them, by each machine's own clock."
    else:
        spans, note = _places(calls), ORDER_OF_CALLS
    events = [_call(rank, entry, *span) for (rank, entry), span in zip(calls, spans, strict=True)]
    return Recording(events, note != ORDER_OF_CALLS, note)


def _times(calls: Sequence[tuple[int | None, dict]]) -> list[tuple[float, float]]:
    starts = [e.get("time_discovered_started_ns") or e.get("time_created_ns", 0) for _, e in calls]
    ends = [entry.get("time_discovered_completed_ns") for _, entry in calls]
    first, last = min(starts), max([*starts, *filter(None, ends)])
    return [((start - first) / 1e9, ((end or last) - first) / 1e9) for start, end in zip(starts, ends, strict=True)]


def _places(calls: Sequence[tuple[int | None, dict]]) -> list[tuple[float, float]]:
    made: dict[tuple, tuple] = {}  # call -> when the first rank made it
    keys = []
    for rank, entry in calls:
        group = str(entry.get("process_group", ""))
        # A message is its own rank's alone: sender and receiver count theirs apart.
        keys.append((group, rank, entry.get("record_id")) if entry.get("is_p2p") else (group, number_of(entry)))
        when = (entry.get("time_created_ns") or 0, number_of(entry) or 0)
        made[keys[-1]] = min(made.get(keys[-1], when), when)
    place = {key: place for place, key in enumerate(sorted(made, key=made.get))}
    return [(place[key], place[key] + 1) for key in keys]


def _call(rank: int | None, entry: dict, start: float, end: float) -> Event:
    name = call_name(entry) if entry.get("is_p2p") else f"#{number_of(entry)} {call_name(entry)}"
    counts = [math.prod(size) for size in entry.get("input_sizes") or []]
    lane = "all-reduce" if call_name(entry).startswith(("all_reduce", "allreduce")) else "other collective"
    size = payload_bytes(counts, entry.get("input_dtypes") or [])
    frame = own_frame(entry)
    line = f"{shown_name(frame['filename'])}, line {frame['line']}, in {frame['name']}" if frame else ""
    return Event(rank, name, start, end, lane, size, line)


def of_logs(logs: Sequence[Log]) -> Recording:
    """Read the lines of a job's logs that speak of a failure; with times, if all of them have one."""
    lines = [(log, index, words) for log in logs for index, words in log.telling()]
    times = [log.times[index] for log, index, _ in lines]
    timed = bool(times) and None not in times
    events, before = [], {}
    for (log, index, words), time in zip(lines, times, strict=True):
        rank = log.ranks[index]
        place = before[rank] = before.get(rank, -1) + 1
        start = (time - min(times)).total_seconds() if timed else place
        events.append(Event(rank, words, start, start + (not timed), "log", line=f"{log.name}:{index + 1}"))
    return Recording(events, timed, "Lines of the logs, by the times written in them." if timed else ORDER_OF_LINES)


def of_job(logs: Sequence[Log], dumps: Mapping[int | None, Dump]) -> Recording:
    """Read what `left_by` has found: the dumps if there are any, else the logs."""
    return of_dumps(dumps) if any(dump.entries for dump in dumps.values()) else of_logs(logs)
