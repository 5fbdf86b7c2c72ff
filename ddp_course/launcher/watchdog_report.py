"""How do ranks without a parent come to one report?

Each posts a note where all can read it. For a rank that cannot speak, the lowest one on its host that can does so, from
what is seen from outside. The lowest rank of all that speaks prints the report that `launch` would give; if it does not
come to it, the first that asks does.

Left out on purpose: when to do all this, which is `watchdog.py`'s part.
Read next: `bulletin.py`, where the notes are posted; `hang_report.py`, what is made of them.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from ddp_course.launcher import failure_report, hang_report, lines
from ddp_course.launcher.bulletin import Address, Bulletin, Note
from ddp_course.launcher.failure_report import RankError
from ddp_course.launcher.rank_status import Whereabouts

ANSWER_S = 1.0  # time for a rank to post its note, before a neighbour speaks for it


def give(board: Bulletin, note: Note, timeout_s: float) -> bool:
    """Post this rank's note, print the report if this is the rank to do so, and end neighbours that cannot end
    themselves.

    Args:
        timeout_s: how long a rank may wait in one collective.
    Returns:
        Whether the report has been printed, by this rank or another.
    """
    board.post(note)
    spoke_for = []
    if not board.wait_for_all(ANSWER_S) and board.is_first_speaker(board.neighbours):
        spoke_for = [rank for rank in board.neighbours if not board.posted(rank)]
        for rank in spoke_for:
            board.post(Note(seen_from_outside(rank, board.address(rank)), speaks=False))
    first = board.is_first_speaker(range(board.place.world_size))
    if (first or not board.wait_told(ANSWER_S)) and board.may_tell():
        board.wait_for_all(ANSWER_S)  # other hosts speak for their silent ranks now
        if error := explain(timeout_s, board.notes()):
            say(f"RankError: {error.report}\n{error.log_line}")
        board.set_told()
    told = board.wait_told(ANSWER_S)
    for rank in spoke_for:
        _kill(board.note(rank).where, board.address(rank))
    return told


def explain(timeout_s: float, notes: list[Note]) -> RankError | None:
    """Find the failure that caused the others, as `launch` does; None if each rank tells it better itself."""
    ranks, failures = [note.where for note in notes], [note.failure for note in notes if note.failure]
    own = [(failure.error_type, failure.message) for failure in failures if not failure.talking]
    if len(own) == len(ranks) and len(set(own)) == 1:
        return None
    if dead := [where.rank for where in ranks if where.status == "died"]:
        return failure_report.died(dead[0], None, ranks)
    return hang_report.explain(timeout_s, ranks, failures)


def seen_from_outside(rank: int, address: Address | None) -> Whereabouts:
    """What a neighbour can say of a rank that does not speak: it has ended, or where faulthandler saw it."""
    if address is None:
        return Whereabouts(rank, "silent")
    if not address.alive:
        return Whereabouts(rank, "died", detail=f"died: {failure_report.why_died(None)}")
    return Whereabouts(rank, "silent", lines.line_in_dump(address.read_stacks()))


def _kill(where: Whereabouts, address: Address | None) -> None:
    """End a neighbour that cannot end itself."""
    if address and address.alive and where.status != "returned":
        with suppress(ProcessLookupError):
            os.kill(address.pid, signal.SIGKILL)


def say(text: str) -> None:
    """Write to stderr itself: the program may hold the lock of `sys.stderr`."""
    os.write(2, f"{text}\n".encode(errors="replace"))
