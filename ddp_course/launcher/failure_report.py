"""What a failed or hung rank says.

The ranks' answers are laid side by side and the one that matters comes first: the rank that failed for a reason of its
own, not the peers that lost it; the rank that never came, not those that waited for it; the first call in which the
ranks disagree. Where that cannot be known, the report says what is. Everything here is plain data in, text out.

Left out on purpose: collecting the answers, which is `running_call.py`'s part; ranks that wait for ranks, which is that
of `hang_report.py`.
Read next: `worker.py`, what runs inside each rank.
"""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Collection
from typing import Any

from ddp_course.launcher import codes
from ddp_course.launcher.failure import Failure, in_short
from ddp_course.launcher.lines import shown_name
from ddp_course.launcher.rank_status import Collective, Whereabouts, listed_ranks

MOST_OF_ERROR = 500  # letters, in the line for programs
WIDTH = 100  # letters; JupyterLab breaks longer lines of an error in the middle of words
_INCONSISTENT = re.compile(r"while rank (\d+) has inconsistent")
# What torch says, and what it means under a launcher that has opened the group.
_HINTS = (
    (
        "initialize the default process group twice",
        "The launcher has opened the process group already: leave init_process_group out, or launch with init=False.",
    ),
    (
        "Default process group has not been initialized",
        "No process group is open: launch without init=False, or call init_process_group first.",
    ),
)


class RankError(RuntimeError):
    """A call on ranks failed; the message names the rank, the reason and the way out.

    `str()` is the same on every run of the same mistake; where each rank was goes into a note, because that
    may differ from run to run.

    Attributes:
        code: what failed, one of `codes.CODES`.
        rank: the rank that failed first or never came; None when no single rank is to blame.
        error_type, message: of the exception, for "raised" and "start"; else empty.
        facts: the code, the rank and what else is known, as a program reads them; in a log they stand in a line.
        traceback: the rank's whole traceback, library frames included; may be empty.
        output: what each rank had printed.
        ranks: where each rank was.
    """

    def __init__(
        self,
        code: str,
        rank: int | None,
        text: str,
        ranks: list[Whereabouts],
        failure: Failure | None = None,
        calls: dict[int, Collective] | None = None,  # of ranks, in which they wait or differ
    ):
        super().__init__(folded(text))
        self.code, self.rank, self.ranks = code, rank, ranks
        self.calls = calls or {}
        self.error_type = failure.error_type if failure else ""
        self.message = failure.message if failure else ""
        self.traceback = failure.traceback if failure else ""
        self.output: list[str] = []
        self.add_note(where_all_were(ranks))
        if not codes.in_notebook():
            self.add_note(self.log_line)

    @property
    def facts(self) -> dict[str, Any]:
        call = next(iter(self.calls.values()), None)
        at = next((w.line for w in self.ranks if w.rank == self.rank and w.line), call.line if call else None)
        return {
            "code": self.code,
            "rank": self.rank,
            "op": call.op if call else "",
            "number": call.number if call else "",
            "line": f"{shown_name(at.filename)}:{at.number}" if at else "",
            "error": in_short(f"{self.error_type}: {self.message}")[:MOST_OF_ERROR] if self.error_type else "",
            "calls": {str(rank): str(call) for rank, call in self.calls.items()},
        }

    @property
    def report(self) -> str:
        """The message and the notes, for people."""
        notes = getattr(self, "__notes__", [])
        return "\n".join([str(self), *(note for note in notes if not note.startswith(codes.MARK))])

    @property
    def log_line(self) -> str:
        """The line for programs, which Python shows after the report where no person reads along."""
        return codes.written(self.facts)

    def _render_traceback_(self) -> list[str]:
        """Called by IPython: the report alone, without our own frames."""
        return [f"RankError: {self.report}"]


