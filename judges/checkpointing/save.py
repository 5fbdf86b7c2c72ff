"""10.1 `save_atomically(rank, world_size, state, path)`: is the file whole or not there, whatever happens?

Nothing is pretended: the system's own limit on the size of a file makes the writing fail half way, or kills the rank.
Read next: `load.py`.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.expect import Ending, all_of, equals, exercise, first_mistake, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, read

SLOW_S, LATE_S = 0.1, 0.2  # of the writer: at each step, and before it begins
ROWS, OLD = 50, [0.0, 3, 0]  # of a state; what stands for the old one, as `Case.state`
FINE = 2**-12  # is lost where weights are saved in fewer bits
MOST_BYTES, LARGE = 20_000, 100_000  # that a file may have where the writing is to fail; numbers that need more


@dataclass(frozen=True)
class Case:
    """A file, the weights of each rank's state, and what becomes of a rank that writes too much: an error, or death."""

    path: str
    values: list[int]
    too_much: signal.Handlers | None = None
    refuses: bool = False  # the state holds what pickle refuses

    def state(self, rank: int) -> list:
        """Return what tells a rank's state from others: weights, how many, step."""
        return [self.values[rank] + FINE, ROWS, self.values[rank]]

    def content(self) -> Any:
        """Return the same of the file, or why there is none."""
        return read(self.path, lambda state: [state["w"].double().mean().item(), len(state["w"]), state.get("step")])

    def left(self) -> str:
        """Return the name of a file beside it, if there is one."""
        return next((other.name for other in Path(self.path).parent.iterdir() if str(other) != self.path), "")


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Save over an old file: rank 0 late and slow; or more than a file may hold."""
    path = Path(case.path)
    if rank == 0:
        torch.save({"w": torch.zeros(3), "step": 0}, path)
    dist.barrier()
    if case.too_much is not None:
        state = {"w": torch.ones(LARGE), "step": (lambda: 2) if case.refuses else 2}
        known = _errors(state, path.parent.parent / "probe") if case.too_much == signal.SIG_IGN else []
        with file_limit(case.too_much):
            try:
                function(rank, world_size, state, path)
            except NotImplementedError:
                raise
            except Exception as error:
                return Note(error=type(error).__name__, known=_comes_out(error, known))
        return Note()
    time.sleep(0 if rank else LATE_S)
    state = {"w": torch.full((ROWS,), case.values[rank] + FINE), "step": case.values[rank]}
    with file_events(function, case.path, 0 if rank else SLOW_S) as events, observe.Collectives() as seen:
        function(rank, world_size, state, path)
    size = path.stat().st_size if path.exists() else 0
    return Note(events=events, talked=len(seen.calls), found=case.content(), size=size)


def _errors(state: Any, probe: Path) -> list[str]:
    """Return what a writing that fails half way raises here, in each way to write."""

    def opened() -> None:
        with open(probe, "wb") as file:
            torch.save(state, file)

    def in_memory() -> None:
        data = io.BytesIO()
        torch.save(state, data)
        probe.write_bytes(data.getvalue())

    said = []
    with file_limit(signal.SIG_IGN):
        for way in (opened, in_memory, lambda: torch.save(state, probe)):
            try:
                way()
            except Exception as error:
                said.append(_plain(error))
    probe.unlink(missing_ok=True)
    return said


def _comes_out(error: BaseException | None, known: list[str]) -> bool:
    """Whether an error is the one that happened, or says that it comes from that."""
    if error is None:
        return False
    too_large = isinstance(error, OSError) and error.errno == errno.EFBIG
    return too_large or _plain(error) in known or _comes_out(error.__cause__, known)


def _plain(error: Exception) -> str:
    """An error as text, without what differs from one writing to the next."""
    return re.sub(r"\d+|/\S+", "#", f"{type(error).__name__}: {error}")


@contextmanager
def file_limit(too_much: signal.Handlers) -> Iterator[None]:
    """Within the block, no file may have more than `MOST_BYTES`."""
    handler, limits = signal.signal(signal.SIGXFSZ, too_much), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def rounds(rng: Random, folder: Path) -> list[Round]:
    """Save with several ranks, then let the writing fail, then let it kill."""
    world_size = rng.choice((2, 3, 4))
    values = rng.sample(range(1, 100), world_size)

    def case(name: str, *args: Any) -> list[tuple[str, Case]]:
        (folder / name).mkdir()
        return [(name, Case(str(folder / name / "last.pt"), *args))]

    return [
        Round(world_size, case("saved", values)),
        Round(1, case("failed", [], signal.SIG_IGN) + case("refused", [], signal.SIG_IGN, True), (Exception,)),
        Ending(1, case("killed", [], signal.SIG_DFL), (Exception,), how="SIGXFSZ"),
    ]


# --- What is expected ------------------------------------------------------------------------------

state = equals(
    "rank 0's state: weights, their number, and step",
    lambda seen: seen.case.state(0),
    lambda seen: [
        ("the new file never came to its name: os.replace", OLD),
        *((f"rank {r} wrote this; only rank 0 may write", seen.case.state(r)) for r in range(seen.world_size)),
    ],
    "save the state as it is given, all of it",
    of=lambda seen: seen.case.content(),
    form=lambda found: "save with torch.save, under the name that is given" if isinstance(found, str) else "",
)


def alone(seen: Seen) -> Fault | None:
    """No other file is in the folder."""
    left = seen.case.left()
    return first_mistake("one file in the folder", {"rename it, or remove it": left and f"also {left}"})


def writer(seen: Seen) -> Fault | None:
    """Rank 0 writes beside the file and renames; no other rank does anything."""
    path, events = seen.case.path, [event for event in seen["events"] if event[0] != "fsync"]
    if seen.rank:
        cause = "this rank has the same weights, so its file is not needed, and two writers mix: if rank == 0"
        found = events and f"{len(events)} file operations"
        return first_mistake("no file opened on this rank", {cause: found}, seen.rank)
    froms = [event[1] for event in events if event[0] == "rename" and event[2] == path]
    taken = ("remove", path) in events or any(event[:2] == ("rename", path) for event in events)
    return first_mistake("rank 0 alone writes, under another name in the same folder, and renames", {
        "this writes in place: from the first moment on, the old file is gone; write to another name":
            ("write", path) in events and f"{os.path.basename(path)} itself was opened for writing",
        "from then to the rename there is no file under the name at all; os.replace replaces it in one step":
            taken and "the old file was taken away first",
        "os.replace(unfinished, path)": not froms and "no rename to the name that is given",
        "take the same folder: a rename is atomic within one file system only, and another folder may be elsewhere":
            froms and os.path.dirname(froms[0]) != os.path.dirname(path) and "the file came from another folder",
    }, 0)  # fmt: skip


def fsync(seen: Seen) -> Fault | None:
    """All bytes are on the disk before the rename."""
    events, size = seen["events"], seen["size"]
    renamed = next((i for i, e in enumerate(events) if e[0] == "rename" and e[2] == seen.case.path), None)
    synced = [event[1] for event in events[:renamed] if event[0] == "fsync"]
    return first_mistake("fsync of the whole file, then the rename", {
        "after a power cut the new name may be there and the bytes not: os.fsync(file.fileno())":
            all(event[0] != "fsync" for event in events) and "no fsync of a file",
        "until the fsync, the new name may stand for no bytes": not synced and "the rename comes first",
        "Python still holds the rest in its buffer: file.flush() before os.fsync":
            synced and max(synced) < size and f"fsync of {max(synced)} of {size} bytes",
    }, 0)  # fmt: skip


def wait(seen: Seen) -> Fault | None:
    """The new file is there when a rank goes on."""
    found = seen["found"]
    what = found if isinstance(found, str) else "the old file" if found == OLD else "another state"
    return first_mistake("the new file is there when the function returns", {
        "nobody waits: dist.barrier() at the end": not seen["talked"] and "no collective was called",
        "the ranks meet before the file is there; dist.barrier() must come after the rename, on every rank":
            found != seen.case.state(0) and what,
    }, seen.rank)  # fmt: skip


def survives(seen: Seen) -> Fault | None:
    """The old file is as it was; a writer that lives says that it failed, and leaves nothing else."""
    found, left, lives = seen.case.content(), seen.case.left(), seen.case.too_much == signal.SIG_IGN
    full = "the state holds a function, which torch.save refuses" if seen.case.refuses else "the disk is full half way"
    when = f"{full}: no other file, an exception, and" if lives else "the rank is killed half way:"
    return first_mistake(f"{when} the old file as it was", {
        "the old file is removed before the new one is there; os.replace needs no removing":
            found == "no file" and found,
        "the old file is gone with the first byte of the new one; write to another name, then os.replace. Or half a "
        "file was renamed: an unbuffered write may write less than it was given, and does not raise":
            found != OLD and (found if isinstance(found, str) else "another state"),
        "the exception is swallowed, so the run goes on and nobody knows that nothing was saved; raise it":
            lives and not seen["error"] and "no exception",
        "let the exception out as it is, by a bare `raise`: another one hides what was wrong":
            lives and not seen["known"] and f"a {seen['error']} of its own",
        "half a file stays behind and fills the disk; remove it when the writing fails: try, except, raise":
            lives and left and f"{left} is left behind",
    })  # fmt: skip


SAVE = exercise(
    "10.1",
    "One atomic writer",
    "save_atomically",
    20,
    act=act,
    rounds=rounds,
    within=fresh_folder,
    checks={
        "content": ("the file holds rank 0's state", 1, once(all_of(state, alone)), "saved"),
        "writer": ("rank 0 alone writes, beside the file, and renames", 2, writer, "saved"),
        "fsync": ("the bytes are on the disk before the rename", 1, once(fsync), "saved"),
        "wait": ("no rank goes on before the file is there", 1, wait, "saved"),
        "failed": ("a write that fails leaves the old file, and nothing else", 2, survives, "failed refused"),
        "killed": ("a rank killed while it writes leaves the old file", 1, survives, "killed"),
    },
    refused=("ddp_course.checkpoint.file.save_checkpoint", "ddp_course.checkpoint.folder.Checkpointer"),
    hints={
        r"unsupported operand type.*Path": "path is a pathlib.Path: path.with_name(...), or text of it: str(path)",
        "absent|cut-off|limit": "a barrier that not every rank enters; it must stand outside of `if rank == 0`",
    },
)
