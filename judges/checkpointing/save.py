"""10.1 `save_atomically(rank, world_size, state, path)`: is the file whole or not there, whatever happens?

Nothing is pretended: the system's own limit on the size of a file makes the writing fail half way, or kills the rank.
Read next: `load.py`.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from ddp_course.grading import observe
from ddp_course.grading.compare import short
from ddp_course.grading.exercise import AnswerFailed, Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.checkpointing.files import FileEvents, fresh_folder, synced_files

SLOW_S = 0.1  # at each step of the writer
LATE_S = 0.2  # the writer comes last
MOST_BYTES = 20_000  # that a file may have, where the writing is to fail
LARGE = 100_000  # numbers in a state that has more

Note = dict[str, Any]


def save_driver(rank: int, world_size: int, function: Callable, path: str, values: list[float]) -> Note:
    """Save over an old file, rank 0 late and slow; note what this rank did, and what it found when it went on."""
    if rank == 0:
        torch.save({"w": torch.zeros(3)}, path)
    torch.distributed.barrier()
    files = FileEvents(os.path.dirname(path), SLOW_S if rank == 0 else 0.0)
    time.sleep(LATE_S if rank == 0 else 0.0)
    state = {"w": torch.full((50,), values[rank]), "step": int(values[rank])}
    with synced_files(function, files.events), observe.Collectives() as seen:
        function(rank, world_size, state, Path(path))
    return {
        "events": files.events,
        "calls": len(seen.calls),
        "found": _content(path),
        "size": os.path.getsize(path),
    }


def failing_driver(rank: int, world_size: int, function: Callable, path: str, deadly: bool) -> str | None:
    """Save more than a file may hold; return the name of the exception that came out."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if deadly else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
    try:
        function(rank, world_size, {"w": torch.ones(LARGE), "step": 2}, Path(path))
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return None


