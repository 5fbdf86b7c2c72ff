"""What did this job die of, and on which rank? Read from what it has left: logs, and Flight Recorder dumps.

A job of a thousand ranks leaves a thousand logs that end in a thousand errors, nearly all of them echoes of one. So
each line is given its rank and its time, from its own words or from the name of its file; causes are looked for before
consequences, the earliest before later ones. Where only consequences are left, the ranks' counts of collectives tell
who fell behind. Where nothing is left, the answer is "unknown".

Left out on purpose: waiting for a job that runs; that is `--hang-report` in training, and `launch`'s report.
Read next: `causes.py`, the words; `flight.py`, the dumps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ddp_course.diagnose import flight
from ddp_course.diagnose.causes import CAUSES, ECHOES, EXCEPTION, Cause
from ddp_course.diagnose.recognise import RULES, unfolded

MOST_BYTES = 20_000_000  # of one file: its end is read, where the errors are
COURSE_RULES = ("rendezvous-unreachable", "collective-shape", "collective-order", "uneven-inputs", "skipped-collective")

_PREFIX = re.compile(
    r"^\s*(?:\[(?:rank|default|trainer)?\s?(\d+)\]:?|\[[Rr]ank (\d+)\]|(\d+): |(?:\S+ )?rank[ =:]?(\d+)[\]:|])"
)
_FILE = (
    re.compile(r"(?:^|/)attempt_\d+/(\d+)/(?:stdout|stderr|std)[^/]*$"),
    re.compile(r"rank[-_.]?(\d+)[^/]*$", re.I),
    re.compile(r"(?:-(?:worker|master)-|pod-|trainer-|task[-_.]?|worker[-_.]?)(\d+)[^/]*\.(?:log|txt|out|err)$"),
    re.compile(r"(?:stdout|stderr|out|err|log)[._-](\d+)(?:\.\w+)?$"),
    re.compile(r"/(\d+)/(?:stdout|stderr)[^/]*$"),
)
_WATCHDOG = re.compile(
    r"\[?[Rr]ank (?P<rank>\d+)\]?.{0,80}?(?:Watchdog caught collective operation timeout|[Tt]imeout at|Collective)"
    r".{0,80}?SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)"
)
_COUNTS = re.compile(r"[Rr]ank (?P<rank>\d+)\b.{0,200}?last enqueued (?:NCCL )?work: (?P<last>-?\d+)", re.S)
_CAME_NOT = re.compile(r"Ranks? (\d+)(?:, \d+)* failed to pass monitoredBarrier|ranks? (\d+)[\d, and]* never entered")
_ROOT = re.compile(r"Root Cause \(first observed failure\):(?:.|\n)*?rank\s*: (\d+)(?:.|\n)*?exitcode\s*: (-?\d+)")
_LOST = r"Connection (?:closed|reset) by peer"
_SIGNALS = {"-9": "killed", "-6": "aborted", "-7": "bus-error", "-11": "crashed", "-15": "terminated"}


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


@dataclass
class Log:
    """One file of a job."""

    name: str
    rank: int | None
    lines: list[str]
    ranks: list[int | None] = field(default_factory=list)  # of each line
    times: list[datetime | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        now: datetime | None = None
        for line in self.lines:
            found = _PREFIX.match(line)
            said = next((number for number in found.groups() if number), None) if found else None
            self.ranks.append(int(said) if said else self.rank)
            now = time_of(line) or now
            self.times.append(now)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def telling(self) -> Iterator[tuple[int, str]]:
        """The lines that speak of a failure, cause or echo: each its index, and the cause's name or its own words."""
        for index, line in enumerate(self.lines):
            cause = next((cause.name for cause in CAUSES if cause.match(line)), "")
            if cause or EXCEPTION.match(line) or ECHOES.search(line):
                yield index, cause or line.strip()


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
            logs.append(Log(str(path), _rank_of(path), _tail(path)))
    return logs, dumps


def judged(logs: list[Log], dumps: dict[int | None, flight.Dump]) -> Reading:
    """Name what a job died of that has left these."""
    return (
        _known_cause(logs)
        or _own_error(logs)
        or _course_report(logs)
        or _laggard(logs, flight.behind(dumps))
        or _died(logs)
        or _lost_peer(logs)
        or Reading(None, evidence=f"{len(logs)} files, and none of the words that jobs die with")
    )


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()  # without colours


