"""15.1 `train_until_told(rank, world_size, run)`: do all ranks leave at the same step, though one was told?

The signals are real: the run sends SIGTERM to its own process in the middle of a step, or while the ranks agree.
Before each step, save and return the ranks meet at a store of the judge's, where a rank that goes another way than
the others is seen at once, and not by a hang.

Read next: `resume.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

INSIDE_S = 0.05  # after which the signal comes to a rank that waits
MEET_S = 4.0  # for the other ranks to come to the next step, save or return
STATUS = 128 + signal.SIGTERM
ALIKE, HANDLER = "all ranks do the same", "a handler that sets a flag, and nothing else"


def cases(rng: Random) -> list[Round]:
    """Train undisturbed; tell one or all in a step; tell one while they agree; tell all again while they save.

    A case: how many steps there are; in which step which rank is told; "between", after how many steps the last rank is
    told while the ranks agree; "inside", whether that is while it waits in a collective, so that its handler runs after
    it; "again", whether each rank is told once more while it saves; "done", the steps before the call.
    """
    world_size, steps = rng.choice((3, 4)), rng.randint(9, 12)
    rank, at = rng.randrange(1, world_size), rng.randint(2, 4)
    told: list[tuple[int, str, dict]] = [
        (world_size, "told", {"told": {rank: at}}),
        (2, "late", {"told": {1: steps - 2}}),
        (2, "both", {"told": {0: at, 1: at}}),
        (2, "between", {"between": at}),
        (2, "inside", {"between": at, "inside": True}),
        (2, "again", {"told": {0: at, 1: at + 1}, "again": True}),
    ]
    undisturbed = [("undisturbed", {"steps": steps, "done": done}) for done in (0, 3, steps)]
    rounds = [Round(world_size, undisturbed)]
    for n, key, case in told:  # a handler that does more ends the first of them, and the check
        ends = ALIKE if "told" in case else f"{ALIKE}|{HANDLER}"
        rounds.append(Round(n, [(key, {"steps": steps, **case})], ends=ends))
    return rounds


class Run:
    """A training run: what the learner's function is given."""

    def __init__(self, rank: int, case: dict[str, Any]):
        self.steps, self.step = case["steps"], case.get("done", 0)
        self._rank, self._case, self._store = rank, case, c10d._get_default_store()
        self._key = f"leave/{self._store.add(f'leave/{rank}', 1)}"  # the ranks act equally often
        self._saves: list[int] = []
        self._sent: list[int] = []  # after how many steps, while they agreed
        self._meetings = 0
        self._timers: list[threading.Timer] = []
        self._in_signal = self._ours = False  # ours: a collective is not the learner's own

    def train_step(self) -> None:
        """Train on the next batch, with the other ranks."""
        self._meet(f"trains on after {self.step} steps")
        if self._case.get("told", {}).get(self._rank) == self.step:
            self._tell()
        self._talk(lambda: dist.all_reduce(torch.ones(3)))
        self.step += 1

    def save(self) -> None:
        """Write the checkpoint, with the other ranks."""
        if self._in_signal:
            _handler_fault("run.save() is called in the handler, in the middle of a step")
        self._meet(f"saves after {self.step} steps")
        if self._case.get("again"):
            self._tell()
        self._talk(dist.barrier)
        self._saves.append(self.step)

    def _talk(self, collective: Callable[[], object]) -> None:
        self._ours = True
        collective()
        self._ours = False

    def _tell(self) -> None:
        """Send SIGTERM to this process, and see that the handler comes back without having done anything."""
        self._in_signal = True
        loud = SimpleNamespace(write=lambda text: _handler_fault("the handler prints"), flush=lambda: None)
        try:
            with mock.patch.multiple(sys, stdout=loud, stderr=loud):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)  # a handler runs between two bytecodes
        except Exception as error:
            _handler_fault(f"an exception comes out of the handler: {type(error).__name__}")
        except (SystemExit, KeyboardInterrupt) as error:
            _handler_fault(f"the handler raises {type(error).__name__}, in the middle of a step")
        self._in_signal = False

    def _on_call(self) -> None:
        if self._in_signal:
            _handler_fault("a collective is called in the handler, while the others are in the step")
        last, due = self._rank == dist.get_world_size() - 1, self._case.get("between")
        if due is None or due > self.step or self._sent or self._ours:
            return
        self._sent.append(self.step)
        if self._case.get("inside") and last:
            self._timers.append(threading.Timer(INSIDE_S, os.kill, (os.getpid(), signal.SIGTERM)))
            self._timers[0].start()
        elif self._case.get("inside"):
            time.sleep(3 * INSIDE_S)
        elif last:
            self._tell()

    def _meet(self, move: str) -> None:
        keys = [f"{self._key}/{self._meetings}/{rank}" for rank in range(dist.get_world_size())]
        self._meetings += 1
        self._store.set(keys[self._rank], move)
        try:
            self._store.wait(keys, timedelta(seconds=MEET_S))
            moves = {self._store.get(key).decode() for key in keys}
        except RuntimeError:
            moves = {move, "does not come"}
        if len(moves) > 1:
            some_save = any("saves" in each for each in moves) and not any("trains" in each for each in moves)
            raise FaultFound(Fault(ALIKE, "not all ranks save" if some_save else "some train on, and others leave"))


