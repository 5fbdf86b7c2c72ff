"""Where is this rank right now?

Runs inside a rank, on its watcher thread, and answers from two sources: torch's Flight Recorder, which
notes every collective that NCCL or gloo was given, and the main thread's Python stack. Together they say
"in all_reduce #3 of 4 kB, at your line 7". The recorder's reader is private to torch, so all that touches it
is below `recorded`.

Left out on purpose: point-to-point messages, which gloo does not record.
Read next: `report.py`, which lays the answers of all ranks side by side.
"""

from __future__ import annotations

import json
import linecache
import math
import os
import sys
import sysconfig
import time
import traceback
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

RECORDER_ENTRIES = "500"  # how many collectives the recorder keeps
MOST_REPORTED = 100  # how many of them a report needs

_COURSE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LAUNCH = os.path.dirname(os.path.abspath(__file__))
_GRADING = os.path.join(_COURSE, "grading")
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")})
_ITEM_SIZE = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


@dataclass(frozen=True)
class Collective:
    """One collective as a rank entered it."""

    number: int  # counts from 1 within one call of the learner's function, on each group apart
    seq: int  # counts from 1 since the group was made: equal on all ranks that are in step
    op: str  # "all_reduce"
    dtype: str  # "Float"; "" for a barrier
    sizes: tuple[tuple[int, ...], ...]  # of the input tensors
    group: str  # "" for the default group
    members: tuple[int, ...]  # the ranks of the group
    finished: bool
    entered_ns: int  # on the clock of `time.time_ns`

    @property
    def n_bytes(self) -> int:
        """Payload of this rank, in bytes."""
        return _ITEM_SIZE.get(self.dtype, 0) * sum(map(math.prod, self.sizes))

    def __str__(self) -> str:
        where = f" on {self.group}" if self.group else ""
        shape = f" ({self.dtype.lower()} {', '.join(str(list(s)) for s in self.sizes)}, {_bytes(self.n_bytes)})"
        return f"{self.op} #{self.number}{shape if self.sizes else ''}{where}"


@dataclass(frozen=True)
class Line:
    """One line of a program, as a stack shows it."""

    filename: str
    number: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{shown_name(self.filename)}, line {self.number}, in {self.function}: {self.source}"


@dataclass
class Whereabouts:
    """What one rank was doing when it was asked."""

    rank: int
    status: str  # "running", "returned", "raised", "died" or "silent"
    line: Line | None = None  # the learner's innermost line
    recent: list[Collective] = field(default_factory=list)  # newest last
    detail: str = ""  # of a rank that raised or died: how
    asked_ns: int = field(default_factory=time.time_ns)

    @property
    def waiting_in(self) -> Collective | None:
        """The oldest collective this rank has entered and not left."""
        return next((c for c in self.recent if not c.finished), None)

    @property
    def waited_s(self) -> float:
        """How long it has been in that collective, in seconds; 0 if in none."""
        return (self.asked_ns - self.waiting_in.entered_ns) / 1e9 if self.waiting_in else 0.0


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


# --- The recorder ----------------------------------------------------------------------------------


def switch_on_recorder() -> None:
    """Have torch record collectives. Call it before the first process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDER_ENTRIES)


def recorded(since_ns: int = 0) -> list[Collective]:
    """Return the last collectives entered on each group, oldest first; those before `since_ns` only set the count.

    Args:
        since_ns: `time.time_ns()` at the start of the call.
    """
    base: dict[str, int] = {}
    found = []
    for entry in _entries():
        group, seq = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"]:
            continue
        if entry["time_created_ns"] < since_ns:
            base[group] = seq
        else:
            found.append(_collective(entry, seq - base.get(group, 0)))
    return found[-MOST_REPORTED:]


def _collective(entry: dict, number: int) -> Collective:
    group, description = entry["process_group"]
    return Collective(
        number=number,
        seq=entry["collective_seq_id"],
        op=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        dtype=next(iter(entry["input_dtypes"]), ""),
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        group="" if description == "default_pg" else f"subgroup {group}",
        members=_members(group),
        finished=bool(entry["retired"]) or entry["state"] == "completed",
        entered_ns=entry["time_created_ns"],
    )


def _members(group: str) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(_resolve_process_group(group)))
    except (LookupError, ValueError, RuntimeError):  # the group has been destroyed since
        return ()


def progress() -> int:
    """Return how many collectives the default group has been given; cheap, unlike `recorded`. 0 without a group."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else 0
    except (AttributeError, RuntimeError):  # the group is being opened or destroyed
        return 0


def _entries() -> list[dict]:
    # The readers are private to torch; tests hold them to their word on the oldest and the newest torch we support.
    # NCCL has a recorder of its own, in builds with CUDA.
    torch_c = torch._C._distributed_c10d
    readers = [torch_c._dump_fr_trace_json, getattr(torch_c, "_dump_nccl_trace_json", None)]
    return [entry for reader in readers if reader for entry in json.loads(reader()).get("entries", [])]


# --- The stack -------------------------------------------------------------------------------------


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that the learner wrote, outermost first; if there are none, the course's."""
    frames = [frame for frame in stack if not frame.filename.startswith(("<frozen", "<string>", _LAUNCH, _GRADING))]
    mine = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, _COURSE))]
    return mine or [frame for frame in frames if frame.filename.startswith(_COURSE)]


def own_line(stack: traceback.StackSummary) -> Line | None:
    """Return the innermost of the learner's own lines."""
    if not (frames := own_frames(stack)):
        return None
    last = frames[-1]
    return Line(last.filename, last.lineno or 0, last.name, (last.line or "").strip())


def stack_of(thread_id: int) -> traceback.StackSummary:
    """Return the Python stack of a thread of this process, outermost frame first."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    return (
        traceback.StackSummary.extract(reversed(list(traceback.walk_stack(frame))))
        if frame
        else traceback.StackSummary()
    )


def shown_name(filename: str) -> str:
    """Name a file as the learner knows it: a notebook's cell is "the cell", not a temporary file."""
    if "ipykernel_" in filename or filename.startswith("<ipython-input") or filename.startswith("<ranks"):
        return "the cell"
    inside = os.path.relpath(filename, os.path.dirname(_COURSE)) if filename.startswith(_COURSE) else filename
    return inside if filename.startswith(_COURSE) else os.path.basename(filename)


def cell_sources() -> dict[str, list[str]]:
    """Return the source lines of all notebook cells known here, for ranks to show in their tracebacks."""
    return {
        name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and shown_name(name) == "the cell"
    }


def learn_sources(sources: dict[str, list[str]]) -> None:
    """Make the lines of `cell_sources` known to this process's tracebacks."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
