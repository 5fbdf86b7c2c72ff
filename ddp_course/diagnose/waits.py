"""Ranks gave up waiting: who did not join, or who called something else?

NCCL's watchdog says in which call each rank waited, with the call's number in its group and its sizes, and how many calls
each rank has made. gloo's time-outs say neither; of them it is known only who says nothing. A rank is blamed only where
the others' words leave nobody else.

Read next: `logs.py`, which looks for causes first.
"""

# ruff: noqa: E501  (words that are looked for stay whole)
from __future__ import annotations

import re
from dataclasses import dataclass

from ddp_course.diagnose.log_lines import Log, known_ranks
from ddp_course.launcher.rank_status import listed_ranks

_WHO = re.compile(
    r"\[(?:PG (?:ID )?(?P<pg>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))?(?: ?\((?P<desc>[^)]*)\))? )?Rank (?P<member>\d+)\]"
)
_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<given>\d+), NumelOut=(?P<got>\d+)|, TensorShape=(?P<shape>\[[^\]]*\]))?"
)
_COUNTS = re.compile(r"[Ll]ast enqueued (?:\w+ )?work: (?P<last>-?\d+)")
_AT_WORK = re.compile(r"[Ww]ork(?: sequence id)?: (\d+)")
_NOT_JOINED = re.compile(
    r"\[(?P<a>[\d, ]+)\] finished collective #\d+, but didn't join collective #(?P<number>\d+)"
    r"|ranks? \[(?P<b>[\d, ]+)\] are the lagging ranks|Ranks? (?P<c>\d+(?:, \d+)*) failed to pass monitoredBarrier"
)
_NO_ID = re.compile(
    r"\[(\d+)\] is setting up NCCL communicator and ret\w+ ncclUniqueId from \[0\].*?(?:[Tt]ime ?out|wait timeout)"
)
_TIMED_OUT = re.compile(
    r"Timed out waiting \w+ for (\w+) operation|Watchdog caught collective operation timeout|timed out in monitoredBarrier"
    r"|Socket Timeout|[Ww]ait timeout after|Timed out initializing process group|watchdog got stuck|Timeout waiting for key"
    r"|Operation timed out after \d+ ms|timeout watchdog detected operation timeout"
)
LOST = re.compile(
    r"Connection (?:was )?(?:closed|reset) by (?:remote )?peer|Broken pipe|remote process exited|ncclRemoteError|Socket closed"
    r"|failed to recv, got 0 bytes|Connection reset by peer"
)
# Members of a group may give or get different amounts in these.
_UNEVEN = re.compile(r"ALLTOALL|GATHER$|SCATTER$|SEND|RECV|COALESCED|UNKNOWN", re.I)
_ALL_EQUAL = re.compile(r"ALL_?GATHER|REDUCE_?SCATTER", re.I)
_MESSAGES = ("SEND", "RECV")
_ALL = "look at its branches on the rank, its number of batches, and exceptions that were caught"


@dataclass(frozen=True)
class Wait:
    """The call in which a rank waited when its patience ended."""

    seq: int | None  # of the call in its group
    op: str
    sizes: str  # what it gave and got; "" if these may differ between ranks

    def __str__(self) -> str:
        return f"{self.op} of {self.sizes}" if self.sizes else self.op


@dataclass(frozen=True)
class Waiting:
    """What is known of ranks that waited.

    Attributes:
        cause: "hang", or "mismatched-calls".
        rank: to blame; None if the words do not tell.
    """

    cause: str
    rank: int | None
    evidence: str
    cure: str
    collective: str = ""


def waiting(logs: list[Log]) -> Waiting | None:
    """Say who did not join a call in which others waited, or whose call was another; None if nobody timed out."""
    for log in logs:
        for number, line in enumerate(log.lines):
            if found := _NOT_JOINED.search(line):
                names = found["a"] or found["b"] or found["c"]
                return _absent({int(rank) for rank in names.split(",")}, log.place(number, found.start()), "")
    groups, counts = _by_group(logs)
    if groups:
        name = max(groups, key=lambda name: len(groups[name]))  # a group that waits for another is not in its call
        return _in_group(groups[name], counts.get(name, {}), logs, set(groups) == {"0"})
    return _without_numbers(logs)