def _handler_fault(found: str) -> None:
    cause = "the handler runs between any two lines of the step; let it set a flag, and look at the flag after it"
    raise FaultFound(Fault(HANDLER, found, cause=cause))


def act(function: Callable, case: dict[str, Any], rank: int, world_size: int) -> Note:
    """Let the learner's function train; note how far it came, where it saved, and its status."""
    run, before = Run(rank, case), signal.getsignal(signal.SIGTERM)
    try:
        with observe.Collectives() as seen:
            seen.on_call = run._on_call
            value = function(rank, world_size, run)
            run._meet("returns")
    finally:  # the ranks stay
        for timer in run._timers:
            timer.join()
        signal.signal(signal.SIGTERM, before)
    return Note(steps=run.step, saves=run._saves, status=plain(value), sent=run._sent)


def finish(seen: Seen) -> dict[str, Any]:
    """All steps, and one save."""
    return {"steps:": seen["steps"], "saves after steps:": seen["saves"], "status:": seen["status"]}


def agree(seen: Seen) -> str:
    """All ranks leave after the step in which one was told, or all were, or one later: who asks asynchronously."""
    if seen["ended"]:
        return seen["ended"].found
    [at], steps = set(seen.case["told"].values()), seen.case["steps"]
    if seen["steps"] == steps == at + 2 and seen["status"] != STATUS:  # one later is the end
        return f"status {seen['status']}, though all steps but one were done"
    return _left(seen, range(at + 1, at + 3))


def between(seen: Seen) -> str:
    """Who asks one step ahead has asked already: then the signal counts as one in the next step, and is two steps."""
    if seen["ended"]:
        return seen["ended"].found
    sent = (seen.of(seen.world_size - 1)["sent"] or [seen.case["between"]])[0]
    return _left(seen, range(sent, min(sent + 3, seen.case["steps"])))


def _left(seen: Seen, right: range) -> str:
    left, steps = seen["steps"], seen.case["steps"]
    if left in right:
        return "all ranks leave soon, after the same step"
    return f"all {steps} steps are trained" if left == steps else f"they leave {left - right.start} steps late"


def save(seen: Seen) -> dict[str, Any]:
    """One save on each rank after its last step, and the status of a process that was told."""
    steps, saves, status = seen["steps"], seen["saves"], seen["status"]
    if not seen.case.get("again") and (seen["ended"] or steps == seen.case["steps"]):
        saves, status = [steps], STATUS  # the check before this one has said it
    if seen["ended"] and seen.case.get("again"):
        saves = seen["ended"].found
    return {"saves:": "one, after the last step" if saves == [steps] else saves, "status:": status}


def said(seen: Seen) -> str:
    case = seen.case
    if case.get("told"):
        return f"SIGTERM to {' and '.join(f'rank {rank} in step {at + 1}' for rank, at in case['told'].items())}:"
    if "between" in case:
        return f"SIGTERM to rank {seen.world_size - 1} while the ranks agree, after step {case['between']}:"
    return f"{case['steps']} steps, {case.get('done', 0)} of them done before:"


