"""Which rank wrote this line of a log, and when?

Launchers put their own words before each line, and programs theirs: "[rank3]:", "[default3]:", "3: " (srun), a date.
They are taken off, so that what is left begins as the rank wrote it. Nothing is taken for a rank's number that may be
another's: a pod, a GPU of one host, or a member's place in a group.

Read next: `causes.py`, the words that are looked for; `logs.py`, where.
"""

# ruff: noqa: E501  (words that are looked for stay whole)
from __future__ import annotations

import re
import textwrap
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

from ddp_course.diagnose.causes import CAUSES, ECHOES, EXCEPTION, Cause

MOST_BYTES = 20_000_000  # of one file: its end is read, where the errors are
MOST_LETTERS = 160  # of a quotation

# One thing that stands before what was written; a group called rank says who wrote it, one called task perhaps.
_BEFORE = re.compile(
    r" ?(?:\[?(?:\d{4}-\d\d-\d\d[T_ ])?\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?\]?(?: -)?"
    r"|[^\[]{0,60}\[(?:rank|Rank)[ =:]?(?P<rank>\d+)\]:?"
    r"|\[(?:default|trainer|worker)(?P<local>\d+)\]:?"
    r"|\[\d+,(?P<mpi>\d+)\]<std\w+>:?"
    r"|(?P<task>\d+):(?= )|\[(?P<place>\d+)\]:?(?= (?!NCCL|misc/|init|transport/))"
    r"|[Rr]ank[ =:]?(?P<said>\d+)(?:[:|\]]|(?= \|))"
    r"|[\w./-]+ +\|(?= )|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)(?= )|\[pod/[^\]]*\]|\| (?:INFO|WARNING|ERROR|CRITICAL) +\| \S+ -(?= )"
    r"|\[?(?:INFO|WARNING|ERROR|CRITICAL|FATAL)\]?(?: ?[:-])?(?= ))(?:(?<=[\]>]:) ?|(?: -)?(?: |$)|(?=\[))"
)
_JSON = re.compile(r'\{.*"(?:rank|global_rank)": ?"?(\d+)')
_TABLE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)|^-- Process (\d+) terminated with the following error")
_END_OF_TABLE = re.compile(r"^(?:[=-]{20,}|\S*Root Cause|\[\d+\]:)\s*$")
_FILE = (
    re.compile(r"rank[-_.]?(\d+)[^/]*$", re.I),
    re.compile(r"(?:^|/)attempt_\d+/(\d+)/(?:stdout|stderr|std)[^/]*$"),
    re.compile(r"(?:trainer-|task[-_.]?)(\d+)[^/]*\.(?:log|txt|out|err)$"),
    re.compile(r"(?:stdout|stderr|out|err|log)[._-](\d+)(?:\.\w+)?$"),
    re.compile(r"/(\d+)/(?:stdout|stderr)[^/]*$"),
)
_WORLD = re.compile(
    r"nranks (\d+)|[Ww]orld[_ -]?[Ss]ize['\"]?\s*[:=]\s*'?(\d+)|WORLD_SIZE['\"]?\s*[:=]\s*'?(\d+)|\brank \d+ of (\d+)\b"
    r"|\b\d+/(\d+) clients joined|with (\d+) processes$"
)
_TORCH = re.compile(r"(?:\[[^\]]*\] ?)?\[Rank (\d+)\]")  # before 2.3
_MORE_NODES = re.compile(
    r"--nnodes[= ](?!1\b)|\bnode_rank[=: ]+[1-9]|group_world_size[=: ]+(?!1\b)\d|_NODEID[=: ]+[1-9]"
)
_PER_NODE, _NODES = re.compile(r"--nproc[-_]per[-_]node[= ](\d+)"), re.compile(r"--nnodes[= ](\d+)")
_PROGRESS = re.compile(
    r"(?i)(?![ \t]|traceback).*?(?:\b(?:step|epoch|iter(?:ation)?|batch|it)\b['\"]?\W{0,4}\d|\bloss\b['\"]?\W{0,4}\d"
    r"|\b(?:saved|saving|resum\w+)\b|\d+%\|)"
)
OTHERS_LINES = 4  # of one rank, that are not written any more when another has failed
ENOUGH_LINES = 2000  # to find out
FINISHED = re.compile(
    r"(?i)\b(?:training|job|run|all|everything|fit)\b.{0,30}\b(?:done|finished|completed?|ended|success\w*)\b|^done\b"
    r"|State:? COMPLETED|\bSucceeded\b|max_(?:epochs|steps)=\d+` reached|exit(?:ed with)?(?: code| status)?[ :=]+0\b"
)
_NUMBERS, _TELLING_NUMBERS = re.compile(r"\d+(?:\.\d+)?"), re.compile(r"Errno|Xid|signal|worker_count|nan|inf")
DEATH = re.compile(
    r"exit ?code\s*[:=]?\s*-?[1-9]|[Ee]xited with (?:exit )?code [1-9]|ChildFailedError|slurmstepd: error|srun: error|\bKilled$"
    r"|terminate called|taking the entire process down|Aborting process on rank|core dumped|Watchdog caught|Segmentation fault|SignalException|OOMKill"
)