def _by_group(logs: list[Log]) -> tuple[dict[str, dict[int, Wait]], dict[str, dict[int, int]]]:
    """The first call in which each rank gave up, and the last that each has made, by rank, for each group."""
    waits: dict[str, dict[int, Wait]] = {}
    counts: dict[str, dict[int, int]] = {}
    nameless: list[tuple[int, Wait]] = []
    for log in logs:
        for number, line in enumerate(log.lines):
            timed_out, counted = _WATCHDOG.search(line), _COUNTS.search(line)
            rank, group = _who(log, number) if timed_out or counted else (None, None)
            if rank is None:
                continue
            if timed_out and group is None:
                nameless.append((rank, _wait(timed_out)))
            elif timed_out:
                waits.setdefault(group, {}).setdefault(rank, _wait(timed_out))
            else:
                counts.setdefault(group or "0", {}).setdefault(rank, int(counted["last"]))
                at = _AT_WORK.search(line)  # "at work: 7": it is in this group that the rank gave up in its call 7
                for each in [each for each in nameless if at and each[0] == rank and each[1].seq == int(at[1])]:
                    nameless.remove(each)
                    waits.setdefault(group or "0", {}).setdefault(rank, each[1])
    for rank, wait in nameless:
        waits.setdefault("0", {}).setdefault(rank, wait)
    return waits, counts


def _wait(found: re.Match) -> Wait:
    uneven = _UNEVEN.search(found["op"]) and not _ALL_EQUAL.search(found["op"])
    sizes = "" if uneven else found["shape"] or ""
    if found["given"] and not uneven:
        sizes = f"{' to '.join(dict.fromkeys((found['given'], found['got'])))} elements"
    return Wait(int(found["seq"]) if found["seq"] else None, found["op"], sizes)


def _who(log: Log, number: int) -> tuple[int | None, str | None]:
    """The rank that speaks, and its group; a member's number in a group of some ranks is not its rank."""
    found = _WHO.search(log.lines[number])
    if not found:
        return log.ranks[number], None
    group = found["guid"] or found["pg"]
    default = group in (None, "0") and found["desc"] in (None, "default_pg")
    rank = log.ranks[number]
    return (int(found["member"]) if rank is None and default else rank), group


def _in_group(waits: dict[int, Wait], counts: dict[int, int], logs: list[Log], all_ranks: bool) -> Waiting:
    numbers = {wait.seq for wait in waits.values() if wait.seq is not None}
    seq = min(numbers, default=None)
    here = {rank: wait for rank, wait in waits.items() if wait.seq == seq}
    collective = f"{next(iter(here.values())).op}{'' if seq is None else f' #{seq}'}"
    said = f"call {seq}: " if seq is not None else ""
    said += "; ".join(f"{listed_ranks(ranks)} in {what}" for what, ranks in _sides(here).items())
    for number in sorted(numbers - {seq}):
        later = {rank: wait for rank, wait in waits.items() if wait.seq == number}
        said += f"; call {number}: " + "; ".join(f"{listed_ranks(r)} in {what}" for what, r in _sides(later).items())
    if counts:
        said += "; last call of each: " + ", ".join(f"rank {r} {n}" for r, n in sorted(counts.items()))
    messages = any(wait.op in _MESSAGES for wait in waits.values())
    behind = {rank for rank, last in counts.items() if seq is not None and last < seq}
    if behind and not messages:
        return _absent(behind, said, collective)
    sides = _sides(here)
    if len(sides) > 1 and seq is not None and not messages:
        alone = [ranks[0] for ranks in sides.values() if len(ranks) == 1]
        odd = alone[0] if len(sides) == 2 and len(alone) == 1 and len(here) > 2 else None
        ops = {wait.op for wait in here.values()}
        what = "different operations" if len(ops) > 1 else "tensors of different sizes"
        cure = (
            f"these ranks meet in one call with {what}: {' against '.join(map(listed_ranks, sides.values()))}; find where "
            "their paths part before this call (TORCH_DISTRIBUTED_DEBUG=DETAIL shows the line)"
        )
        return Waiting("mismatched-calls", odd, said, cure, collective)
    silent = known_ranks(logs) - waits.keys() - counts.keys()
    if silent and not messages and all_ranks:
        return _absent(silent, f"{said}; nothing is heard from {listed_ranks(silent)}", collective, heard=False)
    if len(numbers) > 1:
        cure = "the ranks are out of step: compare what they called before (Flight Recorder: TORCH_FR_BUFFER_SIZE=2000)"
    elif messages:
        cure = "a message that its peer never sent or received: compare the order of send and recv on both sides"
    else:
        cure = (
            "no rank is known to be missing from this call: a slow rank, the network (NCCL_DEBUG=INFO), a GPU that stands "
            "still (dmesg: Xid), or a rank whose log is not here"
        )
    return Waiting("hang", None, said, cure, collective)