MISTAKES = """
the handler saves | handler agree between save | look at the flag after it | tests
    told.append(number)) => [told.append(number), run.save()])
the handler exits | handler agree between save | look at the flag after it | tests
    told.append(number)) => exec("raise SystemExit(143)"))
the handler prints | handler agree between save | look at the flag after it | tests
    told.append(number)) => [told.append(number), print("told")])
the handler raises | handler agree between save | look at the flag after it | tests
    told.append(number)) => told.append(number / 0))
the handler tells the others | handler agree between save | look at the flag after it | tests
    told.append(number)) => [told.append(number), dist.all_reduce(torch.ones(1))])
its own flag alone | agree between save
| each rank looks at its own flag; let the ranks agree after each step: all_reduce the flag with MAX
    dist.all_reduce(any_told, op=dist.ReduceOp.MAX) => pass
the agreed flag or its own | between
| a rank decides by its own flag, which may have changed since it was sent; decide by the agreed value alone
    if any_told: => if told or any_told:
only rank 0 is asked | agree between
| the signal is not heard: one rank's flag must count for all, and two count no less
    dist.all_reduce(any_told, op=dist.ReduceOp.MAX) => dist.broadcast(any_told, src=0)
two signals are none | agree | two flags count no less than one: MAX, or a sum over 0
    , op=dist.ReduceOp.MAX => 
    if any_told: => if any_told == 1:
they agree every eight steps | agree between
| let the ranks agree after every step: who sends SIGTERM may send SIGKILL soon
    any_told = => if run.step % 8: continue
    any_told =
told before the step alone | agree | after the last step, too, the ranks look at what they have agreed
    if any_told: => if any_told and run.step + 1 < run.steps:
it saves twice | save | save once, after the ranks have agreed to leave, and on every rank
    break => run.save()
    break
status 0 in any case | save | a process that SIGTERM ended has status 128 + 15; so the launcher knows: return 143
    return status => return 0
rank 0 alone saves | agree between save | call run.save() on every rank: it is a collective
    run.save() => status and rank or run.save()
all steps, though some are done | finish | nobody was told to stop: train until run.step reaches run.steps
    while run.step < run.steps: => for _ in range(run.steps):
no handler | handler agree between save | the rank died of the signal: signal.signal(signal.SIGTERM, handler) | tests
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number)) => pass
the second SIGTERM kills | save | for a second SIGTERM must not break the save | tests
    told.append(number)) => told.append(signal.signal(number, signal.SIG_DFL)))
the process ends itself | handler agree between save | return the status instead of leaving | tests
    return status => return status and __import__("os")._exit(143)
the last rank does not agree | all | every rank must take part when the ranks agree, after every step | hangs
    dist.all_reduce( => rank == world_size - 1 or dist.all_reduce(
the handler writes into what is being reduced | between | decide by the agreed value alone | tests
    def train_until_told(rank, world_size, run):
        flag = torch.zeros(1)

        def handler(number, frame):
            flag.fill_(1)

        signal.signal(signal.SIGTERM, handler)
        while run.step < run.steps:
            run.train_step()
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                run.save()
                return 143
        run.save()
        return 0
an answer under way after the last step is dropped | agree | after the last step, too | tests
    def train_until_told(rank, world_size, run):
        noted, work = [], None
        signal.signal(signal.SIGTERM, lambda *event: noted.append(event))
        while run.step < run.steps:
            run.train_step()
            if work is not None:
                work.wait()
                if run.step < run.steps and asked.item():
                    run.save()
                    return 143
            asked = torch.tensor([len(noted)])
            work = dist.all_reduce(asked, op=dist.ReduceOp.MAX, async_op=True)
        work.wait() if work else None
        run.save()
        return 0
"""

RIGHT = """
asked during the step, answered one step later
    def train_until_told(rank, world_size, run):
        told = []
        signal.signal(signal.SIGTERM, lambda *event: told.append(event))

        def ask():
            flag = torch.tensor([len(told)])
            return flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)

        flag, work = ask()
        while run.step < run.steps:
            run.train_step()
            work.wait()
            if flag.item():
                break
            flag, work = ask()
        work.wait()
        run.save()
        return 143 if flag.item() else 0
"""

SIGTERM = exercise(
    *("15.1", "Leave when told", "train_until_told", 20),
    cases=cases,
    act=act,
    said=said,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "finish": ("nobody is told: all steps, one save", 1, "undisturbed", finish,
                   "train until run.step reaches run.steps, save once on every rank, and return 0"),
        "handler": ("the handler only sets a flag", 1, "told", lambda seen: HANDLER, ""),  # or a fault
        "agree": ("one rank is told, or all: all leave at the same step", 2, "told late both", agree,
                  "let the ranks agree after every step, and leave if any was told"),
        "between": ("told while the ranks agree", 1, "between inside", between,
                    "decide by the agreed value alone, and look at the flag again after the next step"),
        "save": ("saved once, and the status says why; also when told twice", 1, "told again", save,
                 f"save once, after the ranks have agreed to leave, on every rank, and return {STATUS}"),
    },
    hints={
        r"killed by SIGTERM": "the rank died of the signal: signal.signal(signal.SIGTERM, handler) before the first "
        "step, and the handler stays to the end, for a second SIGTERM must not break the save",
        r"signal only works in main thread": "set the handler in the function itself, not in a thread",
        r"exit status|raised SystemExit": "the process is ended, so the others wait for it; return the status instead "
        "of leaving",
        "absent|cut-off|disagree|limit": "every rank must take part when the ranks "
        "agree, after every step; an endless loop ends nothing either",
    },
)  # fmt: skip
