"""With whom does a rank talk, and how many bytes does it bring?

Messages and collectives pass torch's dispatcher alike. A message is noted with its peer; a collective with the bytes
that the rank brings, which for a gather is its own part, not the memory that it provides for those of the others.
Read next: `gather_rows.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.grading.exercise import AnswerFailed, Fault
from ddp_course.grading.isolated import Answer
from ddp_course.grading.observe import Collectives

MEET_S = 4.0  # for the other ranks to end a case; less than the 5 s that a collective of theirs may wait

MESSAGES = ("send", "recv", "recv_any_source")


@dataclass(frozen=True)
class Entry:
    """One message or collective, as a rank entered it."""

    op: str  # "send", "recv", "allreduce", ...
    ranks: tuple[int, ...]  # of the group, as numbered in the default group
    n_bytes: int  # that this rank brings; nothing where it only receives
    peer: int | None = None  # of a message, as numbered in the default group


class Traffic(Collectives):
    """Within the `with` block, note every message and every collective of this thread in `entries`."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for call in self.calls[before:]:
            peer = _peer(args, call.ranks) if call.op in ("send", "recv") else None
            n_bytes = 0 if call.op.startswith("recv") else _brought(args)
            self.entries.append(Entry(call.op, call.ranks, n_bytes, peer))
        return result


def _peer(args: tuple, ranks: tuple[int, ...]) -> int:
    """Return the other side of a message: the first number after the tensors and the group."""
    return ranks[next(arg for arg in args if isinstance(arg, int))]


def _brought(args: tuple) -> int:
    """Return the bytes of what goes in: an operator with two arguments of tensors names the results first."""
    given = [arg for arg in args if isinstance(arg, torch.Tensor | list) and _n_bytes(arg) is not None]
    return _n_bytes(given[min(1, len(given) - 1)]) if given else 0


def _n_bytes(value: object) -> int | None:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if not isinstance(value, list):
        return None
    sizes = [_n_bytes(item) for item in value]
    return None if None in sizes else sum(sizes)


def told(entries: list[Entry]) -> list[tuple]:
    """Return the entries as plain data; barriers, which move nothing, are left out."""
    return [(e.op, e.ranks, e.n_bytes, e.peer) for e in entries if e.op != "barrier"]


def right_and_left(rank: int, world_size: int) -> set[int]:
    """Return a rank's neighbours in a ring."""
    return {(rank + 1) % world_size, (rank - 1) % world_size}


# --- Several cases in one launch ---------------------------------------------------------------------


def each_case(rank: int, world_size: int, path: str, cases: list, look: Callable[[Any], dict]) -> list[dict]:
    """Return `look(case)` for each case; all ranks end a case before one begins the next.

    Else a rank that skips a collective in one case would meet the others' with its first of the next case, and the
    learner would read about that. Who waits in vain returns, as if there were no more cases.

    Args:
        path: of a file for the grader's own store; fresh for each run, the same on all ranks.
    """
    store, notes = dist.FileStore(path, world_size), []
    for number, case in enumerate(cases):
        notes.append(look(case))
        if not _all_came(store, rank, world_size, number):
            break
    return notes


def _all_came(store: dist.Store, rank: int, world_size: int, number: int) -> bool:
    left, came = f"{number}/left", [f"{number}/{other}" for other in range(world_size)]
    store.set(came[rank], "came")
    deadline = time.monotonic() + MEET_S
    while not store.check([left]):  # once one has left, all do
        if store.check(came):
            return True
        if time.monotonic() > deadline:
            store.set(left, str(rank))
        time.sleep(0.002)
    return False


def run_cases(answer: Answer, driver: Callable, world_size: int, cases: list) -> list[list[dict]]:
    """Run the driver on all cases; return for each rank a note on each case.

    Raises:
        AnswerFailed: as `Answer.run`; also when a rank came too late to the end of a case, and was not waited for.
    """
    with tempfile.TemporaryDirectory() as folder:
        by_rank = answer.run(driver, world_size, f"{folder}/meet", cases, init=True)
    if any(len(notes) < len(cases) for notes in by_rank):
        cause = "the ranks ended a call more than 4 s apart; if the machine is very busy, run the check again"
        raise AnswerFailed(Fault(f"{len(cases)} calls on each rank", "some ranks were late", cause=cause))
    return by_rank
