"""What a failed or hung rank says.

The ranks' answers are laid side by side and the one that matters comes first: the rank that failed for a
reason of its own, not the peers that lost it; the rank that never came, not those that waited for it; the
first collective in which the ranks disagree. Everything here is plain data in, text out.

Left out on purpose: collecting the answers, which is `pool.py`'s part.
Read next: `worker.py`, what runs inside each rank.
"""

from __future__ import annotations

import re
import signal
import traceback
from dataclasses import dataclass

import torch.distributed as dist

from ddp_course.launch.flight import Collective, Line, Whereabouts, own_frames, own_line, shown_name

# Collectives for which every rank must bring tensors of the same shape.
_SAME_SHAPE = {"all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "_allgather_base"}
# Collectives with one rank that gives or takes, which all must name alike.
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}


class RankError(RuntimeError):
    """A call on ranks failed; the message names the rank, the reason and the way out.

    `str()` is the same on every run of the same mistake; where each rank was goes into a note, because that
    may differ from run to run.

    Attributes:
        kind: "raised", "died", "hung", "result" (a value that cannot travel back) or "start".
        rank: the rank that failed first or never came; None when no single rank is to blame.
        error_type, message: of the exception, for "raised" and "start"; else empty.
        traceback: the rank's whole traceback, library frames included; may be empty.
        output: what each rank had printed.
        ranks: where each rank was.
    """

    def __init__(
        self, kind: str, rank: int | None, text: str, ranks: list[Whereabouts], failure: Failure | None = None
    ):
        super().__init__(text)
        self.kind, self.rank, self.ranks = kind, rank, ranks
        self.error_type = failure.error_type if failure else ""
        self.message = failure.message if failure else ""
        self.traceback = failure.traceback if failure else ""
        self.output: list[str] = []
        self.add_note(where_all_were(ranks))

    @property
    def report(self) -> str:
        """The message and the notes, as Python shows them."""
        return "\n".join([str(self), *getattr(self, "__notes__", [])])

    def _render_traceback_(self) -> list[str]:
        """Called by IPython: the report alone, without our own frames."""
        return [f"RankError: {self.report}"]


# --- One exception, made in the rank ---------------------------------------------------------------


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


def describe(error: BaseException, rank: int, during: str = "call") -> Failure:
    """Turn an exception into what the report needs, in the rank that raised it."""
    shown = traceback.TracebackException.from_exception(error)
    summary = "".join(shown.format_exception_only()).strip()
    return Failure(
        rank=rank,
        error_type=type(error).__name__,
        message=str(error),
        story="\n".join([*_own_frames(shown.stack), *_causes(error), summary]),
        traceback="".join(shown.format()),
        talking=_is_talking(error),
        line=own_line(shown.stack),
        during=during,
    )


def _own_frames(stack: traceback.StackSummary) -> list[str]:
    """The frames a learner can act on, and the name of the library function that raised, if one did."""
    lines = []
    for frame in own_frames(stack):
        lines += [f"  {shown_name(frame.filename)}, line {frame.lineno}, in {frame.name}", f"    {frame.line}"]
    last = stack[-1] if stack else None
    if last and "site-packages" in last.filename:
        lines.append(f"  raised inside {last.filename.partition('site-packages/')[2]}, {last.name}")
    return lines


def _causes(error: BaseException) -> list[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [f"  caused by {type(cause).__name__}: {cause}", *_causes(cause)] if cause else []


def line_of(frames: list[tuple[str, int, str]]) -> Line | None:
    """The learner's line of a stack of (file, line, function), outermost first."""
    return own_line(traceback.StackSummary.from_list([traceback.FrameSummary(*frame) for frame in frames]))


def line_in_dump(text: str) -> Line | None:
    """The main thread's line in what faulthandler wrote of all threads, last of all if it wrote several times."""
    main_thread = text.partition("Extension modules")[0].rpartition("(most recent call first):")[2]
    frames = re.findall(r'File "(.+?)", line (\d+) in (.+)', main_thread)
    return line_of([(name, int(number), function) for name, number, function in reversed(frames)])


def _is_talking(error: BaseException) -> bool:
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out waiting", "Broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(s in str(error) for s in signs)
    )


