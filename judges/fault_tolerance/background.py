"""14.4 `BackgroundSaver(write)`: does the step go on while the disk is slow, and is what is saved of this step?

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
from random import Random
from typing import Any

import torch

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer

WAIT_S = 3.0  # for the disk, before a save that waits for it is believed
HELD_S = 0.3  # for the first of several writes
FAILS_S = 1.0  # for the write that fails, if save waits for it

Note = dict[str, Any]


class Disk:
    """A slow disk: each write waits until it may go on, and is noted when it is done."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.wait_s = wait_s
        self.may_go_on = threading.Event()
        self.written: list[tuple[int, Any]] = []
        self.began: list[int] = []
        self.overlapped = self.in_main = False
        self.broken_at: int | None = None
        self._busy = threading.Lock()

    def write(self, state: Any, step: int) -> None:
        """Keep what `state` holds when the disk has come to it."""
        if not self._busy.acquire(blocking=False):
            self.overlapped = True
            self._busy.acquire()
        self.in_main |= threading.current_thread() is threading.main_thread()
        self.began.append(step)
        self.may_go_on.wait(self.wait_s)
        self.may_go_on.set()
        self._busy.release()
        if step == self.broken_at:
            raise OSError(f"no space left for step {step}")
        self.written.append((step, copy.deepcopy(state)))

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return when the condition is true, or after a second."""
        for _ in range(100):
            if condition():
                break
            time.sleep(0.01)


@contextmanager
def _new_threads_wait_for(event: threading.Event, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold each thread that is started in the block at its first line, until the event, or for `wait_s`."""

    def hold(*where: object) -> None:
        event.wait(wait_s)
        sys.settrace(None)

    threading.settrace(hold)
    try:
        yield
    finally:
        threading.settrace(None)


def _state(start: float) -> dict[str, Any]:
    """A state as an optimizer and a model have it: nested, with tensors that the next step changes in place."""
    torch.manual_seed(int(start))
    weights = {f"{name}.weight": torch.full((3,), start + i) for i, name in enumerate("abc")}
    moments = {i: {"momentum_buffer": torch.full((2,), start + 10 * i), "seen": torch.tensor(start)} for i in range(2)}
    return {"model": weights, "optimizer": {"state": moments, "groups": [{"lr": 0.1}]}, "rows": [torch.tensor([start])]}


def _train_step(state: dict[str, Any]) -> None:
    """Change every tensor in place, and two plain values, as the next step does."""
    for tensor in [*state["model"].values(), *state["rows"]]:
        tensor.add_(100)
    for moments in state["optimizer"]["state"].values():
        for tensor in moments.values():
            tensor.add_(100)
    state["optimizer"]["groups"][0]["lr"] *= 0.5