def save_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Save with several ranks, then let the writing fail, then let it kill."""
    world_size = rng.choice((2, 3, 4))
    values = [float(value) for value in rng.sample(range(1, 100), world_size)]
    with fresh_folder() as folder:
        path = str(folder / "last.pt")
        notes = answer.run(save_driver, world_size, path, values, init=True)
        left = [name for name in os.listdir(folder) if name != "last.pt"]
        yield "content", _content_fault(_content(path), values, left)
    yield "writer", next(filter(None, (_writer_fault(rank, note, path) for rank, note in enumerate(notes))), None)
    yield "fsync", _fsync_fault(notes[0], path)
    yield "wait", next(filter(None, (_wait_fault(rank, note, values) for rank, note in enumerate(notes))), None)
    yield "failed", _failed_fault(answer)
    yield "killed", _killed_fault(answer)


def _content(path: str) -> Any:
    """Return what tells one state from another, or why there is none."""
    try:
        state = torch.load(path, weights_only=True)
        return [state["w"].double().mean().item(), len(state["w"]), state.get("step")]
    except Exception as error:
        return f"a file that cannot be read ({type(error).__name__})" if os.path.exists(path) else "no file"


def _content_fault(found: Any, values: list[float], left: list[str]) -> Fault | None:
    expected = [values[0], 50, int(values[0])]
    if found == expected:
        return Fault("one file in the folder", f"also {left[0]}", cause="rename it, or remove it") if left else None
    if isinstance(found, str):
        return Fault("rank 0's state in the file", found, cause="save with torch.save, under the name that is given")
    if found[1] != 50:
        return Fault(
            "rank 0's state in the file", "the old state", cause="the new file never came to its name: os.replace"
        )
    if found[0] in values[1:]:
        cause = f"this is the state of rank {values.index(found[0])}; only rank 0 may write"
    else:
        cause = "save the state as it is given, all of it"
    return Fault(f"step {expected[2]} and weights of {short(expected[0])}", f"{short(found)}", cause=cause)


def _writer_fault(rank: int, note: Note, path: str) -> Fault | None:
    expected = "rank 0 alone writes, under another name in the same folder, and renames"
    events = [event for event in note["events"] if event[0] != "fsync"]
    if rank > 0:
        if not events:
            return None
        cause = "this rank has the same weights, so its file is not needed, and two writers mix: if rank == 0"
        return Fault("no file opened on this rank", f"{len(events)} file operations", rank, cause)
    renames = [event for event in events if event[0] == "rename" and event[2] == path]
    if ("write", path) in events:
        cause = "this writes in place: from the first moment on, the old file is gone; write to another name"
        return Fault(expected, f"{os.path.basename(path)} itself was opened for writing", rank, cause)
    if ("remove", path) in events or any(event[:2] == ("rename", path) for event in events):
        cause = "from then to the rename there is no file under the name at all; os.replace replaces it in one step"
        return Fault(expected, "the old file was taken away first", rank, cause)
    if not renames:
        return Fault(expected, "no rename to the name that is given", rank, "os.replace(unfinished, path)")
    if os.path.dirname(renames[0][1]) != os.path.dirname(path):
        cause = (
            "take the same folder: a rename is atomic within one file system only, and another folder may be elsewhere"
        )
        return Fault(expected, "the file came from another folder", rank, cause)
    return None


def _fsync_fault(note: Note, path: str) -> Fault | None:
    kinds = [event[0] for event in note["events"]]
    expected = "fsync of the whole file, then the rename"
    if "fsync" not in kinds:
        cause = "after a power cut the new name may be there and the bytes not: os.fsync(file.fileno())"
        return Fault(expected, "no fsync of a file", 0, cause)
    renamed = [i for i, event in enumerate(note["events"]) if event[0] == "rename" and event[2] == path]
    before = note["events"][: renamed[0]] if renamed else note["events"]
    sizes = [event[1] for event in before if event[0] == "fsync"]
    if not sizes:
        return Fault(expected, "the rename comes first", 0, "until the fsync, the new name may stand for no bytes")
    if max(sizes) < note["size"]:
        cause = "Python still holds the rest in its buffer: file.flush() before os.fsync"
        return Fault(expected, f"fsync of {max(sizes)} of {note['size']} bytes", 0, cause)
    return None


def _wait_fault(rank: int, note: Note, values: list[float]) -> Fault | None:
    found, expected = note["found"], "the new file is there when the function returns"
    if not isinstance(found, str) and found[0] == values[0] and note["calls"]:
        return None
    what = found if isinstance(found, str) else "the old file" if found[1] != 50 else "another rank's state"
    if not note["calls"]:
        return Fault(expected, f"{what}; no collective was called", rank, "nobody waits: dist.barrier() at the end")
    cause = "the ranks meet before the file is there; dist.barrier() must come after the rename, on every rank"
    return Fault(expected, what, rank, cause)


def _failed_fault(answer: Answer) -> Fault | None:
    with fresh_folder() as folder:
        torch.save({"w": torch.zeros(3)}, folder / "last.pt")
        error = answer.run(failing_driver, 1, str(folder / "last.pt"), False, init=True)[0]
        found, left = _content(str(folder / "last.pt")), [name for name in os.listdir(folder) if name != "last.pt"]
    expected = "the disk is full half way: the old file as it was, no other file, and the exception comes out"
    if found != [0.0, 3, None]:
        return Fault(expected, _lost(found), cause=_lost_cause(found))
    if error is None:
        cause = "the exception is swallowed, so the run goes on and nobody knows that nothing was saved; raise it"
        return Fault(expected, "no exception", cause=cause)
    if left:
        cause = "half a file stays behind and fills the disk; remove it when the writing fails: try, except, raise"
        return Fault(expected, f"{left[0]} is left behind", cause=cause)
    return None


def _killed_fault(answer: Answer) -> Fault | None:
    with fresh_folder() as folder:
        torch.save({"w": torch.zeros(3)}, folder / "last.pt")
        try:
            answer.run(failing_driver, 1, str(folder / "last.pt"), True, init=True)
        except AnswerFailed as failed:
            if "SIGXFSZ" not in failed.fault.report:  # not the killing that was meant
                raise
        found = _content(str(folder / "last.pt"))
    if found == [0.0, 3, None]:
        return None
    return Fault("the rank is killed half way: the old file as it was", _lost(found), cause=_lost_cause(found))


def _lost(found: Any) -> str:
    return found if isinstance(found, str) else "another state"


def _lost_cause(found: Any) -> str:
    if found == "no file":
        return "the old file is removed before the new one is there; os.replace needs no removing"
    return (
        "the old file is gone with the first byte of the new one; write to another name, then os.replace. Or half a "
        "file was renamed: an unbuffered write may write less than it was given, and does not raise"
    )


SAVE = Exercise(
    "10.1",
    "One atomic writer",
    "save_atomically",
    20,
    (
        Check("content", "the file holds rank 0's state", 1),
        Check("writer", "rank 0 alone writes, beside the file, and renames", 2),
        Check("fsync", "the bytes are on the disk before the rename", 1),
        Check("wait", "no rank goes on before the file is there", 1),
        Check("failed", "a write that fails leaves the old file, and nothing else", 2),
        Check("killed", "a rank killed while it writes leaves the old file", 1),
    ),
    save_judge,
    refused=("ddp_course.checkpoint.file.save_checkpoint", "ddp_course.checkpoint.folder.Checkpointer"),
    hints=(
        (r"unsupported operand type.*Path", "path is a pathlib.Path: path.with_name(...), or text of it: str(path)"),
        (
            r"never entered|lost the connection|no result after",
            "a barrier that not every rank enters; it must stand outside of `if rank == 0`",
        ),
    ),
)