def _sides(waits: dict[int, Wait]) -> dict[str, list[int]]:
    sides: dict[str, list[int]] = {}
    for rank, wait in sorted(waits.items()):
        sides.setdefault(str(wait), []).append(rank)
    return sides


def _absent(ranks: set[int], evidence: str, collective: str, heard: bool = True) -> Waiting:
    """Others waited for these."""
    if len(ranks) == 1:
        rank = next(iter(ranks))
        why = _ALL if heard else f"{_ALL}; if it is dead, at the kernel's log of its host"
        return Waiting(
            "hang", rank, evidence, f"rank {rank} never entered this call, or was too late: {why}", collective
        )
    who = listed_ranks(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return Waiting("hang", None, evidence, f"{who} did not join: begin with their logs, and {_ALL}", collective)


def _without_numbers(logs: list[Log]) -> Waiting | None:
    """Time-outs that do not say in which call: gloo's, and the store's."""
    late = [(log, n, found) for log in logs for n, line in enumerate(log.lines) if (found := _TIMED_OUT.search(line))]
    late = [each for each in late if not each[0].lived_on(each[1])]
    if not late:
        return None
    log, number, found = late[0]
    evidence, operation = log.place(number, found.start()), found[1] or ""
    asking = {int(found[1]) for each in logs for found in _NO_ID.finditer(each.text)}
    if asking and 0 not in asking and len(asking) > 1:
        return _absent({0}, f"{evidence}; {listed_ranks(asking)} waited for the key that rank 0 sets", "the first call")
    if "stuck" in found[0]:
        cure = (
            "a call of CUDA or NCCL did not return, or the GIL was held: py-spy dump --pid on each rank, dmesg for Xid"
        )
        return Waiting("hang", None, evidence, cure)
    silent = silent_ranks(logs)
    if len(silent) == 1 and len(known_ranks(logs)) > 1:
        return _absent(silent, f"{evidence}; of rank {min(silent)} no such line", operation, heard=False)
    cure = (
        "some rank did not join, and these words do not say which: see which log ends first; run again with "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL, or read the files of the Flight Recorder (lesson 12)"
    )
    return Waiting("hang", None, evidence, cure, operation)


def silent_ranks(logs: list[Log]) -> set[int]:
    """Those of the known ranks that speak neither of a time-out nor of a lost peer."""
    speak = {
        rank
        for each in logs
        for rank, line in zip(each.ranks, each.lines, strict=True)
        if rank is not None and (_TIMED_OUT.search(line) or LOST.search(line))
    }
    return known_ranks(logs) - speak if speak else set()
