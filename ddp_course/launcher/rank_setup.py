"""What does a process need before it can be a rank?

A pipe to its parent that breaks with the parent, a session of its own so that it ends with all its children, files for
what it prints, and the variables that torchrun would have set.

Read next: `worker.py`, what it does then.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from ddp_course.launcher.settings import Settings
from ddp_course.rendezvous import pin_loopback


def keep_own_pipe(rank: int, pipes: list[Connection]) -> Connection:
    """Close the other ranks' ends: a pipe breaks only when nobody else holds it."""
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()
    return pipes[rank]


def prepare(rank: int, settings: Settings, folder: str, environ: dict[str, str]) -> None:
    """Give this process what a rank has for itself."""
    _take_own_session()
    _keep_things_together(folder)
    _write_to_own_files(rank, folder)
    _set_environment(rank, settings, environ)


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
    out = os.open(f"{folder}/rank{rank}.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for name, descriptor in {"stdout": 1, "stderr": 2}.items():
        getattr(sys, name).flush()
        os.dup2(out, descriptor)
        text = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, text)
    os.close(out)
    stacks = open(f"{folder}/rank{rank}.stack", "w")  # noqa: SIM115  (lives as long as the rank)
    faulthandler.enable(stacks)  # on a crash in compiled code
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


def _set_environment(rank: int, settings: Settings, environ: dict[str, str]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": settings.world_size}
    places["LOCAL_WORLD_SIZE"] = settings.world_size
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]  # of the time when the fork server started
    os.environ.update(environ | {name: str(value) for name, value in places.items()})
    torch.set_num_threads(settings.threads)
    pin_loopback()