def _rank_of(path: Path) -> int | None:
    return next((int(found[1]) for pattern in _FILE if (found := pattern.search(str(path)))), None)


def time_of(line: str) -> datetime | None:
    """The time at which a line was written, if it begins with one of the usual forms."""
    head = line[:60]
    if found := re.search(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)", head):
        return _moment(*found.groups())
    if found := re.search(r"\b[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)", head):  # glog's, which has no year
        return _moment("1999", *found.groups())
    return None


def _moment(*parts: str) -> datetime | None:
    try:
        year, *rest = map(int, parts)
        return datetime(2000, *rest)  # one job: the year says nothing, and some forms leave it out
    except ValueError:
        return None


# --- The cause in words ----------------------------------------------------------------------------


def _matches(logs: list[Log]) -> Iterator[tuple[Cause, Log, int, re.Match]]:
    for log in logs:
        for number, line in enumerate(log.lines):
            for cause in CAUSES:
                if found := cause.match(line):
                    yield cause, log, number, found
                    break


def _known_cause(logs: list[Log]) -> Reading | None:
    found = list(_matches(logs))
    if not found:
        return None
    worst = [each for each in found if each[0].name not in WEAK] or found
    timed = [each for each in worst if each[1].times[each[2]]]
    if timed and len(timed) == len(worst):
        cause, log, number, match = min(timed, key=lambda each: each[1].times[each[2]])
    else:
        cause, log, number, match = min(worst, key=lambda each: CAUSES.index(each[0]))
    said = match.groupdict().get("rank")
    rank = int(said) if said else log.ranks[number]
    if rank is None:
        rank = _root_rank(logs)
    return Reading(cause.name, rank, _place(log, number), cause.cure)


# These follow from others as often as not, so another cause goes before them.
WEAK = {"worker-killed", "mismatched-calls", "world-size", "port-taken", "module-prefix", "versions-differ"}


def _place(log: Log, number: int) -> str:
    return f"{log.name}:{number + 1}: {log.lines[number].strip()[:160]}"


def _root_rank(logs: list[Log]) -> int | None:
    return next((int(found[1]) for log in logs if (found := _ROOT.search(log.text))), None)


def _own_error(logs: list[Log]) -> Reading | None:
    """An exception of the program's own, the earliest; not one that says that a peer is gone."""
    found = []
    for log in logs:
        for number, line in enumerate(log.lines):
            match = EXCEPTION.match(line)
            if match and not ECHOES.search(line) and match["error"] != "KeyboardInterrupt":
                found.append((log, number, match))
    if not found:
        return None
    root = _root_rank(logs)
    at_root = [each for each in found if root is not None and each[0].ranks[each[1]] == root]
    timed = [each for each in found if each[0].times[each[1]]]
    log, number, match = (at_root or sorted(timed, key=lambda each: each[0].times[each[1]]) or found)[0]
    ranks = {each[0].ranks[each[1]] for each in found if each[2]["error"] == match["error"]}
    rank = log.ranks[number] if log.ranks[number] is not None else root
    rank = None if len(ranks) > 1 and rank != root else rank
    cure = "the program's own error: fix it on that rank; what other ranks say follows from it"
    return Reading(
        f"{match['error'].rpartition('.')[2]}: {match['words'][:80]}".rstrip(": "), rank, _place(log, number), cure
    )


def _course_report(logs: list[Log]) -> Reading | None:
    for log in logs:
        text = unfolded(log.text)
        for fault, rule in RULES:
            if fault in COURSE_RULES and (found := rule(text)):
                return Reading(fault, found[0], f"{log.name}: {found[1][:160]}", "ddp-course faults " + fault)
    return None


# --- Only consequences -----------------------------------------------------------------------------


