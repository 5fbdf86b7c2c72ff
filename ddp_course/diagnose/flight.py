"""What do the dumps of torch's Flight Recorder say? The calls of each rank, and who fell behind.

torch writes them as JSON or as a pickle. A pickle can run code when it is read, so it is read by an unpickler that
refuses everything but numbers, texts and containers of them; a dump holds nothing else.

Read next: `logs.py`, which reads the rest of what a job leaves.
"""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 200_000_000


class _PlainOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump holds plain data, and this holds {module}.{name}")


@dataclass(frozen=True)
class Dump:
    """One rank's calls, oldest first."""

    rank: int | None
    entries: list[dict]


@dataclass(frozen=True)
class Behind:
    """The rank that made fewer calls than the others, and the first that it did not make."""

    rank: int | None
    collective: str
    evidence: str


def _plain(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(1)
        data = start + file.read(MOST_BYTES) if start in (b"\x80", b"{") else b""
    return _PlainOnly(io.BytesIO(data)).load() if data[:1] == b"\x80" else json.loads(data)


def load(path: Path) -> Dump | None:
    """Read a dump; None if the file is something else."""
    try:
        found = _plain(path)
    except Exception:  # any bytes may be offered as a pickle, and fail in any way
        return None
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        return None
    rank = found.get("rank")
    return Dump(rank if isinstance(rank, int) else None, [each for each in found["entries"] if isinstance(each, dict)])


def behind(dumps: dict[int | None, Dump]) -> Behind | None:
    """Compare the ranks' calls group by group: the first in which they differ, or that not all have made."""
    calls: dict[str, dict[int, dict[int, dict]]] = {}
    for rank, dump in dumps.items():
        for entry in dump.entries:
            number = number_of(entry)
            if rank is not None and isinstance(number, int) and not entry.get("is_p2p"):
                calls.setdefault(str(entry.get("process_group", "")), {}).setdefault(rank, {})[number] = entry
    for ranks in calls.values():
        if len(ranks) < 2:
            continue
        last = {rank: max(numbers) for rank, numbers in ranks.items()}
        common = range(max(min(numbers) for numbers in ranks.values()), min(last.values()) + 1)
        for number in common:
            here = {rank: call_name(numbers[number]) for rank, numbers in ranks.items() if number in numbers}
            if len(set(here.values())) > 1:
                alone = [rank for rank, what in here.items() if list(here.values()).count(what) == 1]
                said = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(here.items()))
                return Behind(alone[0] if len(alone) == 1 else None, f"#{number}", f"call {number} differs: {said}")
        if max(last.values()) > min(last.values()):
            rank = min(last, key=last.get)
            number = last[rank] + 1
            entry = next(numbers[number] for numbers in ranks.values() if number in numbers)
            counts = ", ".join(f"rank {each} {count}" for each, count in sorted(last.items()))
            sole = list(last.values()).count(last[rank]) == 1
            return Behind(rank if sole else None, f"{call_name(entry)} #{number}", f"calls made: {counts}{_at(entry)}")
    return None


def number_of(entry: dict) -> int | None:
    """The number of a collective in its group; equal on ranks that are in step."""
    return entry.get("collective_seq_id") or entry.get("seq_id")


def call_name(entry: dict) -> str:
    """What was called, with the sizes of its input: "all_reduce[[1000]]"."""
    name = str(entry.get("profiling_name", "")).rpartition(":")[2]
    return f"{name}{entry.get('input_sizes', '')}"


def own_frame(entry: dict) -> dict | None:
    """The innermost frame of a call that is not torch's, with its filename, line and name, if the dump says."""
    return next((each for each in entry.get("frames", []) if "torch" not in str(each.get("filename", ""))), None)


def _at(entry: dict) -> str:
    frame = own_frame(entry)
    return f"; the others are at {frame['filename']}:{frame['line']}" if frame else ""
