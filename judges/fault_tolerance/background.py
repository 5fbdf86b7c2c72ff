"""15.4 `BackgroundSaver(write)`: does the step go on while the disk is slow, and is what is saved of this step?

Nothing is timed. The disk is a function that waits until the judge lets it go on, and new threads are held at their
first line. So a saver that waits for its thread is seen to wait, and one that copies in the thread is too late, always.

Source: threading.settrace, https://docs.python.org/3/library/threading.html.
"""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

WAIT_S = 3.0  # for the disk, before a save that waits for it is believed
HELD_S = 0.2  # for the first of several writes
FAILS_S = 1.0  # for the write that fails, if save waits for it


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
            raise OSError(f"no space left for step {step}")
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


def cases(rng: Random) -> list[Round]:
    """One save; several, faster than the disk; a disk that fails, and a call that may say so. A start, and steps."""
    start, step = float(rng.randint(2, 60)), rng.randint(5, 500)
    failing = [("failing", (kind, start, [step])) for kind in ("finish", "next save", "one call")]
    return [
        Round(1, [("one", ("one", start, [step]))], init=False),
        Round(1, [("several", ("several", start, [step, step + 10, step + 20]))], init=False),
        Round(1, failing, init=False),
    ]


def act(function: Callable, case: tuple, rank: int, world_size: int) -> Note:
    """Save on a slow disk."""
    # Whether somebody hears of an error in a thread is the learner's part.
    with mock.patch.object(threading, "excepthook", lambda event: None):
        return {"one": one, "several": several}.get(case[0], failing)(function, *case)


def one(function: Callable, kind: str, start: float, steps: list[int]) -> Note:
    """Save, take a step, and only then let the thread and the disk begin."""
    disk, threads_may_run, state = Disk(WAIT_S), threading.Event(), state_of(start)
    with new_threads_wait_for(threads_may_run, WAIT_S):
        saver = function(disk.write)
        saver.save(state, *steps)
    waited = bool(disk.written)
    train_step(state)
    threads_may_run.set()
    disk.may_go_on.set()
    saver.finish()
    at_finish = [step for step, _ in disk.written]
    wait_for(lambda: disk.written)  # what it will have written, though nobody waited for it
    found = [numbers(state) for _, state in disk.written][:1]
    return Note(waited=waited, in_main=disk.in_main, at_finish=at_finish, found=found)


def several(function: Callable, kind: str, start: float, steps: list[int]) -> Note:
    """Save several times while the disk is slow, then finish; then finish, save and finish once more."""
    disk, state, after = Disk(HELD_S), state_of(start), ""
    with new_threads_wait_for(disk.may_go_on, HELD_S):
        function(disk.write).finish()  # nothing to wait for
        saver = function(disk.write)
        for step in steps:
            saver.save(state, step)
            train_step(state)
    saver.finish()
    wait_for(lambda: len(disk.written) == len(steps))  # whether finish waits, another check has seen
    found = [(step, numbers(state["rows"])) for step, state in disk.written]
    count, last = len(disk.began), steps[-1] + 1
    try:
        saver.finish()  # nothing is left to wait for
        saver.save(state, last)
        saver.finish()
        wait_for(lambda: len(disk.began) > count)
    except Exception as error:
        after = f"{type(error).__name__}: {error}"
    return Note(overlapped=disk.overlapped, found=found, after=after or disk.began[count:])


def failing(function: Callable, kind: str, start: float, steps: list[int]) -> Note:
    """Let the disk fail at the first step; note by call what comes out."""
    at_once, first = kind == "one call", steps[0]
    disk, state, said = Disk(HELD_S if at_once else FAILS_S, first), state_of(start), {}
    saver = function(disk.write)
    names = ("save",) if kind == "finish" else ("save", "the next save", "the save after it")
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


def wait(seen: Seen) -> str:
    """No save waits for the disk."""
    if seen["in_main"]:
        return "write is called in save's own thread"
    return "save returns when the write is done" if seen["waited"] else "save returns while the disk is writing"


def order(seen: Seen) -> dict[str, Any]:
    """Each save is written, one after the other; and after finish it goes on."""
    return {
        "written:": [step for step, _ in seen["found"]],
        "write begins": "while another is under way" if seen["overlapped"] else "when the one before is done",
        "values:": [rows for _, rows in seen["found"]],
        "a save after finish writes": seen["after"],
    }


def error(seen: Seen) -> dict[str, Any]:
    """The next call raises what write raised, once; where save may still wait for the disk, it is any call."""
    said = seen["said"]
    if seen.case[0] == "one call" and len(said) == 1 and "save" not in said:
        said = {"a call": next(iter(said.values()))}
    return {"raised:": said or "nothing", "saves that are never written:": seen["lost"]}


