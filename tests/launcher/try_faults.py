"""How good are the launcher's reports on programs whose bug is known?

    python -m tests.launcher.try_faults                          # every row of the table: about ten minutes
    python -m tests.launcher.try_faults sizes_differ sleeps      # these rows
    python -m tests.launcher.try_faults --reports FOLDER         # also store every report

Prints for each fault: the verdict, the rank that was named, the seconds from when the last rank was up until the
report, and the report's first line. The launcher runs in a process of its own. One that blocks or dies is recorded
and replaced, so the trial continues. Whatever a row leaves behind is listed; its processes are ended and its files
deleted, except in shared memory, where other programs on this machine have files too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from ddp_course import RankError, launch
from tests.conftest import rank_processes
from tests.launcher.fault_table import FAULTS, VERDICTS, Fault, judge
from tests.launcher.faults_on_ranks import all_recover_together

MARK = "DDP_COURSE_FAULT_TRIAL"  # in the environment of every process that the trial starts
NOT_OURS = ("pymp-", "torchinductor_")  # folders that multiprocessing and torch keep while a process lives
SHARED_MEMORY = Path("/dev/shm")


# --- In the launcher's process -------------------------------------------------------------------------------


def stamp(fn: Callable, folder: Path) -> Callable:
    (folder / f"{os.getpid()}").touch()
    return fn


class Stamped:
    """A function that notes when a rank unpickles it, and is the bare function there: no frame of ours is added."""

    def __init__(self, fn: Callable, folder: Path):
        functools.update_wrapper(self, fn)
        self.fn, self.folder = fn, folder

    def __call__(self, *args):
        return self.fn(*args)

    def __reduce__(self) -> tuple:
        return stamp, (self.fn, self.folder)


def run_row(fault: Fault) -> dict:
    """Run one fault here; return the verdict and what it rests on."""
    with tempfile.TemporaryDirectory(prefix="stamps-") as stamps:
        error = values = None
        try:
            values = launch(
                Stamped(fault.run, Path(stamps)),
                fault.world_size,
                timeout_s=fault.timeout_s,
                limit_s=fault.timeout_s + 10,
                start_method="forkserver",
                quiet=True,
            )
        except RankError as raised:
            error = raised
        except Exception:
            answer = {"verdict": "missed", "lacks": "launch raised no RankError", "report": traceback.format_exc()}
        end = time.time()
        up = [file.stat().st_mtime for file in Path(stamps).iterdir() if file.name != str(os.getpid())]
    if error is not None or values is not None:
        verdict, lacks = judge(fault, error, values)
        answer = {"verdict": verdict, "lacks": lacks, "report": error.report if error else f"returned {values}"}
    return answer | {
        "rank": error.rank if error else None,
        "seconds": end - max(up) if up else None,
        "left": [f"process {process.pid}, a rank, after the report" for process in rank_processes()],
    }


def serve(connection: Connection) -> None:
    """Run the rows whose names arrive, until the trial closes its end."""
    faults = {fault.name: fault for fault in FAULTS}
    launch(all_recover_together, 3, start_method="forkserver", quiet=True)  # the fork server imports torch only once
    connection.send("ready")
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        connection.send(run_row(faults[name]))


# --- The trial ------------------------------------------------------------------------------------------------


class Launcher:
    """A process that runs rows, and a temporary folder that should be empty whenever no row runs."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="faults-")
        ours, its = socket.socketpair()
        command = [sys.executable, "-m", "tests.launcher.try_faults", "--serve", str(its.fileno())]
        environment = os.environ | {MARK: str(os.getpid()), "TMPDIR": self.folder.name}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], **quiet)
        its.close()
        self.connection = Connection(ours.detach())
        self.connection.recv()  # it has started ranks once, so no row pays for an import

    def ask(self, fault: Fault) -> dict:
        """Run one row; a launcher that gives no answer is "blocked", or "missed" when it died."""
        self.connection.send(fault.name)
        nothing = {"report": "", "rank": None, "seconds": None, "left": []}
        if not self.connection.poll(fault.timeout_s + 10 + 30):
            return nothing | {"verdict": "blocked", "lacks": "no report in time"}
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            status = self.process.wait()
            return nothing | {"verdict": "missed", "lacks": f"the launcher's process ended with status {status}"}

    def left_behind(self) -> list[str]:
        """What outlived the last row: ranks without a parent, files, shared memory of a process that is gone."""
        left = [f"process {process.pid} without a parent" for process in self.orphans()]
        names = [path.name for path in Path(self.folder.name).iterdir()]
        return left + [f"{name} in the temporary folder" for name in names if not name.startswith(NOT_OURS)]

    def orphans(self) -> list[psutil.Process]:
        family = {self.process.pid}
        if psutil.pid_exists(self.process.pid):
            family |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        found = [process for process in marked_processes() if process.pid not in family]
        return psutil.wait_procs(found, timeout=3)[1] if found else []

    def close(self) -> list[str]:
        """End the launcher, by force if need be; return what outlived it, once that is ended as well."""
        self.connection.close()
        try:
            self.process.wait(timeout=5)
            orderly = True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            orderly = False
        # Ten seconds also after a kill: multiprocessing's tracker then deletes what the launcher could not.
        stragglers = psutil.wait_procs(marked_processes(), timeout=10)[1]
        left = []
        for process in stragglers:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(f"process {process.pid} outlived the launcher: {' '.join(process.cmdline())[:80]}")
                process.kill()
        psutil.wait_procs(stragglers, timeout=5)
        names = [path.name for path in Path(self.folder.name).iterdir()]
        self.folder.cleanup()
        # A launcher that was killed could tidy up nothing.
        left += [f"{name} in the temporary folder" for name in names if not name.startswith(NOT_OURS[1:])]
        return left if orderly else []


