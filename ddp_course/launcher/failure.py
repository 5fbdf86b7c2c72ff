"""How does an exception of a rank become text that can travel?

The exception itself may not survive the journey: its class may be defined in a cell, its text may raise. So the rank
that raised it describes it: the learner's own frames, the causes, and whether it comes from communication. A rank that
lost a peer is a witness, not the culprit.

Read next: `failure_report.py`, which lays the failures of all ranks side by side.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.launcher.lines import Line, own_frames, own_line, shown_name

MOST_FRAMES = 5  # that are shown at each end of a very long chain of calls
_LOST = ("Connection closed", "Connection reset", "Broken pipe")  # a peer
_TALKING = (*_LOST, "gloo", "NCCL", "Timed out waiting", "pair closure", "monitoredBarrier", "Detected mismatch")


@dataclass(frozen=True)
class Failure:
    """An exception of a rank, as text that can travel."""

    rank: int
    error_type: str
    message: str
    story: str  # the learner's own frames, then the exception
    traceback: str  # all frames
    talking: bool  # raised by communication: a lost peer, a timeout, a mismatch
    line: Line | None
    during: str = "call"  # "start", "call" or "result"

    @property
    def lost_peer(self) -> bool:
        """Whether it is what a rank sees of another that has gone."""
        return self.talking and any(sign in self.message for sign in _LOST)


def describe(error: BaseException, rank: int, during: str = "call") -> Failure:
    """Turn an exception into what the report needs, in the rank that raised it."""
    shown = traceback.TracebackException.from_exception(error)
    summary = in_short("".join(shown.format_exception_only()).strip())
    return Failure(
        rank=rank,
        error_type=type(error).__name__,
        message=_text(error),
        story="\n".join([*own_story(shown.stack), *_lost_worker(error, shown.stack), *_causes(error), summary]),
        traceback="".join(shown.format()),
        talking=is_talking(error),
        line=own_line(shown.stack),
        during=during,
    )


def own_story(stack: traceback.StackSummary) -> list[str]:
    """The frames a learner can act on, and the name of the library function that raised, if one did."""
    frames, lines = own_frames(stack), []
    left_out = len(frames) - 2 * MOST_FRAMES if len(frames) > 3 * MOST_FRAMES else 0  # a recursion without end
    for number, frame in enumerate(frames):
        if left_out and number == MOST_FRAMES:
            lines.append(f"  ... {left_out} calls more, of the same functions ...")
        if not left_out or not MOST_FRAMES <= number < MOST_FRAMES + left_out:
            lines += [f"  {shown_name(frame.filename)}, line {frame.lineno}, in {frame.name}", f"    {frame.line}"]
    last = stack[-1] if stack else None
    if last and "site-packages" in last.filename:
        lines.append(f"  raised inside {last.filename.partition('site-packages/')[2]}, {last.name}")
    return lines


def _lost_worker(error: BaseException, stack: traceback.StackSummary) -> list[str]:
    """A DataLoader that loses a worker while it reads says no more than that a connection is gone."""
    if isinstance(error, ConnectionError | EOFError) and any("torch/utils/data/" in frame.filename for frame in stack):
        return ["  a DataLoader worker of this rank has died: killed for its memory, or by a full /dev/shm?"]
    return []


def _causes(error: BaseException) -> list[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [f"  caused by {type(cause).__name__}: {_text(cause)}", *_causes(cause)] if cause else []


def is_talking(error: BaseException) -> bool:
    """Whether it was raised by communication: a lost peer, a timeout, a mismatch."""
    return tells_of_talking([each.__name__ for each in type(error).__mro__], _text(error))


def tells_of_talking(kinds: Sequence[str], text: str) -> bool:
    """The same of an exception of which only the names of its classes and its text are known."""
    named = "DistError" in kinds or "Disagreement" in kinds  # torch's, and that of `compare_calls.py`
    return named or "RuntimeError" in kinds and any(sign in text for sign in _TALKING)


def in_short(message: str) -> str:
    """Leave out where in gloo's own source an error was raised."""
    return re.sub(r"\[/\S+\.(?:cc|cpp|h|hpp):\d+\] ", "", message)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # an exception of the learner's may not even be able to say what it is
        return f"<its text cannot be shown: {type(second).__name__} in its __str__>"
