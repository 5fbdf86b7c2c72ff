"""What a rank notes while the program runs: a file of JSON objects, one a line; and all ranks' files, read.

Read next: `watch.py`, which writes them; `compare.py`, which asks what they say together.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_course.rehearsal.finding import Finding

RIGHT = "right"
Answer = Finding | str | None
OPEN = open  # the program's own `open` is watched


class Writer:
    """The notes of one rank.

    Args:
        path: of the file, which lives as long as the rank.
        script: the learner's file; lines are told in it.
    """

    def __init__(self, path: str, script: str):
        self.script, self.pid = script, os.getpid()
        self.file = OPEN(path, "w")  # noqa: SIM115

    def note(self, what: str, **facts: Any) -> None:
        if os.getpid() == self.pid:
            self.file.write(as_line({"what": what, "line": self.line(), **facts}))
            self.file.flush()

    def frame(self) -> FrameType | None:
        """The innermost call of the learner's file in this thread."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        return frame

    def line(self) -> int | None:
        """The innermost line of the learner's file in this thread."""
        frame = self.frame()
        return frame.f_lineno if frame else None

    def lines(self) -> list[int]:
        """The lines of the learner's file that are at work in this thread, the innermost first."""
        found, frame = [], self.frame()
        while frame is not None:
            if frame.f_code.co_filename == self.script:
                found.append(frame.f_lineno)
            frame = frame.f_back
        return found

    def asked_by_program(self) -> bool:
        """Whether the learner's file itself made the call that is watched, and not a library that it called."""
        frame = sys._getframe(3)  # this function, at_look, stand_in
        return frame.f_code.co_filename == self.script


def as_line(fact: dict) -> str:
    return json.dumps(fact) + "\n"


def around(owner: Any, name: str, seen: Callable) -> None:
    """Have `seen(call, *args)` stand in for an attribute; it makes the call."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return seen(call, *args, **kwargs)

    setattr(owner, name, stand_in)


@dataclass
class Notes:
    """What the ranks of one run have noted, by rank."""

    ranks: list[list[dict]]
    draws: list[dict]

    @classmethod
    def read(cls, folder: Path, world_size: int) -> Notes:
        paths = [folder / f"rank{rank}.jsonl" for rank in range(world_size)]
        draws = [fact for path in sorted(folder.glob("*.draws")) for fact in _facts(path)]
        return cls([_facts(path) if path.exists() else [] for path in paths], draws)

    def of(self, what: str) -> list[list[dict]]:
        return [[fact for fact in facts if fact["what"] == what] for facts in self.ranks]

    def all(self, what: str) -> list[dict]:
        return [fact for facts in self.of(what) for fact in facts]


def _facts(path: Path) -> list[dict]:
    facts = []
    for line in path.read_text().splitlines():
        try:
            facts.append(json.loads(line))
        except ValueError:  # the rank was ended while it wrote
            break
    return facts
