"""How is a command run under observation, so that it notices nothing of it?

It inherits this process's terminal, streams and process group; signals are passed on, and its exit status is returned.
All that is added is two variables of its environment, a folder that goes with it, and words on the standard error once
something is wrong.

Read next: `inside/sitecustomize.py`, which those variables bring into its processes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_course.launcher import janitor
from ddp_course.observe.watch import Watch

INSIDE = Path(__file__).with_name("inside")
VARIABLE = "DDP_COURSE_RUN"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LONGEST_FOLDER = 75  # letters: a socket's path has up to 103, and a name is added
HUNG = 124  # as the command `timeout` has it
END_LIMIT_S = 10.0  # after SIGTERM
NONE_SEEN = (
    "no rank of it was seen, so nothing will be said of it. Either it starts none on this machine, or they run in a "
    "container, under python -E or -I, or a script sets PYTHONPATH itself."
)
CONCLUSIONS = {
    "hung": "No rank moved, so the program was ended.",
    "waits": "A rank still computes, so the program is left to run.",
    "unseen": "Ranks that are not seen here may move, so the program is left to run.",
}


class NotStarted(Exception):
    """The command cannot be started, for the reason that is its cause."""


def run(command: Sequence[str], limit_s: float, say: Callable[[str], None]) -> int:
    """Run a command, and `say` what is wrong once it hangs or dies.

    Returns:
        Its exit status; 128 and its number if a signal has ended it; `HUNG` if it did not move and was ended.
    Raises:
        NotStarted: the command cannot be started.
        OSError: it cannot be watched, as without room for a folder.
    """
    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    folder = Path(tempfile.mkdtemp(prefix="ddp-run-", dir=None if short else "/tmp"))  # for this user alone
    cleaner = janitor.start(str(folder))
    try:
        watch = Watch(folder, limit_s)
        try:
            running = _Run(command, watch, say)
            try:
                return running.status()
            except Exception as error:  # ours; the program is not to suffer from it
                say(f"watching has failed, and the program goes on without it: {error!r}")
                return running.status_unwatched()
        finally:
            signal.set_wakeup_fd(-1)
            watch.close()
    finally:
        janitor.remove(str(folder))
        cleaner.kill()
        cleaner.stdin.close()
        cleaner.wait()


class _Run:
    """One run of one command."""

    def __init__(self, command: Sequence[str], watch: Watch, say: Callable[[str], None]):
        self.watch, self.say, self.stopped = watch, say, False
        path = os.pathsep.join(filter(None, (str(INSIDE), os.environ.get("PYTHONPATH"))))
        self.rung, self.bell = socket.socketpair()
        self.bell.setblocking(False)
        signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *PASSED_ON):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda *_: None)
        watch.when(self.rung, self.signalled)
        self.mark = f"{VARIABLE}={watch.folder}"
        environment = os.environ | {"PYTHONPATH": path, VARIABLE: str(watch.folder)}
        try:
            self.child = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise NotStarted(error) from error

    def signalled(self, numbers: bytes) -> None:
        """Pass signals on; Ctrl-C has reached the command already if both stand in the terminal's foreground."""
        for number in set(numbers) - {signal.SIGCHLD}:
            self.stopped = self.stopped or number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGINT or not _in_foreground():
                with suppress(PermissionError):  # of another user, as with sudo
                    self.child.send_signal(number)

    def status_unwatched(self) -> int:
        """Wait for the command's end, and do no more than pass signals on."""
        while self.child.poll() is None:
            if select.select([self.rung], [], [], 1.0)[0]:
                self.signalled(self.rung.recv(4096))
        return _as_shells_say(self.child.returncode)

    def status(self) -> int:
        """Wait for the command's end, and end it if no rank moves."""
        while self.child.poll() is None:
            self.watch.listen(END_LIMIT_S if self.stopped else self.watch.until_next())
            if self.stopped or self.watch.until_next() > 0:
                continue
            found = self.watch.found()
            if found == "none":
                self.say(NONE_SEEN)
            elif found:
                told = self.told(CONCLUSIONS[found])
                if found == "hung":
                    self.end()  # first: what a launcher says of being ended would bury the report
                if told:
                    self.say(told)
                if found == "hung":
                    return HUNG
        self.watch.finish()
        code = self.child.returncode
        if code and not self.stopped and self.watch.failed_at is not None and (told := self.told("", ended=True)):
            self.say(told)
        return _as_shells_say(code)

    def told(self, last: str, ended: bool = False) -> str:
        """Return which rank failed first, or else who waits for whom; "" if neither is known."""
        from ddp_course.observe.report import failed, hung  # with torch: not before something is wrong

        if not ended:
            self.watch.where()
        error = failed(self.watch) or (None if ended else hung(self.watch))
        return "\n".join(filter(None, (error.report, last, error.log_line))) if error else ""

    def end(self) -> None:
        """Ask the command to end, as a launcher would be asked, and see to it that nothing of it stays."""
        self.child.terminate()
        deadline = time.monotonic() + END_LIMIT_S
        while self.child.poll() is None and time.monotonic() < deadline:
            self.watch.listen(deadline - time.monotonic())
        if os.path.isdir("/proc"):
            janitor.kill_marked(self.mark)
        self.child.kill()
        self.child.wait()


def _as_shells_say(code: int) -> int:
    return 128 - code if code < 0 else code


def _in_foreground() -> bool:
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:  # the standard input may be a file
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False
