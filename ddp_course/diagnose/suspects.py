"""Which lines tell of a cause, or of an error of the program's own, and which of them came first?

A line is no suspect if its rank worked on after it. Of a chain of exceptions the first counts, because the others
follow from it; of a DataLoader worker's the last, because it stands in the worker's own traceback. Which of two ranks
failed first is said only where one file, or times that cannot be the clocks' difference, tell it.

Read next: `logs.py`, which weighs them against everything else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from ddp_course.diagnose import exits
from ddp_course.diagnose.causes import BETWEEN, CAUSES, ECHOES, EXCEPTION
from ddp_course.diagnose.log_lines import Log, shortened

SKEW = timedelta(seconds=1)  # times of two hosts that are nearer do not say which came first

_CHAINED = re.compile(r"(?:During handling of the above|The above) exception|^Exception ignored in")
_IN_WORKER = re.compile(r"Caught \w+ in (?:DataLoader worker process|replica)")
_DOTTED = re.compile(r"^(?P<error>(?:\w+\.)+[A-Z]\w*|StopIteration)(?:: (?P<words>.*)|:?$)")


@dataclass(frozen=True)
class Suspect:
    """A line that tells of a cause, or of an error of the program's own."""

    name: str
    cure: str
    rank: int | None
    log: Log
    number: int
    start: int  # of the words in the line
    order: int  # of its cause in the table

    @property
    def time(self) -> datetime | None:
        return self.log.times[self.number]

    @property
    def warns(self) -> bool:
        return bool(re.match(r"\[?W\d|\[W |\S*[Ww]arning:|WARN", self.log.bare[self.number]))


def known_causes(logs: list[Log]) -> Iterator[Suspect]:
    for log in logs:
        for number, (cause, match) in log.causes.items():
            if log.worked_on(number) if cause.name == "not-a-number" else log.lived_on(number):
                continue
            said = match.groupdict().get("rank")
            rank = None if cause.name in BETWEEN else int(said) if said else log.ranks[number]
            if cause.name == "stale-rendezvous" and int(match["came"]) < int(match["size"]):
                cause = next(each for each in CAUSES if each.name == "world-size")
            start = max(0, log.lines[number].find(match[0]))
            yield Suspect(cause.name, cause.cure, rank, log, number, start, CAUSES.index(cause))


def own_errors(logs: list[Log]) -> Iterator[Suspect]:
    """Exceptions of the program's own: the first of each chain; none that says that a peer is gone, or was caught."""
    for log in logs:
        for number, error, words in _exceptions(log):
            name = f"{error.rpartition('.')[2]}: {shortened(words)}".rstrip(": ")
            cure = "the program's own error: fix it on that rank; what other ranks say follows from it"
            yield Suspect(name, cure, log.ranks[number], log, number, 0, len(CAUSES))


def _exceptions(log: Log) -> Iterator[tuple[int, str, str]]:
    in_traceback: set[int | None] = set()
    chained: set[int | None] = set()
    in_worker: set[int | None] = set()
    for number, line in enumerate(log.bare):
        rank = log.ranks[number]
        if "Traceback (most recent call last)" in line:
            in_traceback.add(rank)
        elif _CHAINED.search(line):
            chained.add(rank)
        elif found := EXCEPTION.match(line) or (_DOTTED.match(line) if rank in in_traceback else None):
            in_traceback.discard(rank)
            if _IN_WORKER.search(line):  # the worker's own traceback follows
                in_worker.add(rank)
                continue
            follows = rank in chained and rank not in in_worker
            chained.discard(rank)
            in_worker.discard(rank)
            told = number in log.causes or found["error"] == "KeyboardInterrupt" or ECHOES.search(line)
            if not (follows or told or log.lived_on(number)):
                yield number, found["error"], found["words"] or ""


def earliest(suspects: list[Suspect], logs: list[Log], ends: Collection[exits.Exit]) -> tuple[Suspect, bool]:
    """The suspect that came first, and whether another rank's cannot have come before it."""
    names, ranks = {each.name for each in suspects}, {each.rank for each in suspects}
    if len(names) == 1 or len(ranks) == 1:
        return min(suspects, key=lambda each: (each.order, each.number)), True
    if len({each.log.name for each in suspects}) == 1:
        first = min(suspects, key=lambda each: each.number)
        root = next((each.rank for each in ends if each.root), first.rank)
        return first, root == first.rank or root not in ranks  # the launcher, too, saw this rank fail first
    if all(each.time for each in suspects):
        first = min(suspects, key=lambda each: each.time)
        rival = min(
            (each.time for each in suspects if each.name != first.name and each.rank != first.rank), default=None
        )
        echo = min(
            (log.times[n] for log in logs for n, line in enumerate(log.bare) if log.times[n] and ECHOES.search(line)),
            default=first.time,
        )
        skewed = echo < first.time  # an echo before every cause: the hosts' clocks differ
        return first, rival is None or (rival - first.time >= SKEW and not skewed)
    return min(suspects, key=lambda each: (each.order, each.number)), False
