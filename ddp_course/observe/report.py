"""What is said of ranks that were watched from outside?

The same as of the ranks of `launch`: what torch's Flight Recorder has noted is turned into the same facts, and the same
functions find out who keeps whom waiting. Less is known here, so more often nobody is blamed: calls have no reduction
and no root, gloo's messages are seen only while the main thread is in them, and the calls of a process that was killed
are gone with it.

Read next: `launcher/wait_graph.py` and `launcher/hang_report.py`.
"""

from __future__ import annotations

import linecache
import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_course.diagnose.flight import number_of
from ddp_course.launcher import failure_report, hang_report, wait_graph
from ddp_course.launcher.failure import Failure, in_short, own_story, tells_of_talking
from ddp_course.launcher.failure_report import RankError
from ddp_course.launcher.lines import Line, line_in_dump
from ddp_course.launcher.rank_status import MESSAGES, Collective, Whereabouts, listed_ranks
from ddp_course.observe.watch import Process, Watch

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
           "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (.+)')
_TRACEBACK = "Traceback (most recent call last):"
_OF_TALKING = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError")  # torch's
_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_WAITS = re.compile(r"\bwait\(|\b(?:send|recv)|store\b|monitored_barrier")  # for some rank that nothing shows
_NOT_SEEN = (
    "Who is wrong cannot be told: not all that this rank does is seen. Messages of gloo, and waits at the store, never "
    "are."
)


def hung(watch: Watch) -> RankError:
    """Nothing moves, or a rank waits: say who keeps whom waiting, or that it cannot be told."""
    ranks, limit_s = _all_ranks(watch), watch.limit_s
    if not watch.all_seen():
        here = listed_ranks(watch.ranks())
        text = f"no rank that is seen here, {here}, has moved for {limit_s:g} s; run the same on each machine"
        return RankError("stuck", None, text, ranks)
    if not wait_graph.find_difference(ranks) and not any(w.waiting_in for w in ranks if w.status != "returned"):
        left = [w for w in ranks if w.status not in ("returned", "died")]
        who = listed_ranks([w.rank for w in left])
        text = f"{who} stood still for {limit_s:g} s, and the Flight Recorder shows no rank that waits"
        text += "".join(f"\n  rank {w.rank} was at {w.line}" for w in left if w.line)
        alone = left[0].rank if len(left) == 1 and not _waits(left[0]) else None
        return _told(RankError("stuck", alone, text, ranks))
    return _told(hang_report.explain(limit_s, ranks))


def failed(watch: Watch) -> RankError | None:
    """Say which rank failed first, if one did, and where the others were."""
    ranks, seen = _all_ranks(watch), watch.ranks()
    by_pid = {each.pid: rank for rank, each in seen.items()}
    raised = [_failure(each, each.rank) for each in seen.values() if each.raised]
    for each in watch.processes:  # what a parent tells of a rank that torch's spawn started
        told = each.raised if each.rank is None else None
        if told and told["child"] in by_pid and "ProcessRaisedException" in told["kinds"]:
            raised.append(_failure(each, by_pid[told["child"]]))
    for failure in raised:
        _mark(ranks, failure)
    dead = sorted((each for each in seen.values() if each.died and not each.raised), key=lambda each: each.order)
    dead = [each for each in dead if each.rank not in {failure.rank for failure in raised}]
    first = min((each.order for each in seen.values() if each.died or each.raised), default=0.0)
    own = [each for each in dead if each.code not in (1, -signal.SIGABRT, -signal.SIGTERM) and each.order < first + 1]
    if own and not any(not f.talking and seen[f.rank].order < own[0].order for f in raised):
        return _told(failure_report.died(own[0].rank, own[0].code, ranks))
    if raised:
        return _told(hang_report.explain(watch.limit_s, ranks, raised) if watch.all_seen() else
                     failure_report.failed(min(raised, key=lambda f: f.talking), ranks))  # fmt: skip
    if not dead:
        return None
    code = dead[0].code or 0
    how = f"with exit status {code}" if code > 0 else f"by {failure_report.signal_name(-code)}" if code else "unseen"
    text = (
        f"rank {dead[0].rank} of {len(ranks)} was the first to end, {how}; its own words are in its output\n"
        "It may have followed another: gloo and NCCL abort a rank that has waited too long, or whose peer brought a "
        "tensor of another size, and a program that catches such an error may end by itself."
    )
    return _told(RankError("died", None, text, ranks))