def _numbers(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {str(key): _numbers(value) for key, value in state.items()}
    return [_numbers(value) for value in state] if isinstance(state, list | tuple) else state


def one_save_driver(rank: int, world_size: int, function: Callable, start: float, step: int) -> Note:
    """Save, take a step, and only then let the thread and the disk begin."""
    disk, threads_may_run, state = Disk(), threading.Event(), _state(start)
    right = _numbers(state)
    with _new_threads_wait_for(threads_may_run):
        saver = function(disk.write)
        saver.save(state, step)
    waited = bool(disk.written)
    _train_step(state)
    changed = _numbers(state)
    threads_may_run.set()
    disk.may_go_on.set()
    saver.finish()
    at_finish = len(disk.written)
    disk.wait_for(lambda: disk.written)  # what it will have written, though nobody waited for it
    found = [(step, _numbers(state)) for step, state in disk.written]
    return {"waited": waited, "in_main": disk.in_main, "at_finish": at_finish, "found": found, "right": right,
            "changed": changed}  # fmt: skip


def several_driver(rank: int, world_size: int, function: Callable, start: float, steps: list[int]) -> Note:
    """Save several times while the disk is slow, then finish; then finish, save and finish once more."""
    disk, state, rights = Disk(HELD_S), _state(start), []
    with _new_threads_wait_for(disk.may_go_on, HELD_S):
        saver = function(disk.write)
        for step in steps:
            rights.append([step, _numbers(state["rows"])])
            saver.save(state, step)
            _train_step(state)
    saver.finish()
    disk.wait_for(lambda: len(disk.written) == len(steps))  # whether finish waits, another check has seen
    found = [[step, _numbers(state["rows"])] for step, state in disk.written]
    count, after = len(disk.began), None
    try:
        saver.finish()  # nothing is left to wait for
        saver.save(state, steps[-1] + 1)
        saver.finish()
        disk.wait_for(lambda: len(disk.began) > count)
    except Exception as error:
        after = f"{type(error).__name__}: {error}"
    went_on = disk.began[count:] == [steps[-1] + 1]
    return {"overlapped": disk.overlapped, "found": found, "rights": rights, "went_on": went_on, "after": after}


def error_driver(rank: int, world_size: int, function: Callable, step: int, by_save: bool) -> Note:
    """Let the disk fail; note which call says so, whether it says so twice, and whether the next save works."""
    threading.excepthook = lambda event: None  # whether somebody hears of it is the learner's part
    disk, state = Disk(FAILS_S), _state(1.0)
    disk.broken_at = step
    saver = function(disk.write)
    said: list[str | None] = []
    calls = [lambda: saver.save(state, step)]
    failed = lambda: step in disk.began and not disk._busy.locked()  # noqa: E731
    calls += [lambda: disk.wait_for(failed) or saver.save(state, step + 1)] if by_save else []
    for call in [*calls, saver.finish, saver.finish]:
        try:
            call()
            said.append(None)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            if isinstance(error, NotImplementedError):
                raise
        disk.may_go_on.set()  # not before the first save is back: it may look at its own write too
    return {"said": said}


def background_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """One save; several, faster than the disk; a disk that fails."""
    start, step = float(rng.randint(2, 60)), rng.randint(5, 500)
    note = answer.run(one_save_driver, 1, start, step, init=False)[0]
    yield "content", _content_fault(note, step)
    yield "wait", _wait_fault(note)
    yield "values", _values_fault(note, step)
    steps = [step + 10 * i for i in range(3)]
    yield "order", _order_fault(answer.run(several_driver, 1, start, steps, init=False)[0], steps)
    by_finish = answer.run(error_driver, 1, step, False, init=False)[0]
    by_save = answer.run(error_driver, 1, step, True, init=False)[0]
    yield "error", _error_fault(by_finish, step, 1) or _error_fault(by_save, step, 2)


def _content_fault(note: Note, step: int) -> Fault | None:
    expected = f"write(state, {step}) was called once when finish() returns"
    if note["at_finish"] == 1 and note["found"][0][0] == step:
        return None
    found = f"{note['at_finish']} writes are done" + (f", of step {note['found'][0][0]}" if note["found"] else "")
    return Fault(expected, found, cause="finish() waits for the thread: thread.join(), or future.result()")


def _wait_fault(note: Note) -> Fault | None:
    if not note["waited"] and not note["in_main"]:
        return None
    if note["in_main"]:
        cause = (
            "write is called by save itself; give it to a threading.Thread, and do not call it: target=f, args=(...)"
        )
    else:
        cause = "save starts a thread and waits for its end; wait in finish, or at the next save"
    return Fault("save returns while the disk is still writing", "it returns when the write is done", cause=cause)


def _values_fault(note: Note, step: int) -> Fault | None:
    expected = "the values that the state had when save was called"
    if not note["found"]:
        return Fault(expected, "nothing was written")
    found, right, changed = note["found"][0][1], note["right"], note["changed"]
    if found == right:
        return None
    if not isinstance(found, dict) or found.keys() != right.keys():
        return Fault(expected, "another form of state", cause="write is given a state of the same form: a deep copy")
    if found == changed:
        cause = (
            "nothing was copied before save returned: dict(), detach() and .cpu() copy no values on a CPU, and a copy "
            "in the thread comes too late. Clone every tensor in save, also the nested ones"
        )
        return Fault(expected, "those after the next step", cause=cause)
    part = next(name for name in right if found[name] != right[name])
    cause = "the copy is not deep: inner dictionaries, lists and their tensors are still the living ones"
    return Fault(expected, f'"{part}" has values from after the next step', cause=cause)


def _order_fault(note: Note, steps: list[int]) -> Fault | None:
    expected = f"steps {steps}, one after the other"
    if note["overlapped"]:
        cause = (
            "two writes at a time mix in one file: let save wait for the write before, or let one thread do them all"
        )
        return Fault(expected, "a write begins while another is under way", cause=cause)
    if note["found"] == note["rights"]:
        return None if note["went_on"] and not note["after"] else _after_fault(note["after"])
    done = [step for step, _ in note["found"]]
    if done == steps:
        return Fault(expected, "values of another step", cause="each save makes a copy of its own")
    if sorted(done) == steps:
        return Fault(expected, f"steps {done}", cause="the newest file must come last: write in the order of the saves")
    cause = "each save is written: wait for the one before, or keep them in a queue; finish() waits for all"
    return Fault(expected, f"steps {done or 'none'}", cause=cause)


def _after_fault(error: str | None) -> Fault:
    expected = "finish() may be called again, and save after it"
    cause = "finish waits for the writes, and is not the end: what it closes, a shut-down pool say, the next save needs"
    return Fault(expected, (error or "a save after finish is not written")[:80], cause=cause)


def _error_fault(note: Note, step: int, at: int) -> Fault | None:
    call = ("save", "finish", "finish again") if at == 1 else ("save", "the next save", "finish", "finish again")
    expected = f"write raises in the thread: {call[at]} raises the same error" + ("" if at == 1 else ", or finish")
    said = note["said"]
    heard = [i for i, words in enumerate(said) if words]
    if not heard:
        cause = (
            "an exception in a thread ends the thread and nobody hears of it: keep it, and raise it in the next call"
        )
        return Fault(expected, "no call raises", cause=cause)
    if "no space left" not in said[heard[0]]:
        return Fault(expected, said[heard[0]][:80], cause="raise the error that write raised: it says what to do")
    if len(heard) > 1:
        cause = "the error was told; forget it when it is raised, so that the run may go on"
        return Fault(f"{expected}, once", f"{call[heard[0]]} and {call[heard[1]]} raise it", cause=cause)
    if heard[0] == 0:
        return Fault(expected, "save raises it, so it waited for the disk", cause="write in a thread")
    return None


BACKGROUND = Exercise(
    "14.4",
    "Save beside the training (stretch)",
    "BackgroundSaver",
    30,
    (
        Check("content", "finish waits for the write", 1),
        Check("wait", "save does not wait for the disk", 1),
        Check("values", "the values of the step, not of the next one", 1),
        Check("order", "one write at a time, in order, none lost", 1),
        Check("error", "an error of the disk reaches the next call", 1),
    ),
    background_judge,
    refused=("ddp_course.checkpoint.folder.Checkpointer", "torch.distributed.checkpoint.async_save"),
    hints=(
        (r"no result after", "a wait that never ends: a thread that does not end, or a lock that is not given back"),
        (r"TypeError.*write\(\)|missing 1 required", "write takes two arguments: write(state, step)"),
    ),
)