# --- All ranks, laid side by side in the parent ----------------------------------------------------


def where_all_were(ranks: list[Whereabouts]) -> str:
    """One line a rank: what it was doing when the call failed."""
    return "\nWhere the ranks were:\n" + "\n".join(f"  rank {w.rank}  {_where(w)}" for w in ranks)


def _where(w: Whereabouts) -> str:
    if w.status in ("returned", "died"):
        return w.detail or "had returned"
    waiting, last = w.waiting_in, w.recent[-1] if w.recent else None
    if w.status == "raised":
        # send and recv are not recorded, so there may be no collective to name
        did = f"raised {w.detail}" if w.detail else f"gave up in {waiting or last or 'a message'}"
    elif w.status == "silent":
        did = "did not answer"
    else:
        did = f"waited in {waiting}" if waiting else "was running"
    before = f"last collective {last}" if last and not waiting and (w.status != "raised" or w.detail) else ""
    return "; ".join(part for part in (did, before, str(w.line or "")) if part)


def failed(failure: Failure, ranks: list[Whereabouts]) -> RankError:
    """A rank raised for a reason of its own."""
    if failure.during == "result":
        return RankError("result", failure.rank, failure.message, ranks, failure)
    kind = "start" if failure.during == "start" else "raised"
    did = "could not start" if kind == "start" else f"raised {failure.error_type}"
    text = f"rank {failure.rank} of {len(ranks)} {did}: {failure.message}\n\n{failure.story}"
    return RankError(kind, failure.rank, text, ranks, failure)


def died(
    rank: int, exitcode: int | None, ranks: list[Whereabouts], output: str = "", starting: bool = False
) -> RankError:
    """A rank's process ended without an answer; `output` is what it had written."""
    if "doesn't match expected size" in output:  # gloo ends the process when two ranks bring unequal tensors
        others = "; ".join(f"rank {w.rank} called {w.recent[-1]}" for w in ranks if w.recent)
        text = (
            f"ranks brought tensors of different sizes to one collective, and gloo ended rank {rank}: {others}\n"
            "Every rank must call the same collectives, in the same order, with the same shapes."
        )
    else:
        text = f"rank {rank} of {len(ranks)} died{' while starting' if starting else ''}: {why_died(exitcode)}"
    line = ranks[rank].line
    return RankError("start" if starting else "died", rank, f"{text}\n  it was at {line}" if line else text, ranks)


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
        name = signal.Signals(-exitcode).name
        return f"killed by {name}, a crash in compiled code or a signal from outside; its last words are in its output"
    return (
        f"it ended itself with exit status {exitcode}, neither returning nor raising; look for os._exit or a program "
        "that starts ranks without `if __name__ == '__main__':`"
    )


def silent(timeout_s: float, ranks: list[Whereabouts], failure: Failure | None = None) -> RankError:
    """Ranks lost patience in a collective: name the disagreement, or who never came."""
    if failure and any(sign in failure.message for sign in ("Connection closed", "Connection reset")):
        return _cut_off(failure, ranks)
    if found := _disagreement(ranks):
        number, calls = found
        named = "; ".join(f"rank {rank} called {call}" for rank, call in calls.items())
        text = (
            f"ranks disagree about collective #{number}: {named}\n"
            "Every rank must call the same collectives, in the same order, with the same shapes."
        )
        return RankError("hung", None, text, ranks, failure)
    if found := _missing(ranks):
        awaited, absent = found
        who = ", ".join(f"rank {w.rank}" for w in absent)
        at = "\n".join(f"  rank {w.rank} {_where_absent(w)}" for w in absent)
        text = (
            f"{who} never entered {awaited}; the others waited {timeout_s:g} s\n{at}\n"
            "Every rank must call every collective. Look for a branch on the rank, an early return or an endless loop; "
            "if a rank was only slow, raise timeout_s."
        )
        return RankError("hung", absent[0].rank, text, ranks, failure)
    if failure:
        return failed(failure, ranks)
    stuck = max(ranks, key=lambda w: w.waited_s)
    text = f"rank {stuck.rank} waited {timeout_s:g} s in {stuck.waiting_in}, which all entered: look at the network"
    if stuck.waiting_in and stuck.waiting_in.op in _ROOTED:
        text += ", and at src or dst, which must be the same rank on all ranks of the group"
    return RankError("hung", None, text, ranks)


