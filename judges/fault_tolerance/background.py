"""15.4 `BackgroundSaver(write)`: does the step go on while the disk is slow, and is what is saved of this step?

Nothing is timed. The disk is a function that waits until the judge lets it go on, and new threads are held at their
first line. So a saver that waits for its thread is seen to wait, and one that copies in the thread is too late, always.

Source: threading.settrace, https://docs.python.org/3/library/threading.html.
Read next: `judges/checkpointing/save.py`, the file itself.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen

WAIT_S = 3.0  # for the disk, before a save that waits for it is believed
HELD_S = 0.3  # for the first of several writes
NO_SPACE = "no space left for step {}"
FAILS_S = 1.0  # for the write that fails, if save waits for it


@dataclass(frozen=True)
class Case:
    """What is saved at these steps."""

    kind: str  # of "finish", "next save" and "one call", the disk fails, and this call may say so
    start: float
    steps: tuple[int, ...]


class Disk:
    """A slow disk: each write waits until it may go on, and is noted when it is done."""

    def __init__(self, wait_s: float, broken_at: int | None = None) -> None:
        self.wait_s, self.broken_at = wait_s, broken_at
        self.may_go_on = threading.Event()
        self.written: list[tuple[int, Any]] = []
        self.began: list[int] = []
        self.overlapped = self.in_main = False
        self.busy = threading.Lock()

    def write(self, state: Any, step: int) -> None:
        """Keep what `state` holds when the disk has come to it."""
        if not self.busy.acquire(blocking=False):
            self.overlapped = True
            self.busy.acquire()
        self.in_main |= threading.current_thread() is threading.main_thread()
        self.began.append(step)
        self.may_go_on.wait(self.wait_s)
        self.may_go_on.set()
        self.busy.release()
        if step == self.broken_at:
            raise OSError(NO_SPACE.format(step))
        self.written.append((step, copy.deepcopy(state)))


def wait_for(condition: Callable[[], object]) -> None:
    """Return when the condition is true, or after a second."""
    deadline = time.monotonic() + 1
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@contextmanager
def new_threads_wait_for(event: threading.Event, wait_s: float) -> Iterator[None]:
    """Hold each thread that is started in the block at its first line, until the event, or for `wait_s`."""

    def hold(*where: object) -> None:
        event.wait(wait_s)
        sys.settrace(None)

    threading.settrace(hold)
    try:
        yield
    finally:
        threading.settrace(None)


def state_of(start: float) -> dict[str, Any]:
    """Return a state as an optimizer and a model have it: nested, with tensors that the next step changes in place."""
    weights = {f"{name}.weight": torch.full((3,), start + i) for i, name in enumerate("abc")}
    moments = {i: {"momentum_buffer": torch.full((2,), start + 10 * i), "seen": torch.tensor(start)} for i in range(2)}
    return {"model": weights, "optimizer": {"state": moments, "groups": [{"lr": 0.1}]}, "rows": [torch.tensor([start])]}


def train_step(state: dict[str, Any]) -> None:
    """Change every tensor in place, and a plain value, as the next step does."""
    pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.add_(100), state)
    state["optimizer"]["groups"][0]["lr"] *= 0.5


def numbers(state: Any) -> Any:
    """Return a state as plain data, in which a tensor is no list and 1 is not "1"."""
    if isinstance(state, torch.Tensor):
        return [str(state.dtype), state.tolist()]
    if isinstance(state, dict):
        return {repr(key): numbers(value) for key, value in state.items()}
    return [numbers(value) for value in state] if isinstance(state, list | tuple) else state


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Save on a slow disk."""
    # Whether somebody hears of an error in a thread is the learner's part.
    with mock.patch.object(threading, "excepthook", lambda event: None):
        return {"one": one, "several": several}.get(case.kind, failing)(function, case)


