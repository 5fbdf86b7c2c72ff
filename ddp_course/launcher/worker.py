"""What runs inside each rank: join the group, wait for calls, answer, and never outlive the parent.

The main thread runs the learner's functions. A watcher thread reads the pipe to the parent, so that a rank
answers "where are you?" in the middle of a hang, and ends itself when the pipe breaks, because then the parent
is gone.

Left out on purpose: any collective after an error; peers may be waiting elsewhere.
Read next: `rank_setup.py`, what it needs before that; `running_call.py`, the parent's side of the pipe.
"""

from __future__ import annotations

import builtins
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from ddp_course import groups
from ddp_course.launcher import lines, packing, rank_setup
from ddp_course.launcher.compare_calls import SharedCalls
from ddp_course.launcher.failure import describe
from ddp_course.launcher.interception import recorder
from ddp_course.launcher.rank_status import Whereabouts
from ddp_course.launcher.settings import Settings


def rank_main(rank: int, settings: Settings, folder: str, environ: dict[str, str], pipes: list[Connection]) -> None:
    """The whole life of one rank, as `torch.multiprocessing` starts it."""
    pipe = rank_setup.keep_own_pipe(rank, pipes)
    rank_setup.prepare(rank, settings, folder, environ)
    recorder()  # switches it on
    _Rank(rank, settings, folder, pipe).live()


class _Rank:
    def __init__(self, rank: int, settings: Settings, folder: str, pipe: Connection):
        self.rank, self.settings, self.folder, self.pipe = rank, settings, folder, pipe
        self.calls: queue.SimpleQueue[tuple[int, bytes, dict] | None] = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.main_thread = threading.get_ident()
        self.mark: dict[str, int] = {}  # calls of the recorder before the present call

    # --- main thread

    def live(self) -> None:
        builtins.input = self.no_keyboard
        self.send(0, "imported", None)
        threading.Thread(target=self.watch, name="ddp_course watcher", daemon=True).start()
        try:
            self.join()
            self.send(0, "ready", (packing.dumps(None), recorder().whereabouts(self.rank)))
        except BaseException as error:  # whatever it is, the parent must hear of it
            self.send(0, "raised", describe(error, self.rank, during="start"))
        while call := self.next_call():
            number, payload, sources = call
            try:
                told = self.answer(payload, sources)
            except BaseException as error:  # raised by a signal's handler, such as a DataLoader's for a dead worker
                told = "raised", describe(error, self.rank)
            self.send(number, *told)
        self.leave()

    def next_call(self) -> tuple[int, bytes, dict] | None:
        while True:
            try:
                return self.calls.get()
            except RuntimeError:  # a late word about a dead worker; the call before is over
                traceback.print_exc()

    def join(self) -> None:
        if self.settings.init:
            place = groups.read_place(backend=self.settings.backend)
            address = f"{self.folder}/rendezvous" if self.settings.rendezvous == "file" else None
            groups.join_group(place, self.settings.rendezvous, address, self.settings.timeout_s)
            recorder().shared = SharedCalls(f"{self.folder}/calls", self.rank, self.settings.world_size)

    def answer(self, payload: bytes, sources: dict[str, list[str]]) -> tuple[str, Any]:
        """Run one call of the learner's and return what to tell the parent."""
        self.mark = recorder().mark()
        recorder().oddities.clear()
        lines.learn_sources(sources)
        try:
            fn, args = cloudpickle.loads(payload)
            result = fn(self.rank, self.settings.world_size, *args)
        except BaseException as error:  # SystemExit too: a rank answers, it does not leave
            return "raised", describe(error, self.rank)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return self.packed(fn, result)

    def packed(self, fn: Callable, result: Any) -> tuple[str, Any]:
        try:
            return "returned", (packing.dumps(result), recorder().whereabouts(self.rank))
        except Exception as error:
            name = getattr(fn, "__name__", "the function")
            sentence = (
                f"rank {self.rank}: {name} returned a {type(result).__name__} that cannot travel to the parent "
                f"process ({error}); return numbers, strings, tensors, arrays or containers of them"
            )
            return "raised", describe(TypeError(sentence), self.rank, during="result")

    def leave(self) -> None:
        """End without the interpreter's own teardown, in which a DDP object's last threads may abort."""
        status = 0
        if self.settings.init:  # a group that the function opened itself may be open on some ranks only
            try:
                groups.leave_group()
            except Exception:
                traceback.print_exc()
                status = 1  # of which the parent warns
        sys.stdout.flush()
        os._exit(status)

    def no_keyboard(self, prompt: object = "") -> str:
        raise RuntimeError(
            f"rank {self.rank}: input({prompt!r}) waits for a keyboard, and a rank has none; ask before the launch and "
            "pass the answer on, as in launch(fn, world_size, args=(answer,))"
        )

    # --- watcher thread

    def watch(self) -> None:
        while True:
            try:
                number, word, content = self.pipe.recv()
            except (EOFError, OSError):  # the parent is gone: leave nothing behind
                os.killpg(0, signal.SIGKILL)
            if word == "call":
                self.calls.put((number, *content))
            elif word == "where":
                self.send(number, "where", self.where())
            elif word == "end":
                self.calls.put(None)

    def where(self) -> Whereabouts:
        return recorder().whereabouts(self.rank, lines.own_line(lines.stack_of(self.main_thread)), self.mark)

    def send(self, number: int, word: str, content: Any) -> None:
        try:
            with self.sending:
                self.pipe.send((number, word, content))
        except OSError:  # the parent is gone or has given up on us; the watcher sees it too
            traceback.print_exc()
