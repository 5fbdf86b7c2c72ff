"""What happens on the ranks in one round of an exercise?

Each rank goes through the cases in turn, calls what the learner wrote, and notes the result and the collectives. All
ranks end a case before one begins the next; else a rank that skips a collective would meet the others' with the first
one of its next case, and the learner would read about that.

Read next: `../differential.py`, which compares the notes.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.answer.isolated import Answer, plain
from ddp_course.grading.exercise import AnswerFailed, Fault
from ddp_course.grading.vocabulary import observe
from ddp_course.launcher.failure import describe

LATE_S, MOST_LATE = 0.005, 40  # how late a rank is at a collective, and how many of a case's calls are delayed
MEET_S = 4.0  # for the other ranks to end a case; less than the 5 s that a collective of theirs may wait

Act = Callable[[Callable, Any, int, int], Any]  # (function, case, rank, world_size) -> result, or a `Note`


@dataclass(frozen=True)
class Round:
    """Named cases on so many ranks, in one run.

    Args:
        cases: pairs of a name and whatever `act` understands; cases may share a name. A case travels to the ranks.
        raises: errors that are an answer, too; any other one fails all checks that look at a case of the round.
        ends: a pattern of what is said where the round may fail; then all that is noted of each rank is "ended", the
            fault.
        init: whether the ranks have a process group.
        fresh: on processes of its own, for what kept ranks cannot give: signals, exits, a rendezvous.
    """

    world_size: int
    cases: Sequence[tuple[str, Any]]
    raises: tuple[type[Exception], ...] = ()
    init: bool = True
    fresh: bool = False
    ends: str = ""


class Note(dict):
    """What an `act` has to tell beside, or instead of, a plain result."""


@dataclass(frozen=True)
class Seen:
    """What one rank did with one case: its notes by name; `everyone` has those of all ranks.

    There are "value", the plain result unless `act` gave a `Note`; "calls", the collectives, and apart from them
    "barriers"; "given_changed", whether the case itself is another one afterwards; and, of an error that is an answer,
    "error", its type, "kinds", this and what it is derived from, "message", and "story", the learner's lines.
    """

    case: Any
    rank: int
    everyone: list[Note]

    def __getitem__(self, name: str) -> Any:
        return self.everyone[self.rank].get(name)

    @property
    def world_size(self) -> int:
        """How many ranks took part."""
        return len(self.everyone)

    def of(self, rank: int) -> Seen:
        """The same case on another rank."""
        return Seen(self.case, rank, self.everyone)


def played(answer: Answer, act: Act, chosen: Round) -> dict[str, list[Seen]]:
    """Run a round; return by the cases' names what each rank did.

    Raises:
        AnswerFailed: as `Answer.run`; also when a rank came too late to the end of a case, and was not waited for.
    """
    cases = [case for _, case in chosen.cases]
    call = (act, cases, chosen.raises, f"ddp_course/{uuid.uuid4()}")
    try:
        by_rank = answer.run(_play, chosen.world_size, *call, init=chosen.init, fresh=chosen.fresh)
    except AnswerFailed as failed:
        if not chosen.ends or not re.search(chosen.ends, failed.fault.report or failed.fault.expected):
            raise
        by_rank = [[Note(ended=failed.fault) for _ in cases]] * chosen.world_size
    if any(len(notes) < len(cases) for notes in by_rank):
        cause = "the ranks ended a call more than 4 s apart; if the machine is very busy, run the check again"
        raise AnswerFailed(Fault(f"{len(cases)} calls on each rank", "some ranks were late", cause=cause))
    seen: dict[str, list[Seen]] = {}
    for (name, case), everyone in zip(chosen.cases, zip(*by_rank, strict=True), strict=True):
        seen.setdefault(name, []).extend(Seen(case, rank, list(everyone)) for rank in range(chosen.world_size))
    return seen


def _play(
    rank: int, world_size: int, function: Callable, act: Act, cases: Sequence, raises: tuple, meeting: str
) -> list[Note]:
    store = c10d._get_default_store() if dist.is_initialized() else None  # the answer may end the group
    notes = []
    for number, case in enumerate(cases):
        with observe.Collectives() as seen:
            seen.on_call = lambda seen=seen: _late_in_turn(len(seen.calls), rank, world_size)
            before = cloudpickle.dumps(case)
            note = _noted(lambda case=case: act(function, case, rank, world_size), raises)
        barriers = [call for call in seen.calls if call.op == "barrier"]
        note = Note({"given_changed": cloudpickle.dumps(case) != before}, **note, calls=seen.talks, barriers=barriers)
        notes.append(note)
        if store and len(cases) > 1 and not _all_came(store, rank, world_size, f"{meeting}/{number}"):
            break
    return notes


def _noted(call: Callable[[], Any], raises: tuple) -> Note:
    try:
        result = call()
    except raises as error:
        if isinstance(error, NotImplementedError):  # not written yet, which is no answer
            raise
        kinds = [kind.__name__ for kind in type(error).__mro__]  # a subclass of the error asked for is one
        result = Note(error=kinds[0], kinds=kinds, message=str(error), story=describe(error, 0).story)
    return result if isinstance(result, Note) else Note(value=plain(result))


def _late_in_turn(calls: int, rank: int, world_size: int) -> None:
    """Let each rank be the last to enter a collective, in turn: whoever reads before the wait reads something else."""
    if calls % world_size == rank and calls <= MOST_LATE:
        time.sleep(LATE_S)


def _all_came(store: dist.Store, rank: int, world_size: int, meeting: str) -> bool:
    left, came = f"{meeting}/left", [f"{meeting}/{other}" for other in range(world_size)]
    store.set(came[rank], "came")
    deadline = time.monotonic() + MEET_S
    while not store.check([left]):  # once one has left, all do
        if store.check(came):
            return True
        if time.monotonic() > deadline:
            store.set(left, str(rank))
        time.sleep(0.002)
    return False
