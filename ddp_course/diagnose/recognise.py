"""What is behind this report?

Every failure of distributed training leaves words: ours, torch's, gloo's or NCCL's. `recognise` knows the words of
each fault, and takes from them the rank to blame. It is told nothing else, so it reads a report from last night's
log as well as one from this cell. Rules that need one sentence are in `SENTENCES`; those that compare ranks are
functions below it.

Left out on purpose: faults that leave no words, because training goes on and is only worse.
Read next: `faults/fault.py`, which provokes what is recognised here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp_course.diagnose.causes import CAUSES
from ddp_course.launcher import RankError, codes


@dataclass(frozen=True)
class Diagnosis:
    """What a tool found.

    Attributes:
        fault: its name in the catalogue; None when nothing was found to be wrong, or nothing known.
        rank: the rank to blame; None when it is not one rank's doing, or nothing says whose.
        evidence: the words or figures that decided.
        seconds: from the fault to the report.
        report: the whole report, if there was one.
    """

    fault: str | None
    rank: int | None
    evidence: str
    seconds: float = 0.0
    report: str = ""


def recognise(report: RankError | str) -> Diagnosis:
    """Name the fault behind a report, and the rank to blame.

    Args:
        report: what `launch` raised; or the text of a report, a traceback or a log, as of torchrun.
    Returns:
        What the first rule that fits says; the name is one of the catalogue's, or of `causes.py`. A fault of None means
        that the words do not tell; the evidence then says what is missing.
    """
    text = unfolded(f"{report.report}\n{report.log_line}" if isinstance(report, RankError) else report)
    facts = codes.found_in(text)
    for fault, rule in RULES:
        if found := rule(Said(text, facts)):
            return Diagnosis(fault, *found, report=text)
    for cause in CAUSES:
        if found := cause.match(text):
            own = raised(Said(text, facts))
            return Diagnosis(cause.name, own[0] if own else None, f"{found[0].strip()}: {cause.cure}", report=text)
    if found := raised(Said(text, facts)):
        return Diagnosis("one-rank-raises", *found, report=text)
    for pattern, hint in HINTS:
        if found := re.search(pattern, text):
            return Diagnosis(None, None, f"{found[0].strip()}: {hint}", report=text)
    return Diagnosis(None, None, "unknown: none of the words that faults leave is in it", report=text)


def unfolded(text: str) -> str:
    """Undo what makes a report readable: each rank's facts on one line, and no line broken."""
    prefix = r"\n(?:\[[^\]\n]*\]:?)?"  # torchrun may have written its own words before each line
    return re.sub(rf"{prefix} {{4,}}(?=\S)", " ", re.sub(rf"{prefix} {{10}}(?=\S)", "; ", text))


@dataclass(frozen=True)
class Said:
    """What a rule reads: a text, and the facts of our own report, if one is in it."""

    text: str
    facts: dict[str, Any]

    @property
    def code(self) -> str:
        return self.facts.get("code", "")


# What a rule returns: the rank to blame, and the words that decided.
Finding = tuple[int | None, str]
Rule = Callable[[Said], Finding | None]


# --- One sentence is enough ------------------------------------------------------------------------

# Fault, and the words that nothing else leaves. A group called rank names who is to blame; where there is one called
# raiser, it is the rank that raised it.
SENTENCES = (
    ("nccl-in-docker", r"NCCL WARN .*(/dev/shm/nccl|shared memory segment|posix_fallocate).*"),
    ("nccl-in-docker", r"No usable listening interface.*|No interface found in the same subnet.*"),
    ("forked-cuda", r"Cannot re-initialize CUDA in forked subprocess"),
    ("function-from-main", r"Can't get attribute '\w+' on <module '__(mp_)?main__'"),
    ("port-taken", r"rank (?P<rank>\d+): cannot listen on \S+ \(Address already in use\)"),
    ("port-taken", r"(?P<raiser>)(?:.*EADDRINUSE|[Aa]ddress already in use)"),
    ("world-size-mismatch", r"expected world size \d+, rank (?P<rank>\d+) has \d+"),
    ("rendezvous-unreachable", r"rank (?P<rank>\d+): no store answered at [^\s;]+"),
    ("rendezvous-unreachable", r"waited \S+ s for \d+ ranks; missing: (ranks? )?(?P<rank>\d+)"),
    ("rendezvous-unreachable", r"(?P<raiser>)The client socket has timed out after .*"),
    ("rendezvous-unreachable", r"waiting for clients\. \d+/\d+ clients joined"),
    ("rendezvous-unreachable", r"The connection to the C10d store has failed"),
    ("unused-parameters", r"Parameter indices which did not receive grad for rank (?P<rank>\d+): [\d ]*\d"),
    ("unused-parameters", r"Expected to have finished reduction in the prior iteration"),
    ("module-prefix", r"Missing key\(s\) in state_dict: \"module\.|Unexpected key\(s\) in state_dict: \"module\."),
)

# Words that several faults leave, and how to learn more.
HINTS = (
    (
        r"wait timeout after \w+, keys: \S+|waited \S+ s at the store for a key that no rank has set: \S*default_pg\S*",
        "a rank never signed in: not started, out of reach, or some rank counts more ranks than there are; meet by "
        "`groups.process_group`, which names it",
    ),
    (
        r"Timed out waiting \w+ for \w+ operation.*|Watchdog caught collective operation timeout.*"
        r"|Operation timed out after \d+ ms.*|Aborting process on rank \d+ due to timeout.*",
        "some rank did not join, and this does not say which: rehearse the program with `ddp-course rehearse`, or read "
        "the files of the Flight Recorder (lesson 12)",
    ),
    (
        r"Connection closed by peer.*|Connection reset by peer.*",
        "the peer named there died or closed first; the rank with no last word in its log is the first suspect",
    ),
)


