"""Who opened which file for writing, who renamed it, and was it on the disk by then?

Python tells an audit hook of every file that it opens and renames, whichever function the answer used. torch writes to
a plain path from C++, unseen, but goes through Python when the path is not pure ASCII. So the judges' folder is not.

Source: https://docs.python.org/3/library/audit_events.html and torch/serialization.py, `_open_zipfile_writer_file`.
Read next: `save.py`.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ddp_course.grading.answer.limits import own_file
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.rounds import Seen

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """Make a folder, with a name that lets torch's writing be seen, and remove it at the end."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "Läufe"
        folder.mkdir()
        yield folder


@contextmanager
def file_events(function: Callable, path: str, slow_s: float = 0.0) -> Iterator[list[tuple]]:
    """Within the block, note what `function` does to the files of a folder.

    An event is ("write" or "remove", path), ("rename", from, to), or ("fsync", size of the file at that moment).

    Args:
        path: of a file in the folder.
        slow_s: to wait at each event, so that who does not wait for the writer is seen.
    """
    events: list[tuple] = []

    def watch(event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
            note("write", args[0])
        elif event in ("os.rename", "os.remove"):
            note(event.removeprefix("os."), *args[:2])

    def note(kind: str, *names: object) -> None:
        paths = [os.path.abspath(os.fsdecode(name)) for name in names if isinstance(name, str | bytes | os.PathLike)]
        if any(os.path.dirname(found) == os.path.dirname(path) for found in paths):
            events.append((kind, *paths))
            time.sleep(slow_s)

    def synced(sync: Callable, file: Any) -> None:
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        if stat.S_ISREG(found.st_mode):  # not the folder
            events.append(("fsync", found.st_size))
        sync(file)

    fakes = {name: partial(synced, getattr(os, name)) for name in ("fsync", "fdatasync") if hasattr(os, name)}
    known = getattr(function, "__globals__", {})  # "from os import fsync" in the notebook
    renamed = {key: fake for key, value in known.items() for name, fake in fakes.items() if value is getattr(os, name)}
    with observe.audited(watch), mock.patch.multiple(os, **fakes), mock.patch.dict(known, renamed):
        yield events


def other_writer(seen: Seen) -> str:
    """Say which rank but rank 0 has written, by the notes called "events"."""
    writers = (r for r, note in enumerate(seen.everyone) if r and any(event[0] == "write" for event in note["events"]))
    return next((f"rank {rank} opens a file for writing" for rank in writers), "")


def read(path: str | Path, of: Callable[[Any], Any]) -> Any:
    """Return what `of` takes from a file of torch.save; or a text, why there is nothing."""
    try:
        return of(torch.load(own_file(path), weights_only=True))
    except Exception as error:
        return f"a file that cannot be read ({type(error).__name__})" if os.path.exists(path) else "no file"
