"""How is something noted so that a crash loses no earlier note? One line of JSON for each, at the end of a file.

A note is written whole before the next begins. A line that a crash cut short is passed over when the file is read.
Read next: `learner/progress.py` and `instructor/whole_class.py`, which keep such files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path


def append(path: Path, note: dict) -> None:
    """Write one note at the end of the file, and return when it is on the disk.

    Raises:
        OSError: the file cannot be written; what it held is still there.
    """
    with path.open("ab+") as file:
        line = (json.dumps(note, ensure_ascii=False) + "\n").encode()
        if file.tell() and _last_byte(path) != b"\n":
            line = b"\n" + line  # the last note was cut short; it must not spoil this one
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def notes(path: Path) -> Iterator[dict]:
    """Yield every whole note, oldest first; nothing when there is no file."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict):
            yield note


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
