"""Who opened which file for writing, who renamed it, and was it on the disk by then?

Python tells an audit hook of every file that it opens and renames, whichever function the answer used. torch writes to
a plain path from C++, unseen, but goes through Python when the path is not pure ASCII. So the judges' folder is not.

Source: https://docs.python.org/3/library/audit_events.html and torch/serialization.py, `_open_zipfile_writer_file`.
Read next: `save.py`.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """Make a folder, with a name that lets torch's writing be seen, and remove it at the end."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "Läufe"
        folder.mkdir()
        yield folder


@dataclass
class FileEvents:
    """What this process does to the files of a folder, from now to its end: a hook cannot be taken back."""

    folder: str
    slow_s: float = 0.0  # to wait at each event, so that who does not wait for the writer is seen
    events: list[tuple] = field(default_factory=list)

    def __post_init__(self) -> None:
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if event == "open" and _is_writing(args[2]):
            self._note("write", args[0])
        elif event == "os.rename":
            self._note("rename", args[0], args[1])
        elif event == "os.remove":
            self._note("remove", args[0])

    def _note(self, kind: str, *names: object) -> None:
        paths = [os.path.abspath(os.fsdecode(name)) for name in names if isinstance(name, str | bytes | os.PathLike)]
        if any(os.path.dirname(path) == self.folder for path in paths):
            self.events.append((kind, *paths))
            time.sleep(self.slow_s)


def _is_writing(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


@contextmanager
def synced_files(function: Callable, events: list[tuple]) -> Iterator[None]:
    """Within the block, note each `fsync` of a file, with the file's size at that moment, also among `events`."""
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync") if hasattr(os, name)}

    def noting(sync: Callable) -> Callable:
        def noted(file):
            found = os.fstat(file if isinstance(file, int) else file.fileno())
            if stat.S_ISREG(found.st_mode):  # not the folder
                events.append(("fsync", found.st_size))
            return sync(file)

        return noted

    fakes = {name: noting(sync) for name, sync in real.items()}
    known = getattr(function, "__globals__", {})  # "from os import fsync" in the notebook
    renamed = {key: fakes[name] for key, value in known.items() for name, sync in real.items() if value is sync}
    with mock.patch.multiple(os, **fakes), mock.patch.dict(known, renamed):
        yield
