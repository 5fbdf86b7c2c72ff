"""Why do processes not start, or start and stand still?

A rank is a process of its own. A fresh one (spawn) must import the function that it is to run, which it cannot when
the function lives in a notebook or at a prompt. A copied one (fork) inherits memory but no threads, so whatever
CUDA or the CPU's threads had set up is a ruin in it.

Read next: `docker.py`, for ranks inside containers.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import get_context

import torch

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, watch
from ddp_course.diagnose.recognise import recognise

CELL = "def greet(rank, *args):\n    print(f'rank {rank} is here')\n"
START = "import torch.multiprocessing as mp\nmp.spawn(greet, nprocs=1)\n"


def spawn_from_a_cell() -> Diagnosis:
    begin = time.monotonic()
    prompt = [sys.executable, "-c", CELL + START]  # as in a notebook, there is no file to import from
    done = subprocess.run(prompt, capture_output=True, text=True, timeout=120)
    return replace(recognise(done.stderr), seconds=time.monotonic() - begin)


def launch_from_a_cell() -> Diagnosis:
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    return watch(cell["greet"], world_size=2, init=False)  # the function travels by value


def multiply(device: str) -> float:
    """Compute something large enough for CUDA, or for several threads of the CPU."""
    return (torch.ones(1000, 1000, device=device) @ torch.ones(1000, 1000, device=device)).sum().item()


def fork_after_computing() -> Diagnosis:
    def prepare(rank, world_size):
        torch.set_num_threads(2)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        multiply(device)
        with get_context("fork").Pool(1) as workers:  # as a DataLoader's workers start on Linux
            workers.apply(multiply, (device,))

    # CUDA says at once what is wrong, but it may take seconds to start; a CPU's child says nothing.
    return watch(prepare, world_size=1, limit_s=30 if torch.cuda.is_available() else 2)


def start_afresh_after_computing() -> Diagnosis:
    def prepare(rank, world_size):
        torch.set_num_threads(2)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        multiply(device)
        with get_context("forkserver").Pool(1) as workers:
            workers.apply(multiply, (device,))

    return watch(prepare, world_size=1, limit_s=60)


FAULTS = (
    Fault(
        name="function-from-main",
        title="A function from a notebook cannot be found by the ranks",
        symptom="\"Can't get attribute 'greet' on <module '__main__'>\", or only ProcessExitedException.",
        cause="mp.spawn sends the function's name, not the function. The new process imports `__main__` to find it, "
        "and a cell or a prompt is nothing that can be imported.",
        cure="Put the function into a file and import it; or use `launch`, which sends the function itself.",
        met_at="https://github.com/pytorch/pytorch/issues/20375",
        provoke=spawn_from_a_cell,
        fix=launch_from_a_cell,
    ),
    Fault(
        name="forked-cuda",
        title="A process is forked after CUDA, or the CPU's threads, were used",
        symptom="With a GPU: 'Cannot re-initialize CUDA in forked subprocess'. Without: the child stands still in its "
        "first large product, and whoever waits for it stands still too.",
        cause="fork copies the memory of a process, but only one of its threads. The state of the CUDA driver, or of "
        "the pool of threads that multiplies matrices, is copied without those who keep it up.",
        cure="Start processes by spawn or forkserver, in a DataLoader by multiprocessing_context; or fork before "
        "anything is computed. On this CPU you see the hang; the message needs a GPU.",
        met_at="https://github.com/pytorch/pytorch/issues/17199",
        provoke=fork_after_computing,
        fix=start_afresh_after_computing,
    ),
)
