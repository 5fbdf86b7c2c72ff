"""Machines for the tests of the meeting: processes, each on a host of its own where that is allowed."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ddp_course.commands import doctor
from ddp_course.diagnose import reachability
from ddp_course.launcher.processes import _PRELOADED

NEW_NET, NEW_NAME, LIMIT_S = 0x40000000, 0x04000000, 40  # CLONE_NEWNET and CLONE_NEWUTS


@dataclass
class Machine:
    """One run of the doctor."""

    options: list[str]
    namespace: str | None = None  # the host's, see tests/cluster/hosts.py
    name: str | None = None  # its host name
    environ: dict[str, str] = field(default_factory=dict)
    stuck: bool = False  # as in a call into compiled code that never returns


@dataclass
class Told:
    """How one machine ended, and what it printed."""

    status: int | None  # None: it had to be killed
    report: dict

    def __post_init__(self) -> None:
        self.verdicts = {each["name"]: each for each in self.report["verdicts"]}
        self.problem = next((each for each in self.report["verdicts"] if each["state"] == "problem"), None)


def run(machines: list[Machine], folder: Path) -> list[Told]:
    """Run the doctor on all machines at once and return what they told, in order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # the same as launch's: whichever test is first starts the server
    outputs = [folder / f"machine-{number}" for number in range(len(machines))]
    processes = [context.Process(target=_be, args=(m, str(o))) for m, o in zip(machines, outputs, strict=True)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        return [Told(p.exitcode, json.loads(o.read_text())) for p, o in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be(machine: Machine, output: str) -> None:
    """In the process: become the machine, write to the file `output`, and run the doctor."""
    libc = ctypes.CDLL(None, use_errno=True)
    if machine.namespace:
        with open(f"/run/netns/{machine.namespace}") as namespace:
            assert libc.setns(namespace.fileno(), NEW_NET) == 0, os.strerror(ctypes.get_errno())
        assert libc.unshare(NEW_NAME) == 0, os.strerror(ctypes.get_errno())
        socket.sethostname(machine.name)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(variable, None)
    os.environ.update(machine.environ)
    reachability.NOT_A_MEETING_S, reachability.GUARD_S = 1.0, 0.5
    if machine.stuck:
        reachability.meet = lambda meeting: threading.Event().wait()
    with open(output, "w") as sys.stdout:
        sys.exit(doctor.main(machine.options))
