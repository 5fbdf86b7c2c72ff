"""10.1 `save_atomically(rank, world_size, state, path)`: is the file whole or not there, whatever happens?

Nothing is pretended: the system's own limit on the size of a file makes the writing fail half way, or kills the rank.
Read next: `load.py`.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, read

SLOW_S, LATE_S = 0.1, 0.2  # of the writer: at each step, and before it begins
ROWS, OLD = 50, [0.0, 3, 0]  # of a state; the old one: mean weight, how many, step
FINE = 2**-12  # is lost where weights are saved in fewer bits
MOST_BYTES, LARGE = 20_000, 100_000  # that a file may have where the writing is to fail; numbers that need more


@dataclass(frozen=True)
class Case:
    """A file, the weights of each rank's state, and what becomes of a rank that writes too much: an error, or death."""

    path: str
    values: list[int]
    too_much: signal.Handlers | None = None
    refuses: bool = False  # the state holds what pickle refuses

    def content(self) -> list | str:
        """Return what tells the file's state from others, or why there is none."""
        found = read(self.path, lambda state: [state["w"].double().mean().item(), len(state["w"]), state.get("step")])
        return found.partition(" (")[0] if isinstance(found, str) else found

    def left(self) -> bool:
        """Whether there is a file beside it."""
        return any(str(other) != self.path for other in Path(self.path).parent.iterdir())


def cases(rng: Random, folder: Path) -> list[Round]:
    """Save with several ranks, then let the writing fail, then let it kill."""
    world_size = rng.choice((2, 3, 4))
    values = rng.sample(range(1, 100), world_size)

    def case(name: str, *args: Any) -> list[tuple[str, Case]]:
        (folder / name).mkdir()
        return [(name, Case(str(folder / name / "last.pt"), *args))]

    return [
        Round(world_size, case("saved", values)),
        Round(1, case("failed", [], signal.SIG_IGN) + case("refused", [], signal.SIG_IGN, True), (Exception,)),
        Round(1, case("killed", [], signal.SIG_DFL), (Exception,), ends="SIGXFSZ"),
    ]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Save over an old file: rank 0 late and slow; or more than a file may hold."""
    path = Path(case.path)
    if rank == 0:
        torch.save({"w": torch.zeros(3), "step": 0}, path)
    dist.barrier()
    if case.too_much is not None:
        state = {"w": torch.ones(LARGE), "step": (lambda: 2) if case.refuses else 2}
        with file_limit(case.too_much):
            try:
                function(rank, world_size, state, path)
            except NotImplementedError:
                raise
            except Exception as error:
                return Note(failed=True, known=_comes_out(error))
        return Note()
    time.sleep(0 if rank else LATE_S)
    state = {"w": torch.full((ROWS,), case.values[rank] + FINE), "step": case.values[rank]}
    with file_events(function, case.path, 0 if rank else SLOW_S) as events, observe.Collectives() as seen:
        function(rank, world_size, state, path)
    size = path.stat().st_size if path.exists() else 0
    return Note(events=events, talked=bool(seen.calls), found=case.content(), size=size)


def _comes_out(error: BaseException | None) -> bool:
    """Whether an error is the system's or torch's own, or says that it comes from such a one."""
    if error is None:
        return False
    torchs = f"{os.sep}torch{os.sep}" in traceback.extract_tb(error.__traceback__)[-1].filename
    return torchs or getattr(error, "errno", 0) == errno.EFBIG or _comes_out(error.__cause__)


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


def content(seen: Seen) -> list[Any]:
    return [] if seen.rank else [seen.case.content(), "another file, too" if seen.case.left() else "one file"]


def writer(seen: Seen) -> str:
    """How the file came to its name, in the first words that fit; the other ranks do nothing."""
    path, events = seen.case.path, [event for event in seen["events"] if event[0] != "fsync"]
    if seen.rank:
        return "files are touched on this rank" if events else "no file is touched on this rank"
    froms = [event[1] for event in events if event[0] == "rename" and event[2] == path]
    if ("write", path) in events:
        return "last.pt itself is opened for writing"
    if ("remove", path) in events or any(event[:2] == ("rename", path) for event in events):
        return "the old file is taken away first"
    if not froms:
        return "nothing is renamed to last.pt"
    same = os.path.dirname(froms[0]) == os.path.dirname(path)
    return f"written under another name, in {'the same' if same else 'another'} folder, and renamed"


def fsync(seen: Seen) -> str:
    events = seen["events"]
    renamed = next((i for i, e in enumerate(events) if e[0] == "rename" and e[2] == seen.case.path), None)
    synced = [event[1] for event in events[:renamed] if event[0] == "fsync"]
    if seen.rank or (synced and max(synced) >= seen["size"]):
        return "fsync of the whole file, then the rename"
    late = any(event[0] == "fsync" for event in events)
    return "fsync of a part of the file" if synced else "the rename, then fsync" if late else "no fsync of a file"


def waited(seen: Seen) -> str:
    """What is there when a rank returns."""
    found, new = seen["found"], [seen.case.values[0] + FINE, ROWS, seen.case.values[0]]
    names = {str(new): "the new file", str(OLD): "the old file"}
    name = found if isinstance(found, str) else names.get(str(found), "another state")
    return f"{name} is there{'' if seen['talked'] else ', and no collective was called'}"


def survives(seen: Seen) -> str:
    """What is left when the writing has failed."""
    found = seen.case.content()
    if found != OLD:
        return found if isinstance(found, str) else "another state"
    if not seen["failed"]:
        return "no exception"
    if not seen["known"]:
        return "another exception, which hides the first"
    return "half a file is left behind" if seen.case.left() else "the old file alone, and the exception"


def killed(seen: Seen) -> str | Fault:
    """By property, so that no mistake has to be killed to explain another one."""
    found = seen.case.content()
    return "" if found == OLD else Fault("the old file", str(found), cause=REMOVED if found == "no file" else IN_PLACE)


def said(seen: Seen) -> str:
    if seen.case.too_much is None:
        return f"ranks bring weights {seen.case.values} to save over an old last.pt;"
    return f"{'the state holds a function, which torch refuses' if seen.case.refuses else 'the disk is full half way'}:"


REMOVED = "the old file is removed before the new one is there; os.replace replaces it in one step"
IN_PLACE = "this writes in place: the old file is gone with the first byte; write to another name, then os.replace"

MISTAKES = f"""
the lesson's first try | writer fsync failed killed | {IN_PLACE}
    def save_atomically(rank, world_size, state, path):
        if rank == 0:
            torch.save(state, path)
        dist.barrier()