def _mark(ranks: list[Whereabouts], failure: Failure) -> None:
    """Note in a rank's whereabouts what it raised."""
    for w in (w for w in ranks if w.rank == failure.rank):
        w.status, w.line, w.detail = "raised", failure.line, "" if failure.talking else failure.error_type
        if failure.talking and w.recent and w.recent[-1].op not in MESSAGES:  # gloo forgets a call that has failed
            w.recent[-1] = replace(w.recent[-1], finished=False)


def _told(error: RankError) -> RankError:
    """Take back an accusation of a rank that itself waits for something that is not seen; name our own option."""
    words = re.sub(r"(rank\s+was\s+only\s+slow,\s+raise\s+)timeout_s", r"\1--limit", str(error))  # not in the program's
    blamed = next((w for w in error.ranks if w.rank == error.rank), None)
    unseen = blamed and (blamed.oddities or _waits(blamed) or blamed.status == "silent" and not blamed.line)
    if error.code == "absent" and unseen:
        error = RankError(error.code, None, f"{words}\n{_NOT_SEEN}", error.ranks, calls=error.calls)
    else:
        error.args = (words,)
    return error


def _waits(w: Whereabouts) -> bool:
    return bool(w.line and _WAITS.search(w.line.source))


# --- From what processes told to what the launcher's functions read -------------------------------------


def _all_ranks(watch: Watch) -> list[Whereabouts]:
    seen = watch.ranks()
    world = max([*(each.world or 0 for each in seen.values()), *(rank + 1 for rank in seen)], default=0)
    unseen = [Whereabouts(rank, "silent", oddities=[("is not seen here", None)]) for rank in range(world)]
    return same_size([whereabouts(seen[w.rank], watch.folder) if w.rank in seen else w for w in unseen])


def same_size(ranks: list[Whereabouts]) -> list[Whereabouts]:
    """Forget the sizes and dtypes of calls that all have finished: where they differed, that was allowed."""
    open_ = {(call.channel, call.seq) for w in ranks for call in w.recent if not call.finished}
    for w in ranks:
        done = [(call.channel, call.seq) not in open_ for call in w.recent]
        w.recent = [replace(c, sizes=(), dtype="") if d else c for c, d in zip(w.recent, done, strict=True)]
    return ranks


def whereabouts(process: Process, folder: Path) -> Whereabouts:
    """What one rank was doing when it was asked, or ended."""
    told, rank = process.told, process.rank
    found = Whereabouts(rank, "running", _line(told.get("line")))
    if process.ended and not process.died:
        found.status, found.line = "returned", None
    elif process.code == -signal.SIGTERM and not told:
        found.status, found.detail = "died", "was ended by SIGTERM, as launchers do after a failure"
    elif process.ended and process.code != -signal.SIGTERM:
        found.status, found.detail = "died", f"died: {failure_report.why_died(process.code)}"
    elif not told:
        found.status = "silent"
    if not told.get("recorder", True):
        found.oddities.append(("has a torch that records no calls", None))
    if told.get("unknown"):
        found.oddities.append((f"could not tell all of itself: {told['unknown']}", None))
    stacks = folder / f"{process.pid}.stack"
    if (found.status == "silent" or process.ended and not told) and stacks.exists():
        found.line = line_in_dump(stacks.read_text())
    world = tuple(range(process.world or 1))
    calls = [call for each in batched(told.get("made", [])) if (call := collective(each, told["groups"], rank, world))]
    if (pending := _pending(told.get("pending"), rank, world)) and not any(c.op in MESSAGES for c in calls):
        calls.append(pending)
    found.recent = [c if c.line or c.finished else replace(c, line=found.line) for c in calls]
    for call in calls:
        found.entered[call.channel] = max(call.seq, found.entered.get(call.channel, 0))
        found.members[call.channel] = call.members
    return found


