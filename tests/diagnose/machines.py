"""Machines for the tests of the meeting: processes, each on a host of its own where that is allowed."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddp_course.commands import doctor
from ddp_course.diagnose import arrival, meeting
from ddp_course.launcher.processes import _PRELOADED

NEW_NET, NEW_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS


@dataclass
class Told:
    """What one machine printed, and how it ended."""

    status: int | None  # None: it had to be killed
    text: str

    @property
    def report(self) -> dict:
        return json.loads(self.text)

    @property
    def verdicts(self) -> dict[str, dict]:
        return {each["name"]: each for each in self.report["verdicts"]}

    @property
    def problem(self) -> dict:
        """The one problem it told."""
        (found,) = [each for each in self.report["verdicts"] if each["state"] == "problem"]
        return found


@dataclass
class Machine:
    """One run of the doctor."""

    options: list[str]
    namespace: str | None = None  # the host's, see tests/cluster/hosts.py
    name: str | None = None  # its host name
    environ: dict[str, str] = field(default_factory=dict)
    stuck: bool = False  # as in a call into compiled code that never returns


def run(machines: list[Machine], folder: Path, limit_s: float = 40.0) -> list[Told]:
    """Run the doctor on all machines at once and return what they told, in order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # the same as launch's: whichever test is first starts the server
    outputs = [folder / f"machine-{number}" for number in range(len(machines))]
    processes = [context.Process(target=_be, args=(m, str(o))) for m, o in zip(machines, outputs, strict=True)]
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [Told(p.exitcode, o.read_text()) for p, o in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be(machine: Machine, output: str) -> None:
    """In the process: become the machine, write to the file `output`, and run the doctor."""
    if machine.namespace:
        with open(f"/run/netns/{machine.namespace}") as namespace:
            _must(ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NET))
        if machine.name:
            _must(ctypes.CDLL(None, use_errno=True).unshare(NEW_NAME))
            socket.sethostname(machine.name)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(variable, None)
    os.environ.update(machine.environ)
    arrival.NOT_A_MEETING_S, meeting.GUARD_S = 1.0, 0.5
    if machine.stuck:
        meeting.meet = stand_still
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    status = doctor.main(machine.options)
    sys.stdout.flush()
    sys.exit(status)


def listening_at(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    return {c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"}


def stand_still(report: meeting.Report, *_: object) -> None:
    report.phase = "waiting for the others"
    threading.Event().wait()


def _must(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
