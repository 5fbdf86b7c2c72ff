"""Machines for the tests of the meeting: processes, each in a network namespace of its own where that is allowed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddp_course.diagnose import arrival, doctor, meeting
from ddp_course.launch.processes import _PRELOADED

NEW_NET, NEW_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET and CLONE_NEWUTS
NETWORK = "10.77.0"


@dataclass
class Told:
    """What one machine printed, and how it ended."""

    status: int
    text: str
    seconds: float

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
    namespace: str | None = None
    name: str | None = None  # its host name
    environ: dict[str, str] = field(default_factory=dict)
    stuck: bool = False  # as in a call into compiled code that never returns


def run(machines: list[Machine], folder: Path, limit_s: float = 40.0) -> list[Told]:
    """Run the doctor on all machines at once and return what they told, in order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)  # the same as launch's: whichever test is first starts the server
    outputs = [folder / f"{number}-{time.monotonic_ns()}" for number in range(len(machines))]
    processes = [context.Process(target=_be, args=(m, str(o))) for m, o in zip(machines, outputs, strict=True)]
    started = time.monotonic()
    try:
        for process in processes:
            process.start()
        ended = []
        for process in processes:
            process.join(max(0.0, started + limit_s - time.monotonic()))
            ended.append(time.monotonic() - started)
        return [
            Told(p.exitcode if p.exitcode is not None else -1, o.read_text(), s)
            for p, o, s in zip(processes, outputs, ended, strict=True)
        ]
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
        meeting.meet = lambda report, clock, largest, now: (now("waiting for the others"), threading.Event().wait())
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    status = doctor.main(machine.options)
    sys.stdout.flush()
    sys.exit(status)


def _must(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def why_no_namespaces() -> str:
    """Return why this machine cannot build network namespaces, or nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "building network namespaces needs root"
    if shutil.which("ip") is None:
        return "building network namespaces needs `ip`, of the package iproute2"
    try:
        with hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be built here: {error.stderr.strip()}"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """Build `count` namespaces on one switch; number n, from 1 on, has 10.77.0.n on its eth0. Nothing outside sees it.

    Yields:
        The namespaces' names.
    """
    stem = f"doctor{os.getpid()}"
    switch, names = f"{stem}-s", [f"{stem}-{number}" for number in range(1, count + 1)]
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