def sentence(pattern: str, said: Said) -> Finding | None:
    """Fits wherever `pattern` occurs."""
    if not (found := re.search(pattern, said.text)):
        return None
    groups = found.groupdict()
    if "raiser" in groups and said.code == "raised":
        return said.facts["rank"], found[0].strip()
    return (int(groups["rank"]) if groups.get("rank") else None), found[0].strip()


# --- Where each rank was ---------------------------------------------------------------------------


def whereabouts(text: str) -> dict[int, str]:
    """The lines under "Where the ranks were", by rank."""
    _, _, lines = text.partition("Where the ranks were:")
    return {int(rank): line for rank, line in re.findall(r"^.*?\brank (\d+)  (.*)$", lines, re.M)}


def only_rank_0(words: str, said: Said) -> Finding | None:
    """A hang in which rank 0, and no other rank, is at a line that has to do with `words`."""
    hung = said.code in ("absent", "disagree", "sizes") or re.search(r"monitoredBarrier|Detected mismatch", said.text)
    at = {rank: re.sub(r"\s+#.*", "", line.rpartition(", in ")[2]) for rank, line in whereabouts(said.text).items()}
    there = [rank for rank, line in at.items() if re.search(words, line)]
    return (0, f"rank 0 alone was in {at[0]}") if hung and there == [0] else None


def waits_for_its_child(said: Said) -> Finding | None:
    """A rank over its limit, in a call that waits for a process that it has started itself."""
    waits = r"rank (\d+) was running; .*: (.*(?:\.apply|\.map|\.join|os\.waitpid|\.get)\(.*)"
    found = re.search(waits, said.text) if said.code == "limit" else None
    return (int(found[1]), f"rank {found[1]} waits for a process that it started: {found[2]}") if found else None


# --- Who called what -------------------------------------------------------------------------------


def calls_that_differ(text: str) -> dict[int, str]:
    """What each rank called, by rank, as torch's DETAIL mode lays calls side by side."""
    detail = re.findall(r"Rank (\d+) is running collective: \w+\(.*?OpType=(\w+(?:, TensorShape=\[[^\]]*\])?)", text)
    return {int(rank): call for rank, call in detail}


def odd_one_out(calls: dict[int, str]) -> int | None:
    """The one rank whose call differs, when all the others agree; of two ranks nobody can tell."""
    alone = [rank for rank, call in calls.items() if list(calls.values()).count(call) == 1]
    return alone[0] if len(alone) == 1 else None


def differing(same_operation: bool, said: Said) -> Finding | None:
    """Ranks whose calls differ: in the operation, or in the tensors that they bring to the same one."""
    ours = said.facts["calls"] if said.code in ("disagree", "sizes") and "calls" in said.facts else {}
    calls = {int(rank): call for rank, call in ours.items()} or calls_that_differ(said.text)
    operations = {re.split(r"[ ,]", call)[0] for call in calls.values()}
    if len(set(calls.values())) < 2 or (len(operations) == 1) != same_operation:
        return None
    return odd_one_out(calls), "; ".join(f"rank {rank} called {call}" for rank, call in calls.items())


# --- Who never came --------------------------------------------------------------------------------


def never_came(said: Said) -> Finding | None:
    """The rank that others waited for, or the one that waits alone, if the report can tell."""
    if said.code in ("absent", "uneven"):
        rank, call = said.facts["rank"], f"{said.facts.get('op', 'a call')} #{said.facts.get('number', '?')}"
        if str(rank) in said.facts.get("calls", {}):
            return rank, f"rank {rank} waited alone in {call}"
        return rank, f"{'some rank' if rank is None else f'rank {rank}'} never entered {call}"
    found = re.search(r"Ranks? (\d+)(?:, \d+)* failed to pass monitoredBarrier", said.text)
    return (int(found[1]), found[0]) if found else None


def came_no_more(said: Said) -> Finding | None:
    """Ranks that wait in DDP's backward pass for one that has left the loop."""
    found, at = never_came(said), whereabouts(said.text)
    waits = any(".backward(" in line for rank, line in at.items() if found and rank != found[0])
    if found and waits and "had returned" in at.get(found[0], ""):
        return found[0], f"{found[1]}: it had returned while others were in backward"
    return None


def raised(said: Said) -> Finding | None:
    """A rank that failed for a reason of its own, in our report, or in torchrun's or mp.spawn's."""
    if said.code == "raised":
        error = said.facts.get("error", "")
        echo = any(re.search(pattern, error) for pattern, _ in HINTS)  # of another rank's trouble
        return None if echo else (said.facts["rank"], f"rank {said.facts['rank']} raised {error}")
    torchrun = r"Root Cause \(first observed failure\):(?:.|\n)*?rank\s*: (\d+)"
    spawned = r"-- Process (\d+) terminated with the following error"
    found = re.search(rf"{torchrun}|{spawned}", said.text)
    return (int(found[found.lastindex]), " ".join(found[0].split())) if found else None


RULES: tuple[tuple[str, Rule], ...] = (
    *((fault, partial(sentence, pattern)) for fault, pattern in SENTENCES),
    ("rank0-only-validation", partial(only_rank_0, r"valid|eval")),
    ("rank0-only-save", partial(only_rank_0, r"save|checkpoint")),
    ("collective-shape", partial(differing, True)),
    ("collective-order", partial(differing, False)),
    ("uneven-inputs", came_no_more),
    ("skipped-collective", never_came),
    ("forked-cuda", waits_for_its_child),
)
