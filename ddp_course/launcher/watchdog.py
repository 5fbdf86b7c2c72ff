"""Which rank hangs, when no parent is there to ask?

`launch` asks its ranks through pipes. Under torchrun each rank has a `Watchdog` instead: a thread that looks a few
times a second whether this rank waits too long in a collective. If it does, or if the program raises, the rank
sounds the alarm at the job's store. Every rank posts where it is, one of them prints the report that `launch` would
give, and all end with a nonzero status, so that torchrun ends or restarts the job.

    watchdog = Watchdog(30)                          # before the group: it switches torch's recorder on
    with process_group() as place, watchdog:
        train(place.rank, place.world_size)

Left out on purpose: ending a rank on another host that holds its interpreter; its launcher does that.
Read next: `watchdog_report.py`, how many ranks make one report.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace

import torch.distributed as dist

from ddp_course import groups
from ddp_course.launcher import lines, watchdog_report
from ddp_course.launcher.bulletin import Address, Bulletin, Note, birth, store_address
from ddp_course.launcher.failure import Failure, describe
from ddp_course.launcher.interception import recorder
from ddp_course.launcher.rank_status import Collective, Whereabouts
from ddp_course.launcher.recorder import Waits

HUNG_STATUS = 124  # of a rank that the watchdog ends; timeout(1) has the same
SLOWEST_LOOK_S = 0.2
SETTLE_S = 0.3  # after the alarm: time for the others to fail or finish too
REPORT_LIMIT_S = 5.0  # for the whole report; then each rank speaks for itself
END_LIMIT_S = 2.0  # for the threads to end


class Watchdog:
    """Reports a hang of the ranks that run inside `with`, and ends them.

    A rank that waits in one collective for `timeout_s` is a hang; a long computation is none. A program that raises on
    one rank is reported, and ends the others too; its exception goes on after the report. A group's own time limit, if
    it is shorter, is reported in the same way.

    Make it before the process group is opened, so that every call is recorded, and enter it once the group is open: the
    report counts collectives from there. It takes `faulthandler.dump_traceback_later`, of which a process has one: that
    tells the line of a rank that holds the interpreter, to a neighbour on its host or, without one, on its own stderr.

    Args:
        timeout_s: how long a rank may wait in one collective, in seconds.
    Raises:
        ValueError: `timeout_s` is not a positive number, or (on entry) this process has no launcher's variables.
    Collective: none. Every rank of the job should enter; one that does not is reported as silent.
    """

    def __init__(self, timeout_s: float):
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds, more than 0")
        recorder()  # switches it on
        self.timeout_s = timeout_s
        self.tick_s = min(SLOWEST_LOOK_S, timeout_s / 10)
        self.failure: Failure | None = None  # of the program on this rank
        self.goodbye: Whereabouts | None = None  # of the program, once it has left
        self.overdue: Collective | None = None  # what this rank has waited in for too long
        self.alarm = False  # sounded by this rank or heard from another
        self.told = False
        self.wake = threading.Event()  # something has happened: an alarm, or the end
        self.leaving = threading.Event()  # the program has left the `with`
        self.known = threading.Event()  # a neighbour finds this rank at the board, or there is no board
        self.finished = threading.Event()  # nothing more is to be said at the store
        self.lost = ""  # why the store cannot be reached

    def __enter__(self) -> Watchdog:
        self.place = groups.read_place(backend="gloo")  # the backend does not matter here
        self.address = ":".join(map(str, store_address()))
        self.mark = recorder().mark()  # collectives are counted from here
        self.main_thread = threading.get_ident()
        self.stacks = tempfile.TemporaryFile("a+")  # noqa: SIM115  (has no name, so it cannot be left behind)
        self.rearm()
        self.threads = [
            threading.Thread(target=work, name=f"ddp_course {work.__name__}", daemon=True)
            for work in (self.guard, self.talk)
        ]
        for thread in self.threads:
            thread.start()
        if dist.is_initialized():
            self.known.wait(END_LIMIT_S)  # before the program can take the interpreter for itself
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        if error is not None and not _leaves_in_order(error):
            self.failure = describe(error, self.place.rank)
            self.alarm = self.alarm or isinstance(error, Exception)  # Ctrl-C and sys.exit: others decide for themselves
        self.goodbye = self.where("returned")  # now: what the program does after the `with` is no part of it
        self.leaving.set()
        self.wake.set()
        self.finished.wait(REPORT_LIMIT_S if self.alarm else END_LIMIT_S)
        for thread in self.threads:
            thread.join(END_LIMIT_S)
        faulthandler.cancel_dump_traceback_later()
        self.stacks.close()

    # --- One thread looks, and never touches the network

    def guard(self) -> None:
        """Look until the program leaves; on an alarm, see to it that this rank ends."""
        waits = Waits(recorder(), self.tick_s, self.mark)
        while not self.wake.wait(self.tick_s):
            self.rearm()
            self.overdue = waits.longer_than(self.timeout_s)
            if self.overdue:
                self.sound_alarm()
        if not self.alarm:
            return
        self.finished.wait(REPORT_LIMIT_S)
        if self.overdue and not self.told:
            watchdog_report.say(self.alone())
        if not self.leaving.is_set():  # else the program has an exception of its own to show, or has done its work
            _end()

    def sound_alarm(self) -> None:
        self.alarm = True
        self.wake.set()

    def rearm(self) -> None:
        """Put off the dump of this rank's stacks. It is written only while Python's threads cannot run."""
        faulthandler.cancel_dump_traceback_later()
        if self.place.local_world_size == 1:  # no neighbour to read a file: all it can do is to say it itself, once
            return faulthandler.dump_traceback_later(self.timeout_s + SETTLE_S, file=2)
        if os.fstat(self.stacks.fileno()).st_size:
            self.stacks.truncate(0)
        faulthandler.dump_traceback_later(min(5.0, max(1.0, self.timeout_s / 2)), repeat=True, file=self.stacks)

    def alone(self) -> str:
        return (
            f"rank {self.place.rank} of {self.place.world_size} waited {self.timeout_s:g} s in {self.overdue}\n"
            f"  it was at {self.where().line}\n"
            f"The job's store at {self.address} did not answer, so nothing is known of the other ranks. {self.lost}"
        )

    # --- The other talks to the store, and may be kept waiting by it

    def talk(self) -> None:
        """Listen for an alarm; take part in the report, or say goodbye."""
        try:
            while not dist.is_initialized():  # without an agent, rank 0's own process is the store
                if self.wake.wait(self.tick_s):
                    return
            board = Bulletin(self.place, Address(os.getpid(), birth(os.getpid()), self.stacks.fileno()))
            self.known.set()
            while not self.wake.wait(self.tick_s):
                if board.alarmed():
                    self.sound_alarm()
            if self.alarm:
                board.sound_alarm()
                time.sleep(SETTLE_S)
                self.told = watchdog_report.give(board, Note(self.where(), self.failure), self.timeout_s)
            else:
                board.post(Note(self.where(), self.failure, speaks=False))
        except RuntimeError as error:  # the store is gone, as when rank 0 hosts it and has finished
            self.lost = str(error).partition("\n")[0]
        finally:
            self.known.set()
            self.finished.set()

    def where(self, status: str = "running") -> Whereabouts:
        if self.goodbye:
            return self.goodbye
        here = recorder().whereabouts(self.place.rank, lines.own_line(lines.stack_of(self.main_thread)), self.mark)
        if self.failure:
            detail = "" if self.failure.talking else self.failure.error_type
            return replace(here, status="raised", line=self.failure.line, detail=detail)
        if status == "returned":  # waits for nothing, though gloo notes the end of a collective a moment late
            return replace(here, status=status, line=None, recent=[replace(c, finished=True) for c in here.recent])
        return here


def _leaves_in_order(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _end() -> None:
    """End this process at once, whatever its main thread is doing; what was printed before is shown."""
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(SETTLE_S)  # the main thread may be in the middle of a print
    os._exit(HUNG_STATUS)