def one(function: Callable, case: Case) -> Note:
    """Save, take a step, and only then let the thread and the disk begin."""
    disk, threads_may_run, state = Disk(WAIT_S), threading.Event(), state_of(case.start)
    right = numbers(state)
    with new_threads_wait_for(threads_may_run, WAIT_S):
        saver = function(disk.write)
        saver.save(state, *case.steps)
    waited = bool(disk.written)
    train_step(state)
    threads_may_run.set()
    disk.may_go_on.set()
    saver.finish()
    at_finish = len(disk.written)
    wait_for(lambda: disk.written)  # what it will have written, though nobody waited for it
    found = [(step, numbers(state)) for step, state in disk.written]
    note = {"waited": waited, "in_main": disk.in_main, "at_finish": at_finish}
    return Note(note, found=found, right=right, changed=numbers(state))


def several(function: Callable, case: Case) -> Note:
    """Save several times while the disk is slow, then finish; then finish, save and finish once more."""
    disk, state, rights, after = Disk(HELD_S), state_of(case.start), [], ""
    with new_threads_wait_for(disk.may_go_on, HELD_S):
        function(disk.write).finish()  # nothing to wait for
        saver = function(disk.write)
        for step in case.steps:
            rights.append((step, numbers(state["rows"])))
            saver.save(state, step)
            train_step(state)
    saver.finish()
    wait_for(lambda: len(disk.written) == len(case.steps))  # whether finish waits, another check has seen
    found = [(step, numbers(state["rows"])) for step, state in disk.written]
    count, last = len(disk.began), case.steps[-1] + 1
    try:
        saver.finish()  # nothing is left to wait for
        saver.save(state, last)
        saver.finish()
        wait_for(lambda: len(disk.began) > count)
    except Exception as error:
        after = f"{type(error).__name__}: {error}"
    after = after or (disk.began[count:] != [last] and "a save after finish is not written")
    return Note(overlapped=disk.overlapped, found=found, rights=rights, after=after)


def failing(function: Callable, case: Case) -> Note:
    """Let the disk fail at the first step; note by call what comes out."""
    at_once, first = case.kind == "one call", case.steps[0]
    disk, state, said = Disk(HELD_S if at_once else FAILS_S, first), state_of(case.start), {}
    saver = function(disk.write)
    names = ("save",) if case.kind == "finish" else ("save", "the next save", "the save after it")
    saves = {name: first + number for number, name in enumerate(names)}
    for name in [*saves, "finish", "finish again"]:
        try:
            if name == "the next save" and not at_once:
                wait_for(lambda: first in disk.began and not disk.busy.locked())
                time.sleep(HELD_S)  # until the error has come out of write
            saver.save(state, saves[name]) if name in saves else saver.finish()
        except NotImplementedError:
            raise
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        if not at_once:
            disk.may_go_on.set()  # not before the first save is back: it may look at its own write too
    lost = [step for name, step in saves.items() if name not in said and step not in disk.began]
    return Note(said=said, lost=lost)  # finish has waited for all


def rounds(rng: Random) -> list[Round]:
    """One save; several, faster than the disk; a disk that fails."""
    start, step = float(rng.randint(2, 60)), rng.randint(5, 500)
    several = tuple(step + 10 * i for i in range(3))
    cases = [("one", Case("one", start, (step,))), ("several", Case("several", start, several))]
    failing = [("failing", Case(kind, start, (step,))) for kind in ("finish", "next save", "one call")]
    return [*(Round(1, [case], init=False) for case in cases), Round(1, failing, init=False)]


def content(seen: Seen) -> Fault | None:
    """The write is done when finish returns."""
    done, [step], found = seen["at_finish"], seen.case.steps, [step for step, _ in seen["found"]]
    said = f"{done} writes are done" + (f", of step {found[0]}" if found else "")
    return first_mistake(f"write(state, {step}) was called once when finish() returns", {
        "finish() waits for the thread: thread.join(), or future.result()": (done, found[:1]) != (1, [step]) and said,
    })  # fmt: skip


def wait(seen: Seen) -> Fault | None:
    """No save waits for the disk."""
    found = "it returns when the write is done"
    return first_mistake("save returns while the disk is still writing", {
        "write is called by save itself; give it to a threading.Thread, and do not call it: target=f, args=(...)":
            seen["in_main"] and found,
        "save starts a thread and waits for its end; wait in finish, or at the next save": seen["waited"] and found,
    })  # fmt: skip