def marked_processes() -> list[psutil.Process]:
    """Every live process that the trial started, also one that lost its parent."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == str(os.getpid())
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


def orphaned_shared_memory() -> set[Path]:
    """Shared memory that no live process maps; names do not say whose they were."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text()
    return {path for path in SHARED_MEMORY.glob("*") if str(path) not in mapped}


def one_line(fault: Fault, answer: dict) -> str:
    seconds = f"{answer['seconds']:6.1f}" if answer["seconds"] is not None else "     -"
    first = (answer["report"].strip().splitlines() or [""])[0]
    return f"{fault.name:36} {answer['verdict']:16} {str(answer['rank']):>4} {seconds}  {first[:150]}"


def trial(faults: list[Fault], reports: Path | None) -> None:
    """Run every fault in turn; print the table, what each bad row lacks, and what was left behind."""
    print(f"{'fault':36} {'verdict':16} rank seconds  report")
    answers: dict[str, dict] = {}
    before = orphaned_shared_memory()
    seen: dict[Path, str] = {}
    launcher = Launcher()
    for fault in faults:
        answers[fault.name] = answer = launcher.ask(fault)
        print(one_line(fault, answer), flush=True)
        if reports is not None:
            reports.mkdir(parents=True, exist_ok=True)
            (reports / f"{fault.name}.txt").write_text(answer["report"] + "\n")
        gone = answer["verdict"] == "blocked" or launcher.process.poll() is not None
        if not gone:
            answer["left"] += launcher.left_behind()
        if gone or answer["left"]:
            answer["left"] += launcher.close()
            launcher = Launcher()
        shared = orphaned_shared_memory() - before - set(seen)
        answer["left"] += [f"{len(shared)} files in /dev/shm, such as {min(shared).name}"] if shared else []
        seen |= dict.fromkeys(shared, fault.name)
    at_the_end = launcher.close()
    for path in orphaned_shared_memory() & set(seen):
        at_the_end.append(f"{path.name} in /dev/shm since {seen[path]}, if it is not another program's")

    counts = Counter(answer["verdict"] for answer in answers.values())
    print("\n" + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS), f"of {len(faults)}")
    late = [
        f"{fault.name} ({answers[fault.name]['seconds']:.1f} s, timeout {fault.timeout_s:g} s)"
        for fault in faults
        if fault.returns is None and (answers[fault.name]["seconds"] or 0) > fault.timeout_s + 2
    ]
    print("Later than the timeout and 2 s:", ", ".join(late) or "none")
    for verdict in VERDICTS[1:]:
        for name, answer in answers.items():
            if answer["verdict"] == verdict:
                print(f"  {verdict}: {name}: {answer['lacks']}")
    left = [f"{name}: {thing}" for name, answer in answers.items() for thing in dict.fromkeys(answer["left"])]
    left += [f"after the last row: {thing}" for thing in at_the_end]
    print("Left behind:", "".join(f"\n  {thing}" for thing in left) or "nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows of the table; all when none is named")
    parser.add_argument("--reports", type=Path, help="store every report in this folder")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        os.set_inheritable(arguments.serve, False)  # or a rank that is left would keep the trial waiting
        return serve(Connection(arguments.serve))
    unknown = set(arguments.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    trial([fault for fault in FAULTS if not arguments.names or fault.name in arguments.names], arguments.reports)


if __name__ == "__main__":
    main()
