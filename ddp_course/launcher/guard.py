"""What if a program starts ranks on import?

A rank is a new process, and it imports the program before it runs anything. Where the line that starts ranks has no
guard, each rank would start ranks of its own. It ends itself instead, with a status that the parent knows.

Read next: `pool.py`, which asks before it starts anything.
"""

from __future__ import annotations

import linecache
import os
import traceback
from multiprocessing import current_process

from ddp_course.launcher.failure_report import RankError
from ddp_course.launcher.lines import shown_name

NO_GUARD = 79  # the exit status of such a rank


def end_rank_that_imports() -> None:
    """End this process if it is a rank that is still importing the program."""
    if getattr(current_process(), "_inheriting", False):  # multiprocessing's own sign of it
        os._exit(NO_GUARD)


def missing() -> RankError:
    """Return the report, in the process whose program has no guard."""
    frames = [frame for frame, _ in traceback.walk_stack(None) if frame.f_globals.get("__name__") == "__main__"]
    filename, number = frames[-1].f_code.co_filename, frames[-1].f_lineno
    source = linecache.getline(filename, number).strip()
    rest = "\n        ..." if source.endswith((":", "(", "[", ",")) else ""
    text = f"""\
{shown_name(filename)}, line {number}, starts ranks while the program is being imported
Each rank imports the program first, so it would come to this line too and start ranks of its own. Write a guard above \
it, which is true in the first process alone:

if __name__ == "__main__":
    {source}{rest}"""
    error = RankError("start", None, text, [])
    del error.__notes__  # where the ranks were: nowhere yet
    return error