removed first | writer failed killed | {REMOVED}
    try: => path.unlink(missing_ok=True)
    try:
all ranks write | writer | the others have the same weights, so their files are not needed, and two writers mix
    if rank == 0: => if True:
    unfinished") => {{rank}}")
    os.replace(unfinished, path) => os.replace(unfinished, path) if rank == 0 else unfinished.unlink()
in another folder | writer | a rename is atomic within one file system only, and another folder may be elsewhere
    path.with_name(f".{{path.name}}.unfinished") => path.parent.parent / "new.pt"
no fsync | fsync | after a power cut the new name may be there and the bytes not: os.fsync(file.fileno())
    os.fsync(file.fileno()) => pass
fsync without flush | fsync | Python still holds the rest in its buffer: file.flush() before os.fsync
    file.flush() => pass
    torch.save(state, file) => data = __import__("io").BytesIO()
    torch.save(state, data)
    file.write(data.getvalue())
renamed, then fsync | fsync | until the fsync, the new name may stand for no bytes: fsync comes before the rename
    os.replace(unfinished, path) => pass
    os.fsync(file.fileno()) => os.replace(unfinished, path)
    os.fsync(file.fileno())
a part of the state | content wait | rank 0 alone saves its state, all of it
    torch.save(state, => torch.save({{"w": state["w"]}},
no barrier | wait | nobody waits: dist.barrier() at the end
    dist.barrier() => pass
the barrier comes first | wait | the ranks meet before the file is there; dist.barrier() must come after the rename
    dist.barrier() => pass
    if rank == 0: => dist.barrier()
    if rank == 0:
the barrier is rank 0's alone | all | a barrier that not every rank enters | hangs
    dist.barrier() =>     dist.barrier()
the error is swallowed | failed | the exception is swallowed, so nobody knows that nothing was saved; raise it
    raise => print("could not save")
another error | failed | let the exception out as it is, by a bare `raise`: another one hides what was wrong
    raise => raise OSError("nothing was saved") from None
only a full disk is foreseen | failed | half a file stays and fills the disk; remove it after any exception, torch's too
    except BaseException => except OSError
written freely: all but the rename is left out | fsync failed | half a file stays and fills the disk | tests
    def save_atomically(rank, world_size, state, path):
        if rank == 0:
            torch.save(state, f"{{path}}.new")
            os.rename(f"{{path}}.new", path)
        dist.all_reduce(torch.zeros(1))
written freely: one file for each rank | writer failed | two writers mix | tests
    def save_atomically(rank, world_size, state, path):
        own = f"{{path}}.{{rank}}"
        with open(own, "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        dist.barrier()
        os.rename(own, path) if rank == 0 else os.unlink(own)
        dist.barrier()
"""

RIGHT = """
synced through a second handle, the error as the cause of another one
    with open(unfinished, "wb") as file: => torch.save(state, str(unfinished))
    with open(unfinished, "rb+") as file:
    torch.save(state, file) => pass
    except BaseException: => except Exception as error:
    raise => raise RuntimeError("nothing was saved") from error
    dist.barrier() => dist.broadcast(torch.zeros(1), src=0)
"""

SAVE = exercise(
    *("10.1", "One atomic writer", "save_atomically", 20),
    cases=cases,
    act=act,
    within=fresh_folder,
    said=said,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "content": ("the file holds rank 0's state", 1, "saved", content,
                    "rank 0 alone saves its state, all of it, and leaves no other file"),
        "writer": ("rank 0 alone writes, beside the file, and renames", 2, "saved", writer,
                   "write under another name in the same folder, then os.replace(unfinished, path)"),
        "fsync": ("the bytes are on the disk before the rename", 1, "saved", fsync, "os.fsync before the rename"),
        "wait": ("no rank goes on before the file is there", 1, "saved", waited,
                 "a barrier after the rename, on every rank"),
        "failed": ("a write that fails leaves the old file, and nothing else", 2, "failed refused", survives,
                   "write to another name; after any exception remove that file, and raise the exception again"),
        "killed": ("a rank killed while it writes leaves the old file", 1, "killed", killed, IN_PLACE),
    },
    refused=("ddp_course.checkpoint.file.save_checkpoint", "ddp_course.checkpoint.folder.Checkpointer"),
    hints={
        r"unsupported operand type.*Path": "path is a pathlib.Path: path.with_name(...), or text of it: str(path)",
        "absent|cut-off|limit": "a barrier that not every rank enters; it must stand outside of `if rank == 0`",
    },
)  # fmt: skip