def _laggard(logs: list[Log], behind: flight.Behind | None) -> Reading | None:
    """Who did not come to a collective in which the others timed out?"""
    cure = "look at what this rank did before the call: a branch, fewer batches, an exception that was swallowed"
    if behind:
        return Reading("hang", behind.rank, behind.evidence, cure, behind.collective)
    waits: dict[int, tuple[int, str]] = {}
    counts: dict[int, int] = {}
    for log in logs:
        for found in _WATCHDOG.finditer(log.text):
            waits.setdefault(int(found["rank"]), (int(found["seq"]), found["op"]))
        for found in _COUNTS.finditer(log.text):
            counts.setdefault(int(found["rank"]), int(found["last"]))
        if found := _CAME_NOT.search(log.text):
            return Reading("hang", int(found[1] or found[2]), f"{log.name}: {found[0]}", cure)
    if not waits:
        timed_out = [
            (log, n)
            for log in logs
            for n, line in enumerate(log.lines)
            if re.search(r"Timed out waiting \w+ for|timed? ?out", line, re.I)
        ]
        if timed_out:
            return _silent_rank(logs, *timed_out[0], "hang", cure)
        return None
    seq, op = min(waits.values())
    fewest = min(counts, key=counts.get) if counts else None
    if (
        fewest is not None
        and list(counts.values()).count(counts[fewest]) == 1
        and counts[fewest] < max(counts.values())
    ):
        rank = fewest
    else:
        later = [rank for rank, (number, _) in waits.items() if number > seq]
        known = {rank for log in logs for rank in {*log.ranks, log.rank} if rank is not None}
        missing = sorted(known - waits.keys())
        early = [rank for rank, (number, _) in waits.items() if number == seq]
        rank = missing[0] if len(missing) == 1 else early[0] if later and len(early) == 1 else None
    evidence = f"ranks {', '.join(map(str, sorted(waits)))} gave up in {op} number {seq}"
    if counts:
        evidence += "; last call of each: " + ", ".join(f"rank {r} {n}" for r, n in sorted(counts.items()))
    return Reading("hang", rank, evidence, cure, f"{op} #{seq}")


def _silent_rank(logs: list[Log], log: Log, number: int, cause: str, cure: str) -> Reading:
    """Of ranks with a log each, the one that does not speak of a time-out or a lost peer, if it is one."""
    speak = {
        rank
        for each in logs
        for rank, line in zip(each.ranks, each.lines, strict=True)
        if re.search(rf"Timed out|timeout|{_LOST}", line)
    }
    known = {rank for each in logs for rank in {*each.ranks, each.rank} if rank is not None}
    silent = sorted(known - speak)
    operation = re.search(r"(\w+) operation", log.lines[number])
    return Reading(
        cause, silent[0] if len(silent) == 1 else None, _place(log, number), cure, operation[1] if operation else ""
    )


def _lost_peer(logs: list[Log]) -> Reading | None:
    """Where all that is left is that a peer is gone."""
    cure = (
        "the peer named there died or closed first; the rank with no last word is the first suspect: look for SIGKILL, "
        "in dmesg and the launcher's log"
    )
    found = [(log, number) for log in logs for number, line in enumerate(log.lines) if re.search(_LOST, line)]
    return _silent_rank(logs, *found[0], "connection-closed", cure) if found else None


def _died(logs: list[Log]) -> Reading | None:
    """A rank that ended without a word, as the launcher tells it."""
    for log in logs:
        patterns = (
            r"Root Cause \(first observed failure\):(?:.|\n)*?rank\s*: (?P<rank>\d+)(?:.|\n)*?exitcode\s*: "
            r"(?P<code>-?\d+)",
            r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)",
            r"task (?P<rank>\d+): (?P<code>Killed|Exited with exit code \d+|Aborted|Segmentation fault)",
            r"[Pp]rocess (?P<rank>\d+) terminated with (?:signal|exit code) (?P<code>\w+)",
        )
        for pattern in patterns:
            if found := re.search(pattern, log.text):
                code = found["code"]
                name = _SIGNALS.get(code, "killed" if code in ("Killed", "SIGKILL") else f"exit status {code}")
                cure = (
                    "SIGKILL comes from the kernel's memory killer or from a person: dmesg, and less memory a rank"
                    if name == "killed"
                    else "the rank said nothing: look at its standard error, and for sys.exit in the program"
                )
                return Reading(name, int(found["rank"]), f"{log.name}: {' '.join(found[0].split())[-120:]}", cure)
    return None
