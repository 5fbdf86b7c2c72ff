"""What did this job die of, and on which rank? Read from what it has left: logs, and Flight Recorder dumps.

A job of a thousand ranks leaves a thousand logs that end in a thousand errors, nearly all of them echoes of one. So
each line is given its rank and its time, from its own words or from the name of its file; causes are looked for before
consequences, the earliest before later ones. Where only consequences are left, the ranks' counts of collectives tell
who fell behind. Where nothing is left, the answer is "unknown". A rank is blamed only if no other can be meant.

Left out on purpose: waiting for a job that runs; that is `launch`'s report.
Read next: `log_lines.py`, whose line it is; `causes.py`, the words; `waits.py`, `exits.py` and `flight.py`, the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddp_course.diagnose import exits, flight
from ddp_course.diagnose.causes import BETWEEN, CAUSES, FOLLOWS, OUTSIDE
from ddp_course.diagnose.log_lines import DEATH, Log, read_log, shortened, unheard_ranks, with_sure_ranks
from ddp_course.diagnose.recognise import calls_that_differ, odd_one_out, recognise
from ddp_course.diagnose.suspects import Suspect, earliest, known_causes, own_errors
from ddp_course.diagnose.waits import LOST, silent_ranks, waiting
from ddp_course.launcher import codes
from ddp_course.launcher.rank_status import listed_ranks

OF_RANKS = ("collective-shape", "collective-order", "uneven-inputs", "skipped-collective")
_STORE = re.compile(
    r"(?:sendBytes|recv(?:Value|Bytes|Vector)?) failed on SocketImpl|TCPStore server has shut down too early"
)


@dataclass(frozen=True)
class Reading:
    """What a job's logs say.

    Attributes:
        cause: short words; None for unknown.
        rank: to blame; None when it is nobody's or cannot be told.
        evidence: the words that decided, with file and line.
        cure: what to try.
        collective: what the others waited in, if they did.
    """

    cause: str | None
    rank: int | None = None
    evidence: str = ""
    cure: str = ""
    collective: str = ""


def read(paths: list[Path]) -> Reading:
    """Name what a job died of.

    Args:
        paths: files or folders of one job.
    Raises:
        OSError: one of them cannot be read.
    """
    return judged(*left_by(paths))


def left_by(paths: list[Path]) -> tuple[list[Log], dict[int | None, flight.Dump]]:
    """Return the logs of a job, and its dumps by rank; arguments and errors are those of `read`."""
    files = [
        each for path in paths for each in ([path] if path.is_file() else sorted(path.rglob("*"))) if each.is_file()
    ]
    dumps = {}
    logs = []
    for path in files:
        if (dump := flight.load(path)) is not None:
            named = re.search(r"(\d+)(?:\.\w+)?$", path.name)  # torch ends the name with the rank
            dumps[dump.rank if dump.rank is not None else int(named[1]) if named else None] = dump
        else:
            logs.append(read_log(path))
    return with_sure_ranks(logs), dumps


def judged(logs: list[Log], dumps: dict[int | None, flight.Dump]) -> Reading:
    """Name what a job died of that has left these."""
    ends = exits.exits(logs)
    known = list(known_causes(logs))
    own = list(own_errors(logs))
    cancelled = [each for each in known if each.name == "cancelled"]  # by srun itself, when one task has failed
    outside = [each for each in known if each.name in OUTSIDE and each not in cancelled]
    weak = [each for each in known if each.name in FOLLOWS or (each.warns and each.name not in OUTSIDE)]
    strong = [each for each in known if each not in weak + outside + cancelled]
    if logs and not dumps and not own and not known and all(log.finished >= 0 for log in logs if log.lines):
        return Reading(None, evidence=f"{_at_end(logs)}; the job finished, and nothing shows a failure")
    return (
        _of_suspects(strong + own, logs, ends)
        or _course_report(logs)
        or _detailed(logs)
        or _of_suspects(weak, logs, ends)
        or _hang(logs, flight.behind(dumps))
        or _of_exit(exits.killed(ends), logs)
        or _of_suspects(outside, logs, ends)
        or (None if _echoes(logs) else _of_exit(exits.ended(ends), logs))
        or _of_suspects(cancelled, logs, ends)
        or _store_gone(logs)
        or _lost_peer(logs)
        or _of_exit(exits.ended(ends), logs, sure=False)
        or _unknown(logs)
    )


# --- The cause in words ----------------------------------------------------------------------------


def _of_suspects(suspects: list[Suspect], logs: list[Log], ends: Collection[exits.Exit]) -> Reading | None:
    """The suspect that came first, if that can be known; else the one that goes before others, without a rank."""
    if not suspects:
        return None
    first, sure = earliest(suspects, logs, ends)
    same = [each for each in suspects if each.name == first.name]
    ranks = {each.rank for each in same} - {None}
    rank = next(iter(ranks)) if len(ranks) == 1 else None
    evidence = first.log.place(first.number, first.start)
    if first.name == "world-size" and len(missing := unheard_ranks(logs)) == 1:
        rank = min(missing)
        evidence += f"; nothing is heard from rank {rank}"
    elif len(ranks) > 1:
        evidence += f"; so say {listed_ranks(ranks)}" if len(ranks) <= 8 else f"; so say {len(ranks)} ranks"
        sure = False
    elif rank is None and first.name not in BETWEEN:
        rank = exits.rank_of_killed_pid(logs) if first.name in ("out-of-memory", "worker-killed") else None
        if rank is None and not _echoes(logs):
            rank = exits.sole_failure(ends)
        if rank is None:
            rank = next((each["rank"] for each in map(_raised, logs) if each), None)
    if not sure and len(others := {each.name for each in suspects}) > 1:
        evidence += f"; also: {', '.join(sorted(others - {first.name}))}"
    rank = rank if sure else None
    own = first.order == len(CAUSES) and rank is None
    cure = first.cure if not own else _SHARED if len(same) > 1 and len(ranks) > 1 else _WHOSE
    return Reading(first.name, rank, evidence, cure)


_SHARED = "the program's own error, and several ranks have it: fix it in what they share, such as a path or the data"
_WHOSE = "the program's own error; the log does not say which rank's: read its traceback, what other ranks say follows"


def _raised(log: Log) -> dict:
    """The facts of this course's report, if they are that one rank raised or died."""
    facts = codes.found_in(log.text)
    return facts if facts.get("code") in ("raised", "died") else {}


