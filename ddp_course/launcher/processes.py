"""How do rank processes come up, and how do they go away?

They come up through `torch.multiprocessing`: `spawn` starts fresh interpreters, `forkserver` forks a helper
that has imported torch already and has never touched CUDA. They go away together, with all their children,
whatever state they are in.

Left out on purpose: `fork`, which CUDA refuses and which hangs after a multi-threaded product in the parent.
Read next: `running_call.py`, one call under way on these processes.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import Any

import torch.multiprocessing as mp

from ddp_course.launcher import janitor
from ddp_course.launcher.settings import Settings
from ddp_course.launcher.worker import rank_main

END_LIMIT_S = 5.0  # for the orderly end; then SIGKILL
# Imported once, by the fork server: `_dynamo` too, or every rank's first optimizer step pays for it.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "ddp_course.launcher.worker"]


@dataclass(frozen=True)
class RankProcess:
    """The parent's hold on one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    error_file: str  # into which torch's spawn writes what the rank could not tell us

    def tell(self, call: int, word: str, content: Any = None) -> None:
        """Send a message that belongs to a call; a rank that is gone is noticed by its sentinel, not here."""
        with suppress(OSError):
            self.pipe.send((call, word, content))


def start(settings: Settings, folder: str, environ: dict[str, str]) -> tuple[list[RankProcess], subprocess.Popen]:
    """Start all ranks and their janitor; a rank is up when it says "ready" through its pipe.

    Args:
        folder: of this set of ranks alone: for outputs, stacks and the file at which they meet.
        environ: of every rank; that of a fork server may be old.
    """
    ours, theirs = zip(*(get_context("spawn").Pipe() for _ in range(settings.world_size)), strict=True)
    cleaner = janitor.start(folder)
    try:
        with _importable_main():
            context = _start_processes(settings, folder, environ, theirs)
    except BaseException:
        cleaner.communicate()  # ends it; ranks that are up already see their pipe break
        raise
    for pipe in theirs:
        pipe.close()  # a rank's own end is then the only one, and its death breaks the pipe
    cleaner.stdin.write("".join(f"{pid}\n" for pid in context.pids()))
    cleaner.stdin.flush()
    numbers = range(settings.world_size)
    return [RankProcess(n, context.processes[n], ours[n], context.error_files[n]) for n in numbers], cleaner


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Keep Ctrl-C for the end of the block, in this thread and in the processes that it starts.

    A process that is still importing torch would answer it with a traceback of its own.
    """
    resource_tracker.ensure_running()  # its start would let interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _importable_main() -> Iterator[None]:
    """Let the ranks do without a program that they cannot read again, such as one from standard input."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.exists(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


@functools.cache
def _tidy_after_fork_server(owner: int) -> int | None:
    """multiprocessing removes its server's socket when Python exits, but a kernel is often killed instead.

    A child of multiprocessing keeps its socket in its parent's folder, so it must not be removed with the child.

    Returns:
        The descriptor that the janitor waits at, which the end of this process closes, however it ends.
    """
    if parent_process():
        return None
    cleaner = janitor.start(get_temp_dir())
    descriptor = os.dup(cleaner.stdin.fileno())
    cleaner.stdin.close()
    cleaner.returncode = 0  # it outlives us on purpose; Python would warn of a child that is still running
    return descriptor


def _start_processes(settings: Settings, *args: Any) -> mp.ProcessContext:
    method = settings.start_method
    if method == "forkserver":
        get_context(method).set_forkserver_preload(_PRELOADED)
        _tidy_after_fork_server(os.getpid())
    return mp.start_processes(rank_main, (settings, *args), settings.world_size, join=False, start_method=method)


def end_in_order(ranks: list[RankProcess]) -> list[str]:
    """Have the ranks close their group and leave; return what went wrong, a sentence a rank.

    Whoever needs longer than `END_LIMIT_S` is left to `end_now`.
    """
    for rank in ranks:
        rank.tell(0, "end")
    deadline = time.monotonic() + END_LIMIT_S
    troubles = []
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            troubles.append(f"rank {rank.rank} had returned but did not leave within {END_LIMIT_S:g} s and was killed")
        elif rank.process.exitcode != 0:
            troubles.append(f"rank {rank.rank} had returned and then ended with exit code {rank.process.exitcode}")
    return troubles


def end_now(ranks: list[RankProcess], cleaner: subprocess.Popen, folder: str, owner: int) -> None:
    """Kill whatever is left of the ranks, their children included, and remove their folder."""
    if os.getpid() != owner:
        return  # a fork of the parent: the ranks are not its own
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.kill()  # it may not have become the head of its process group yet
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.pipe.close()
        with suppress(OSError):
            os.unlink(rank.error_file)
    for semaphore in janitor.remove(folder):
        resource_tracker.unregister(semaphore, "semaphore")  # else Python's own janitor complains at the end
    cleaner.kill()
    cleaner.stdin.close()
    cleaner.wait()
