"""Which line of the learner's program is that?

A stack goes through torch, Python's library and the course before it comes to the line that somebody can act on. That
is the innermost one of their own, or, if there is none, the course's. Cells of a notebook have no file that ranks could
read, so their text travels with the call.

Read next: `rank_status.py`, which notes such a line for each collective.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from types import FrameType

_COURSE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MACHINERY = (os.path.dirname(os.path.abspath(__file__)), os.path.join(_COURSE, "grading"))
_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")})
MOST_SOURCE = 80  # letters of a line


@dataclass(frozen=True)
class Line:
    """One line of a program, as a stack shows it."""

    filename: str
    number: int
    function: str
    source: str

    def __str__(self) -> str:
        source = self.source if len(self.source) <= MOST_SOURCE else f"{self.source[: MOST_SOURCE - 1]}…"
        return f"{shown_name(self.filename)}, line {self.number}, in {self.function}: {source}"


@functools.cache
def _is_own(filename: str) -> bool:
    return not filename.startswith(("<frozen", "<string>", *_LIBRARIES, _COURSE))


def _is_of_course(filename: str) -> bool:
    return filename.startswith(_COURSE) and not filename.startswith(_MACHINERY)


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that the learner wrote, outermost first; if there are none, the course's."""
    mine = [frame for frame in stack if _is_own(frame.filename)]
    return mine or [frame for frame in stack if _is_of_course(frame.filename)]


def own_line(stack: traceback.StackSummary) -> Line | None:
    """Return the innermost of the learner's own lines."""
    if not (frames := own_frames(stack)):
        return None
    last = frames[-1]
    return Line(last.filename, last.lineno or 0, last.name, (last.line or "").strip())


Place = tuple[str, int, str]  # file, line, function


def own_place(frame: FrameType | None) -> Place | None:
    """Return the place of `own_line`, quickly, for a frame that runs."""
    of_course, elsewhere = None, threading.current_thread() is not threading.main_thread()
    while frame is not None:
        filename = frame.f_code.co_filename
        if _is_own(filename):
            return filename, frame.f_lineno, frame.f_code.co_name
        if of_course is None and _is_of_course(filename):
            of_course = filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
        if frame is None and elsewhere:  # autograd has a thread for each GPU, and the main thread waits in backward()
            frame, elsewhere = sys._current_frames().get(threading.main_thread().ident), False
    return of_course


def line_at(place: Place | None) -> Line | None:
    """Return the line with its text, which is looked up now."""
    return Line(*place, linecache.getline(place[0], place[1]).strip()) if place else None


def line_of(frames: list[Place]) -> Line | None:
    """The learner's line of a stack of (file, line, function), outermost first."""
    return own_line(traceback.StackSummary.from_list([traceback.FrameSummary(*frame) for frame in frames]))


def line_in_dump(text: str) -> Line | None:
    """The main thread's line in what faulthandler wrote of all threads, last of all if it wrote several times."""
    main_thread = text.partition("Extension modules")[0].rpartition("(most recent call first):")[2]
    frames = re.findall(r'File "(.+?)", line (\d+) in (.+)', main_thread)
    return line_of([(name, int(number), function) for name, number, function in reversed(frames)])


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
    if "ipykernel_" in filename or filename.startswith("<ipython-input"):
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