MISTAKES = """
at once | wait | write is called by save itself; give it to a threading.Thread, and do not call it: target=f, args=(...)
    self.thread.start() => self.thread.run()
    self.thread = None
no copy | values order
| nothing was copied before save returned: dict(), detach() and .cpu() copy no values, a copy in the thread is late
    copy.deepcopy(state) => state
tensors alone | values | the copy is not deep: a plain value in it, such as a rate, is that of the next step
    copy.deepcopy(state) => {**copy.deepcopy(state), "optimizer": {**copy.deepcopy(state["optimizer"]),
        "groups": state["optimizer"]["groups"]}}
lists for tensors | values order | write is given a state of the same form: a deep copy
    copy.deepcopy(state) => torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, state)
finish does not wait | content error | finish() waits for the thread: thread.join(), or future.result()
    self.finish() => self.wait()
    def finish(self): => def finish(self):
        pass

    def wait(self):
all at a time | order error
| two writes at a time mix in one file: let save wait for the write before, or one thread do all
    self.finish() => pass
left out while the disk is busy | order error | each save is written: wait for the one before, or keep them in a queue
    self.finish() => if self.thread and self.thread.is_alive():
        return
    self.finish()
nothing after finish | order | finish waits for the writes, and is not the end: what it closes, the next save needs
    self.finish() => self.wait()
    def finish(self): => def finish(self):
        self.wait()
        self.write = None

    def wait(self):
swallowed | error
| an exception in a thread ends the thread and nobody hears of it: keep it, and raise it in the next call
    self.error = error => print(error)
another error | error | raise the error that write raised: it says what to do
    raise error => raise RuntimeError(str(error))
told by finish alone | error | the error is told too late: also save looks whether the last write has failed
    self.finish() => if self.thread:
        self.thread.join()
never forgotten | error | the error was told; forget it when it is raised, so that the run may go on
    error, self.error = None, self.error, None => error = None, self.error
write without the step | all | write takes two arguments: write(state, step)
    self.write(state, step) => self.write(state)
a lock that is not given back | all | a wait that never ends | hangs
    self.thread.join() => threading.Event().wait()
the thread ends with the first error | error | a thread outlives it | tests
    import queue

    class BackgroundSaver:
        def __init__(self, write):
            self._write, self._tasks, self._error = write, queue.Queue(), None
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

        def _work(self):
            try:
                while True:
                    state, step = self._tasks.get()
                    self._write(state, step)
                    self._tasks.task_done()
            except Exception as error:
                self._error = error
                while self._tasks.unfinished_tasks:
                    self._tasks.task_done()

        def _raise(self):
            if self._error is not None:
                error, self._error = self._error, None
                raise error

        def save(self, state, step):
            self._raise()
            self._tasks.put((copy.deepcopy(state), step))

        def finish(self):
            if self._thread.is_alive():
                self._tasks.join()
            self._raise()
"""

RIGHT = """
a pool of one thread, tensors cloned
    from concurrent.futures import ThreadPoolExecutor

    def copied(part):
        if isinstance(part, torch.Tensor):
            return part.detach().clone()
        if isinstance(part, dict):
            return {key: copied(value) for key, value in part.items()}
        return [copied(value) for value in part] if isinstance(part, list) else part

    class BackgroundSaver:
        def __init__(self, write):
            self.write, self.pool, self.pending = write, ThreadPoolExecutor(1), []

        def save(self, state, step):
            self.pending.append(self.pool.submit(self.write, copied(state), step))
            while self.pending and self.pending[0].done():
                self.pending.pop(0).result()

        def finish(self):
            while self.pending:
                self.pending.pop(0).result()
"""

BACKGROUND = exercise(
    *("15.4", "Save beside the training (stretch)", "BackgroundSaver", 30),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "content": ("finish waits for the write", 1, "one", lambda seen: {"written by then:": seen["at_finish"]},
                    "write(state, step) was called once when finish() returns: wait for the thread"),
        "wait": ("save does not wait for the disk", 1, "one", wait,
                 "save starts a thread, or gives the state to one, and returns"),
        "values": ("the values of the step, not of the next one", 1, "one", lambda seen: seen["found"],
                   "clone every tensor in save, also the nested ones, and give write a state of the same form"),
        "order": ("one write at a time, in order, none lost", 1, "several", order,
                  "each save is written, with values of its own, when the one before is done; finish() waits for all"),
        "error": ("an error of the disk reaches the next call", 1, "failing", error,
                  "the next call raises the same error, once; the saves after it are written: a thread outlives it"),
    },
    refused=("ddp_course.checkpoint.folder.Checkpointer", "torch.distributed.checkpoint.async_save"),
    hints={
        "limit": "a wait that never ends: a thread that does not end, or a lock that is not given back",
        r"TypeError.*write\(\)|missing 1 required": "write takes two arguments: write(state, step)",
    },
)  # fmt: skip