class RankInterrupt(KeyboardInterrupt):
    """Ctrl-C while ranks were at work; the message says where they were. They have been ended."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


# What people know it by.
RankInterrupt.__name__, RankInterrupt.__qualname__, RankInterrupt.__module__ = *["KeyboardInterrupt"] * 2, "builtins"


# --- All ranks, laid side by side in the parent ----------------------------------------------------


def folded(text: str) -> str:
    """Fold lines that are too long, each under its own beginning."""
    return "\n".join(part for line in text.splitlines() for part in _fold(line))


def _fold(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True) or [line]


def where_all_were(ranks: list[Whereabouts]) -> str:
    """What each rank was doing when the call failed."""
    return folded("\nWhere the ranks were:\n" + "\n".join(f"  rank {w.rank}  {_facts(w)}" for w in ranks))


def _facts(w: Whereabouts) -> str:
    return f"\n{' ' * 10}".join(_where(w))


def _where(w: Whereabouts) -> list[str]:
    if w.status in ("returned", "died"):
        return [w.detail or "had returned", *oddities(w)]
    waiting, last = w.waiting_in, w.recent[-1] if w.recent else None
    if w.status == "raised":
        did = f"raised {w.detail}" if w.detail else f"gave up in {waiting or last or 'a message'}"
    elif w.status == "silent":
        did = "did not answer"
    elif w.key:
        did = f"waited at the store for the key {w.key!r}"
    else:
        did = f"waited in {waiting}" if waiting else "was running"
    before = f"last collective {last}" if last and not waiting and (w.status != "raised" or w.detail) else ""
    return [fact for fact in (did, before, str(w.line or "")) if fact] + oddities(w)


def oddities(w: Whereabouts) -> list[str]:
    """What a rank did that is odd, a sentence each."""
    return [f"{words}: {line}" if line else words for words, line in w.oddities[-2:]]


def failed(failure: Failure, ranks: list[Whereabouts]) -> RankError:
    """A rank raised for a reason of its own."""
    if failure.during == "result":
        return RankError("result", failure.rank, failure.message, ranks, failure)
    code, rank = "start" if failure.during == "start" else "raised", failure.rank
    if found := _INCONSISTENT.search(failure.message):  # all ranks raise this, in torch's words
        rank = int(found[1]) if len(ranks) > 2 else None
    did = "could not start" if code == "start" else f"raised {failure.error_type}"
    hints = "".join(f"\n{hint}" for sign, hint in _HINTS if sign in failure.message)
    text = f"rank {failure.rank} of {len(ranks)} {did}: {in_short(failure.message)}\n\n{failure.story}{hints}"
    return RankError(code, rank, text, ranks, failure)


def died(
    rank: int, exitcode: int | None, ranks: list[Whereabouts], output: str = "", starting: bool = False
) -> RankError:
    """A rank's process ended without an answer; `output` is what it had written."""
    if "doesn't match expected size" in output:  # gloo ends the process that gets a tensor of another size
        others = "".join(f"\n  rank {w.rank} called {w.recent[-1]}" for w in ranks if w.recent)
        line = f"\n  rank {rank} was at {ranks[rank].line}" if ranks[rank].line else ""
        text = (
            f"ranks brought tensors of different sizes to one collective, and gloo ended rank {rank}, which got one: "
            f"{line}{others}\nThe calls alone do not tell who is wrong. Every rank must make the same calls, in the "
            "same order, with the same shapes."
        )
        return RankError("sizes", None, text, ranks, calls={w.rank: w.recent[-1] for w in ranks if w.recent})
    text = f"rank {rank} of {len(ranks)} died{' while starting' if starting else ''}: {why_died(exitcode)}"
    line = ranks[rank].line
    return RankError("start" if starting else "died", rank, f"{text}\n  it was at {line}" if line else text, ranks)


def signal_name(number: int) -> str:
    """SIGSEGV, or the number of a signal that has no name, as most real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def why_died(exitcode: int | None) -> str:
    """Say what an exit code of `multiprocessing` means, and what usually causes it; None if only the launcher knows."""
    if exitcode is None:
        return "its process is gone; the launcher's own report has its exit status or signal"
    if exitcode == -signal.SIGKILL:
        return (
            "killed by SIGKILL, most often by the system because memory ran out; "
            "use fewer ranks or a smaller batch, and look at the system's log"
        )
    if exitcode < 0:
        name = signal_name(-exitcode)
        return f"killed by {name}, a crash in compiled code or a signal from outside; its last words are in its output"
    return (
        f"it ended itself with exit status {exitcode}, neither returning nor raising; look for sys.exit, os._exit or a "
        "program that starts ranks without `if __name__ == '__main__':`"
    )


def over_limit(limit_s: float, ranks: list[Whereabouts], starting: bool) -> RankError:
    """The call, or the start, took longer than it may."""
    late = [w for w in ranks if w.status in ("running", "silent")]
    who = listed_ranks([w.rank for w in late])
    at = "".join(f"\n  rank {w.rank} {_facts(w)}" for w in late)
    what = (
        f"{who} did not start within {limit_s:g} s"
        if starting
        else f"no result after {limit_s:g} s (limit_s) from {who}"
    )
    return RankError("start" if starting else "limit", late[0].rank if len(late) == 1 else None, what + at, ranks)


def still_importing(limit_s: float, ranks: list[Whereabouts], imported: Collection[int]) -> RankError:
    """The ranks did not even come to our code."""
    late = [w.rank for w in ranks if w.rank not in imported]
    text = (
        f"{listed_ranks(late)} {'were' if len(late) > 1 else 'was'} still importing torch after {limit_s:g} s: "
        f"{os.getloadavg()[0]:.0f} processes want this machine's {os.cpu_count()} cores\nWait until the machine is "
        "less busy, start fewer ranks, or say start_method='forkserver', which imports torch once for all of them."
    )
    return RankError("start", None, text, ranks)