def values(seen: Seen) -> Fault | None:
    """What is written is what was saved."""
    right, [found, *_] = seen["right"], [*(state for _, state in seen["found"]), None]
    form = isinstance(found, dict) and found.keys() == right.keys()
    part = next((name for name in right if form and found[name] != right[name]), "")
    return first_mistake("the values that the state had when save was called", {
        "call write": found is None and "nothing was written",
        "write is given a state of the same form: a deep copy": not form and "another form of state",
        "nothing was copied before save returned: dict(), detach() and .cpu() copy no values on a CPU, and a copy in "
        "the thread comes too late. Clone every tensor in save, also the nested ones":
            found == seen["changed"] and "those after the next step",
        "the copy is of another form, or not deep: inner dictionaries, lists and their tensors are the living ones":
            part and f"{part} has values from after the next step",
    })  # fmt: skip


def order(seen: Seen) -> Fault | None:
    """Each save is written, one after the other; and after finish it goes on."""
    steps, done = list(seen.case.steps), [step for step, _ in seen["found"]]
    return first_mistake(f"steps {steps}, one after the other", {
        "two writes at a time mix in one file: let save wait for the write before, or let one thread do them all":
            seen["overlapped"] and "a write begins while another is under way",
        "each save makes a copy of its own": done == steps and seen["found"] != seen["rights"] and
            "values of another step",
        "the newest file must come last: write in the order of the saves":
            done != steps and sorted(done) == steps and f"steps {done}",
        "each save is written: wait for the one before, or keep them in a queue; finish() waits for all":
            done != steps and f"steps {done or 'none'}",
    }) or first_mistake("finish() may be called again, and save after it", {
        "finish waits for the writes, and is not the end: what it closes, a shut-down pool say, the next save needs":
            seen["after"] and seen["after"][:80],
    })  # fmt: skip


def error(seen: Seen) -> Fault | None:
    """The next call raises what write raised, once."""
    said, kind = seen["said"], seen.case.kind
    heard = list(said)
    return first_mistake(f"write raises in the thread: {kind} raises the same error, once", {
        "a write that goes well must not hide one that failed: keep its error until a call has raised it":
            kind == "one call" and not heard and "no call raises",
        "an exception in a thread ends the thread and nobody hears of it: keep it, and raise it in the next call":
            not heard and "no call raises",
        "raise the error that write raised: it says what to do":
            heard and said[heard[0]] != f"OSError: {NO_SPACE.format(seen.case.steps[0])}" and said[heard[0]][:80],
        "the error was told; forget it when it is raised, so that the run may go on":
            len(heard) > 1 and f"{heard[0]} and {heard[1]} raise it",
        "the error is told too late: also save looks whether the last write has failed":
            kind == "next save" and heard[:1] == ["finish"] and "finish raises it",
        "write in a thread": heard[:1] == ["save"] and "save raises it, so it waited for the disk",
        "the thread must outlive an error: the saves after it, and those that wait, are written as before":
            seen["lost"] and f"the saves of the steps {seen['lost']} are not written",
    })  # fmt: skip


BACKGROUND = exercise(
    "15.4",
    "Save beside the training (stretch)",
    "BackgroundSaver",
    30,
    act=act,
    rounds=rounds,
    checks={
        "content": ("finish waits for the write", 1, content, "one"),
        "wait": ("save does not wait for the disk", 1, wait, "one"),
        "values": ("the values of the step, not of the next one", 1, values, "one"),
        "order": ("one write at a time, in order, none lost", 1, order, "several"),
        "error": ("an error of the disk reaches the next call", 1, error, "failing"),
    },
    refused=("ddp_course.checkpoint.folder.Checkpointer", "torch.distributed.checkpoint.async_save"),
    hints={
        "limit": "a wait that never ends: a thread that does not end, or a lock that is not given back",
        r"TypeError.*write\(\)|missing 1 required": "write takes two arguments: write(state, step)",
    },
)