@dataclass
class Log:
    """One file of a job; a line without its rank is laid at `rank`, that of the file."""

    name: str
    rank: int | None
    lines: list[str]
    ranks: list[int | None] = field(default_factory=list)  # of each line
    times: list[datetime | None] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)  # each line without what launchers put before it

    def __post_init__(self) -> None:
        now: datetime | None = None
        table: int | None = None  # the rank of whom a launcher's table speaks
        by_task = not any("distributed/elastic" in line or "distributed/run" in line for line in self.lines)
        self.one_node = not any(_MORE_NODES.search(line) for line in self.lines)
        for line in self.lines:
            said, rest = _taken_apart(line, by_task, self.one_node)
            if found := _TABLE.match(rest):
                table = int(found[1] or found[2])
            elif _END_OF_TABLE.match(rest):
                table = None
            self.ranks.append(said if said is not None else table if table is not None else self.rank)
            now = time_of(line) or now
            self.times.append(now)
            self.bare.append(rest)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @cached_property
    def causes(self) -> dict[int, tuple[Cause, re.Match]]:
        """The first cause in each line that has one."""
        found = {}
        harmless: set[str] = set()  # lines of a long log are mostly the same, but for their numbers
        for number, line in enumerate(self.bare):
            kind = _NUMBERS.sub("0", line)
            if kind in harmless:
                continue
            matches = ((cause, match) for cause in CAUSES if (match := cause.match(line)))
            if first := next(matches, None):
                found[number] = first
            elif not _TELLING_NUMBERS.search(line):
                harmless.add(kind)
        return found

    def telling(self) -> Iterator[tuple[int, str]]:
        """The lines that speak of a failure, cause or echo: each its index, and the cause's name or its own words."""
        for number, bare in enumerate(self.bare):
            cause = self.causes.get(number)
            if cause or EXCEPTION.match(bare) or ECHOES.search(bare):
                yield number, cause[0].name if cause else self.lines[number].strip()

    def place(self, number: int, start: int = 0) -> str:
        """The file, the line's number, and its words; those before `start` may be left out if they are many."""
        return f"{self.name}:{number + 1}: {shortened(self.lines[number], start)}"

    @cached_property
    def _at_work(self) -> list[int]:
        """The lines that tell that work goes on: a step, a loss, a file that was saved."""
        return [n for n, line in enumerate(self.bare) if _PROGRESS.match(line) and not self._troubled(n)]

    def _troubled(self, number: int) -> bool:
        line = self.bare[number]
        return number in self.causes or bool(ECHOES.search(line) or EXCEPTION.match(line))

    @cached_property
    def finished(self) -> int:
        """The last line that tells of a good end, if none after it tells of a death; else -1."""
        for number in range(len(self.bare) - 1, -1, -1):
            if DEATH.search(self.bare[number]) or EXCEPTION.match(self.bare[number]):
                return -1
            if FINISHED.search(self.bare[number]) and not self._troubled(number):
                return number
        return -1

    @cached_property
    def _last_work(self) -> dict[int | None, int]:
        return {self.ranks[n]: n for n in self._at_work}

    def worked_on(self, number: int) -> bool:
        """Whether ranks went on with their work after this line: the one that wrote it, or others for several steps."""
        rank = self.ranks[number]
        if rank is not None and self._last_work.get(rank, -1) > number:
            return True
        after = bisect_right(self._at_work, number)
        later = Counter(self.ranks[n] for n in self._at_work[after : after + ENOUGH_LINES])
        return max(later.values(), default=0) >= OTHERS_LINES

    def lived_on(self, number: int) -> bool:
        """Whether the job outlived what this line tells: it was caught, or a warning."""
        finished = self.finished > number and self.ranks[self.finished] in (None, self.ranks[number])
        return finished or self.worked_on(number)