def _detailed(logs: list[Log]) -> Reading | None:
    """torch itself lays the calls of ranks side by side, as TORCH_DISTRIBUTED_DEBUG=DETAIL has it do."""
    found = [(log, n) for log in logs for n, line in enumerate(log.bare) if "Detected mismatch between" in line]
    calls = calls_that_differ("\n".join(log.lines[n] for log, n in found))
    if len(set(calls.values())) < 2:
        return None
    said = "; ".join(f"rank {rank} called {call}" for rank, call in sorted(calls.items()))
    cure = "find where the paths of these ranks part before this call: the line is in each one's traceback"
    return Reading("mismatched-calls", odd_one_out(calls), f"{found[0][0].name}:{found[0][1] + 1}: {said}", cure)


def _course_report(logs: list[Log]) -> Reading | None:
    """What this course's launcher has found, which has seen all ranks; it writes a line of its own for it."""
    for log in logs:
        facts = codes.found_in(log.text)
        number = next((n for n, line in enumerate(log.bare) if facts and codes.found_in(line)), 0)
        if not facts or log.lived_on(number):
            continue
        found = recognise(log.text)
        if found.fault in OF_RANKS:
            cure = f"ddp-course faults {found.fault}"
            return Reading(found.fault, found.rank, f"{log.name}: {shortened(found.evidence)}", cure)
        at = f", at {facts['line']}" if facts.get("line") else ""
        said = f"{codes.CODES[facts['code']]}{at}; {facts.get('error', '')}".rstrip("; ")
        cure = "read the course's report above this line, in the log"
        return Reading(facts["code"], facts["rank"], f"{log.name}:{number + 1}: {shortened(said)}", cure)
    return None


# --- Only consequences -----------------------------------------------------------------------------


def _hang(logs: list[Log], behind: flight.Behind | None) -> Reading | None:
    if behind:
        cure = (
            "look at what this rank did before the call: a branch, fewer batches, an exception that was caught"
            if behind.rank is not None
            else "compare what these ranks did before the call: a branch on the rank, loops of different lengths"
        )
        return Reading("hang", behind.rank, behind.evidence, cure, behind.collective)
    found = waiting(logs)
    return Reading(found.cause, found.rank, found.evidence, found.cure, found.collective) if found else None


def _of_exit(found: exits.Exit | None, logs: list[Log], sure: bool = True) -> Reading | None:
    if found is None:
        return None
    return Reading(found.how, found.rank if sure else None, found.evidence, found.cure)


def _echoes(logs: list[Log]) -> bool:
    """Whether a rank says that it has lost a peer: then what a launcher saw first may be an echo."""
    return any(LOST.search(line) for log in logs for line in log.bare)


def _store_gone(logs: list[Log]) -> Reading | None:
    """The ranks have lost the store, which rank 0 hosts, or torchrun's agent on its node."""
    found = _words_of(_STORE, logs)
    if not found:
        return None
    who = {log.ranks[n] for log, n in found} - {None}
    rank = 0 if who and 0 not in who else None
    cure = "the store's host, rank 0's node, ended first or is out of reach: read its log, and torchrun's there"
    return Reading("store-gone", rank, found[0][0].place(found[0][1]), cure)


def _lost_peer(logs: list[Log]) -> Reading | None:
    """Where all that is left is that a peer is gone."""
    found = _words_of(LOST, logs)
    if not found:
        return None
    cure = (
        "the peer named there died or closed first; the rank with no last word is the first suspect: look for SIGKILL, "
        "in dmesg and the launcher's log"
    )
    silent = silent_ranks(logs)
    return Reading("connection-closed", min(silent) if len(silent) == 1 else None, found[0][0].place(found[0][1]), cure)


def _words_of(pattern: re.Pattern, logs: list[Log]) -> list[tuple[Log, int]]:
    """Where ranks say so; after a good end they warn of it as they leave."""
    leaving = any(log.finished >= 0 for log in logs)
    return [
        (log, number)
        for log in logs
        for number, line in enumerate(log.bare)
        if pattern.search(line) and not log.lived_on(number) and not (leaving and line.startswith("[W"))
    ]


def _unknown(logs: list[Log]) -> Reading:
    if any(log.finished >= 0 for log in logs):
        return Reading(None, evidence=f"{_at_end(logs)}; the job finished, and nothing shows a failure")
    if any(DEATH.search(line) for log in logs for line in log.bare):
        return Reading(None, evidence=f"{_at_end(logs)}; the job failed, and no line says of what")
    return Reading(
        None,
        evidence=f"{_at_end(logs)}; nothing shows a failure, nor a good end: it runs, was stopped from outside, or its "
        "last words are elsewhere (the launcher's log, the scheduler's record, dmesg)",
    )


def _at_end(logs: list[Log]) -> str:
    """Where the only log ends, or how many there are."""
    lines = [(log, n) for log in logs for n, line in enumerate(log.lines) if line.strip()]
    if len(logs) != 1 or not lines:
        return f"{len(logs)} files" if lines else f"{len(logs)} files, and nothing in them"
    return f"the last line is {lines[-1][0].place(lines[-1][1])}"