def batched(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the messages of one `batch_isend_irecv` the state of the whole: NCCL's recorder follows that alone."""

    def key(call: dict[str, Any]) -> tuple:
        return *call["process_group"], call.get("collective_seq_id"), call.get("p2p_seq_id")

    whole = {key(call): call for call in made if call["profiling_name"] == "nccl:coalesced"}
    same = [(call, whole.get(key(call), call)) for call in made]
    return [call | {"state": of["state"], "retired": of["retired"]} if call["is_p2p"] else call for call, of in same]


def collective(
    call: dict[str, Any], groups: dict[str, list[int]], rank: int, world: Sequence[int]
) -> Collective | None:
    """One entry of a Flight Recorder; None for a message that is complete, or a group of which nothing is known."""
    name, description = call["process_group"]
    members = tuple(groups[name]) if name in groups else world if description == "default_pg" else ()
    operation = str(call["profiling_name"]).rpartition(":")[2]
    finished = call["retired"] or call["state"] == "completed"
    dtypes = call["input_dtypes"]
    known = len(set(dtypes)) == 1 and dtypes[0] in _DTYPES
    same: dict[str, Any] = {
        "group": "" if description == "default_pg" else f"subgroup {name[:8]}",
        "dtype": _DTYPES[dtypes[0]] if known else "",
        "sizes": tuple(map(tuple, call["input_sizes"])) if known else (),
        "finished": finished,
        "entered_ns": call["time_created_ns"],
        "line": _line(call.get("at")),
    }
    message = _MESSAGE.match(operation)
    if message and max(int(message[2]), int(message[3])) < len(members):
        a, b = members[int(message[2])], members[int(message[3])]
        ends = (a, b) if message[1] == "send" else (b, a)
        return None if finished else Collective(0, 1, message[1], members=ends, **same)
    number = number_of(call)
    if message or call["is_p2p"] or number is None or rank not in members:
        return None
    return Collective(number, number, operation, members=members, **same)


def _pending(told: dict[str, Any] | None, rank: int, world: tuple[int, ...]) -> Collective | None:
    """What the main thread is in and no recorder shows: the meeting of all ranks, or a message of gloo."""
    if not told or told.get("peer", rank) is None:
        return None
    peer = told.get("peer")
    members = world if peer is None else (rank, peer) if told["op"] == "send" else (peer, rank)
    return Collective(0, 1, told["op"], "", (), "", members, False, 0, tag=told.get("tag", 0))


def _failure(process: Process, rank: int) -> Failure:
    """An exception that ended a process, or, as torch's spawn tells in the process that called it, one of its ranks."""
    said = process.raised
    kind, text, at, frames = said["kinds"][0], said["text"], said["at"], said["frames"]
    kinds = [*said["kinds"]]
    if said["child"]:
        found, kind, text = _shown(text)
        frames = [(*frame, linecache.getline(frame[0], int(frame[1])).strip()) for frame in found]
        frames = [frame for frame in frames if "site-packages" not in frame[0]]
        at = frames[-1] if frames else None
        kinds += [kind] + ["DistError"] * (kind in _OF_TALKING)
    stack = traceback.StackSummary.from_list(
        [traceback.FrameSummary(name, int(number), function, line=source) for name, number, function, source in frames]
    )
    story = "\n".join([*own_story(stack), in_short(f"{kind}: {text}")])
    return Failure(rank, kind, text, story, said["shown"], tells_of_talking(kinds, text), _line(at))


def _shown(traceback: str) -> tuple[list[tuple[str, str, str]], str, str]:
    """The frames, the type without its module, and the text of the last exception in a traceback as Python shows it."""
    lines = traceback.strip().splitlines()
    last = max((number for number, line in enumerate(lines) if line == _TRACEBACK), default=-1)
    end = next((n for n in range(last + 1, len(lines)) if not lines[n].startswith(" ")), len(lines))
    kind, _, text = "\n".join(lines[end:]).partition(": ")
    if not re.fullmatch(r"[\w.<>]+", kind):  # an exception without a text, but with notes
        kind, _, text = "\n".join(lines[end:]).partition("\n")
    return _FRAME.findall("\n".join(lines[last + 1 : end])), kind.rpartition(".")[2], text


def _line(told: Sequence[Any] | None) -> Line | None:
    return Line(told[0], int(told[1]), *told[2:]) if told else None
