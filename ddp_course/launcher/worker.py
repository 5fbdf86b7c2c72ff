"""What runs inside each rank: join the group, wait for calls, answer, and never outlive the parent.

The main thread runs the learner's functions. A watcher thread reads the pipe to the parent, so that a rank
answers "where are you?" in the middle of a hang, and ends itself when the pipe breaks, because then the parent
is gone.

Left out on purpose: any collective after an error; peers may be waiting elsewhere.
Read next: `pool.py`, the parent's side of the pipe.
"""

from __future__ import annotations

import builtins
import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from ddp_course import groups
from ddp_course.launcher import checks, lines
from ddp_course.launcher.calls import Whereabouts
from ddp_course.launcher.failure import describe
from ddp_course.launcher.interception import recorder
from ddp_course.launcher.same_calls import SharedCalls
from ddp_course.rendezvous import pin_loopback


@dataclass(frozen=True)
class Settings:
    """What the parent tells every rank when it starts."""

    world_size: int
    backend: str
    init: bool  # open a process group before the first call
    rendezvous: str
    folder: str  # private to this set of ranks: outputs, stacks, the rendezvous file
    timeout_s: float
    threads: int
    environ: dict[str, str]  # of the parent, now: a fork server's copy may be old


def rank_main(rank: int, settings: Settings, pipes: list[Connection]) -> None:
    """The whole life of one rank, as `torch.multiprocessing.spawn` starts it."""
    pipe = _keep_own_pipe(rank, pipes)
    _take_own_session()
    _keep_things_together(settings.folder)
    _write_to_own_files(rank, settings.folder)
    _set_environment(rank, settings)
    _Rank(rank, settings, pipe).live()


def _keep_own_pipe(rank: int, pipes: list[Connection]) -> Connection:
    """Close the other ranks' ends: a pipe breaks only when nobody else holds it."""
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()
    return pipes[rank]


def _take_own_session() -> None:
    """Be the head of a process group, so that the parent can end this rank with all its children.

    Ctrl-C then reaches the parent alone, which ends the ranks in order.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch's spawn sends it when the parent's thread ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _keep_things_together(folder: str) -> None:
    """Have multiprocessing put sockets in our folder, and give semaphores its name: a DataLoader's workers make some.

    A rank that is killed cannot remove them; whoever removes the folder does.
    """
    config = multiprocessing.current_process()._config
    config["tempdir"], config["semprefix"] = folder, f"/{os.path.basename(folder)}"
    # A rank inherits how it was started itself; a DataLoader's workers are to start as they do under torchrun.
    multiprocessing.set_start_method(None, force=True)


def _write_to_own_files(rank: int, folder: str) -> None:
    """Send stdout and stderr, compiled code's too, to a file that survives this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    out = os.open(f"{folder}/rank{rank}.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    stacks = open(f"{folder}/rank{rank}.stack", "w")  # noqa: SIM115  (lives as long as the rank)
    faulthandler.enable(stacks)  # on a crash in compiled code
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


def _set_environment(rank: int, settings: Settings) -> None:
    for name in os.environ.keys() - settings.environ.keys():
        del os.environ[name]  # of the time when the fork server started
    os.environ.update(settings.environ)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank}.items():
        os.environ[name] = str(value)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(settings.world_size)
    torch.set_num_threads(settings.threads)
    pin_loopback()
    recorder()  # switches it on


class _Rank:
    def __init__(self, rank: int, settings: Settings, pipe: Connection):
        self.rank, self.settings, self.pipe = rank, settings, pipe
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
            self.send(0, "ready", (cloudpickle.dumps(None), recorder().whereabouts(self.rank)))
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
            address = f"{self.settings.folder}/rendezvous" if self.settings.rendezvous == "file" else None
            groups.join_group(place, self.settings.rendezvous, address, self.settings.timeout_s)
            recorder().shared = SharedCalls(f"{self.settings.folder}/calls", self.rank, self.settings.world_size)

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
            return "returned", (checks.dumps(result), recorder().whereabouts(self.rank))
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