def _taken_apart(line: str, by_task: bool, one_node: bool) -> tuple[int | None, str]:
    """The rank that a line names as its own, and what is left of it."""
    rank, rest = None, line
    for _ in range(5):
        found = _BEFORE.match(rest)
        if not found:
            break
        sure = found["rank"] or found["mpi"] or found["said"]
        perhaps = ((found["task"] or found["place"]) if by_task else None) or (found["local"] if one_node else None)
        if sure or (perhaps and rank is None):
            rank = int(sure or perhaps)
        rest = rest[found.end() :]
    if rank is None and (found := _JSON.match(rest) or _TORCH.match(rest)):
        rank = int(found[1])
    return rank, rest


def shortened(text: str, start: int = 0) -> str:
    """At most MOST_LETTERS of a text, cut between words; from `start` on, if that would not be in it."""
    text = text.strip()
    if len(text) > MOST_LETTERS and start > MOST_LETTERS // 2:
        cut = text.rfind(" ", 0, start)
        text = f"… {text[cut + 1 :]}"
    return textwrap.shorten(text, MOST_LETTERS, placeholder=" …") if " " in text[:MOST_LETTERS] else text[:MOST_LETTERS]


def read_log(path: Path) -> Log:
    """Read the end of one file; raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # without colours
    return Log(str(path), _rank_of(path), text.splitlines())


def _rank_of(path: Path) -> int | None:
    return next((int(found[1]) for pattern in _FILE if (found := pattern.search(str(path)))), None)


def time_of(line: str) -> datetime | None:
    """The time at which a line was written, if it begins with one of the usual forms."""
    head = line[:60]
    if found := re.search(r"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)", head):
        return _moment(*found.groups())
    if found := re.search(r"\b[IWEF](\d\d?)(\d\d) (\d\d):(\d\d):(\d\d)", head):  # glog's, which has no year
        return _moment("1999", *found.groups())
    return None


def _moment(*parts: str) -> datetime | None:
    try:
        _, *rest = map(int, parts)
        return datetime(2000, *rest)  # one job: the year says nothing, and some forms leave it out
    except ValueError:
        return None


# --- Who is there ----------------------------------------------------------------------------------


def with_sure_ranks(logs: list[Log]) -> list[Log]:
    """Take back ranks that were read from names of files, where they cannot be ranks.

    Numbers in the names of files may be rotations, nodes, or places on a node. They are ranks only if they begin at 0,
    there are several, and no two files of a kind have the same. A file that is called after its rank is believed.
    """
    unsure = [log for log in logs if log.rank is not None and not _FILE[0].search(log.name)]
    kinds = [
        (re.sub(r"\d+", "", Path(log.name).name), *re.findall(r"attempt_\d+", log.name), log.rank) for log in unsure
    ]
    ranks = {log.rank for log in unsure}
    if 0 in ranks and len(ranks) > 1 and len(set(kinds)) == len(kinds):
        return logs
    return [Log(log.name, None, log.lines) if log in unsure else log for log in logs]


def known_ranks(logs: list[Log]) -> set[int]:
    """All ranks that are known to be: those that have written a line or have a file, and those that must be below."""
    heard = {rank for log in logs for rank in {*log.ranks, log.rank} if rank is not None}
    return {*heard, *range(max(heard, default=-1) + 1), *range(world_size(logs) or 0)}


def unheard_ranks(logs: list[Log]) -> set[int]:
    """Those of a job of known size that have written nothing."""
    heard = {rank for log in logs for rank in {*log.ranks, log.rank} if rank is not None}
    return set(range(world_size(logs) or 0)) - heard if heard else set()


def world_size(logs: list[Log]) -> int | None:
    """How many ranks the job has, if its logs say it; the largest number, because groups of some ranks have one too."""
    text = "\n".join(log.text for log in logs)
    sizes = [int(next(filter(None, found.groups()))) for found in _WORLD.finditer(text)]
    nodes = max((int(found[1]) for found in _NODES.finditer(text)), default=1)
    sizes += [int(found[1]) * nodes for found in _PER_NODE.finditer(text)]
    return max(sizes, default=None)