def _where_absent(w: Whereabouts) -> str:
    if w.status == "returned":
        return "had returned"
    return f"was at {w.line}" if w.line else "did not answer"


def _cut_off(failure: Failure, ranks: list[Whereabouts]) -> RankError:
    last = next((w.recent[-1] for w in ranks if w.rank == failure.rank and w.recent), "a collective")
    if gone := [w.rank for w in ranks if w.status == "silent"]:
        text = (
            f"rank {gone[0]} of {len(ranks)} is gone: it does not answer, and rank {failure.rank} lost the connection "
            f"to a peer in {last}\nEither it was killed, and the launcher's own report has the signal, "
            "or its host or the network is down."
        )
        return RankError("died", gone[0], text, ranks, failure)
    # nobody has died, so a rank has ended its group
    text = (
        f"rank {failure.rank} of {len(ranks)} lost the connection to a peer in {last}\n  it was at {failure.line}\n"
        "A rank that skips a collective, or ends its group while others still talk, cuts them off: look for a branch "
        "on the rank, and call dist.barrier() before dist.destroy_process_group(), on every rank."
    )
    return RankError("raised", failure.rank, text, ranks, failure)


def over_limit(limit_s: float, ranks: list[Whereabouts], starting: bool) -> RankError:
    """The call, or the start, took longer than it may."""
    late = [w for w in ranks if w.status in ("running", "silent")]
    who = ", ".join(str(w.rank) for w in late)
    at = "".join(f"\n  rank {w.rank} {_where(w)}" for w in late)
    what = (
        f"rank {who} did not start within {limit_s:g} s"
        if starting
        else f"no result after {limit_s:g} s (limit_s) from rank {who}"
    )
    return RankError("start" if starting else "hung", late[0].rank if len(late) == 1 else None, what + at, ranks)


def _disagreement(ranks: list[Whereabouts]) -> tuple[int, dict[int, Collective]] | None:
    """The first number at which two ranks called different things on the default group."""
    by_number: dict[int, dict[int, Collective]] = {}
    for w in ranks:
        for call in w.recent:
            if not call.group:
                by_number.setdefault(call.seq, {})[w.rank] = call
    for calls in (calls for _, calls in sorted(by_number.items())):
        if len({_signature(call) for call in calls.values()}) > 1:
            return next(iter(calls.values())).number, calls
    return None


def _signature(call: Collective) -> tuple:
    return (call.op, call.dtype, call.sizes) if call.op in _SAME_SHAPE else (call.op,)


def _missing(ranks: list[Whereabouts]) -> tuple[Collective, list[Whereabouts]] | None:
    """The collective that some ranks wait in, and the ranks that have not entered it."""
    awaited = [w.waiting_in or w.recent[-1] for w in ranks if w.recent and (w.waiting_in or w.status == "raised")]
    if not awaited:
        return None
    first = min(awaited, key=lambda c: (c.group, c.seq))
    entered = {w.rank: max((c.seq for c in w.recent if c.group == first.group), default=0) for w in ranks}
    absent = [w for w in ranks if w.rank in first.members and entered[w.rank] < first.seq]
    return (first, absent) if absent else None
