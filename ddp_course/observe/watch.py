"""Which processes does a program have, do they move, and how does each end?

Each process that starts connects to a socket in a private folder. It is asked a few times within the limit how far it
is: where its main thread stands, and how many calls torch has recorded. A process moves if one of these changes, or,
while it waits for no other rank, if it or a process that it has started computes. The end of its connection is the end
of the process, so the first to end is known.

Left out on purpose: ranks on other machines. Where some are, nobody is called hung for what is seen here.
Read next: `report.py`, what is made of the answers.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_course.observe.system import exit_status, processor_seconds, stat

ANSWER_S = 20.0  # for all to say where they are: torch takes more than a second of a core to find its calls' lines
COMPUTES = 0.02  # of a core: less is what threads do that only look after something
ASKED_IN_LIMIT = 4  # times
LONGEST_S = 3600.0  # that is waited in one go: the system takes no number as large as one likes
SETTLE_S = 0.3  # for a stack to be written


@dataclass(eq=False)
class Process:
    """What is known of one process of the program."""

    link: socket.socket
    pid: int = 0
    parent: int = 0
    rank: int | None = None
    world: int | None = None
    attempt: int = 0  # torchrun may start the ranks again
    told: dict[str, Any] = field(default_factory=dict)  # when it was asked last, raised, or ended
    raised: dict[str, Any] | None = None
    ended: bool = False
    code: int | None = None  # exit status; negative for a signal; None if nobody saw it
    order: float = 0.0  # when it raised or ended
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    waits: bool = False  # torch has calls that are not complete
    answered: bool = True
    seconds: float = 0.0  # of a processor, its own alone
    _unread: bytes = b""
    _at: Any = None
    _seconds: float = 0.0
    _checked: float = field(default_factory=time.monotonic)

    def ask(self, question: bytes) -> None:
        self.answered = False
        if question != b"?":
            self.told = {}
        with suppress(OSError):
            self.link.send(question)

    @property
    def died(self) -> bool:
        """Whether it has ended, and not as a program does that is done."""
        return self.ended and (bool(self.code) or self.code is None and self.told.get("what") != "ends")

    def read(self) -> list[dict[str, Any]]:
        """Return what it has said since; raises EOFError at the end."""
        try:
            new = self.link.recv(1 << 20)
        except OSError:
            new = b""
        if not new:
            raise EOFError
        *lines, self._unread = (self._unread + new).split(b"\n")
        return [said for line in lines if (said := _parsed(line))]

    def note(self, said: dict[str, Any]) -> None:
        self.pid, self.parent = said["pid"], said["parent"]
        self.rank, self.world = said.get("rank", self.rank), said.get("world", self.world)
        self.attempt = said.get("attempt", self.attempt)
        self.answered = self.answered or said["what"] in ("moves", "where")
        if said["what"] == "moves":
            at = (said.get("stack"), said.get("calls"))
            if at != self._at:
                self._at, self.moved = at, time.monotonic()
            self.seconds = said.get("seconds", 0.0)
            self.waits = any(map(incomplete, said.get("calls", [])))
        elif said["what"] != "starts":
            self.told = said
        if said["what"] == "raised":
            self.raised, self.order = said, time.monotonic()

    def computes(self, seconds: float) -> None:
        """Note the processor time that it and its children have used by now."""
        now = time.monotonic()
        used, self._seconds = seconds - self._seconds, seconds
        elapsed, self._checked = now - self._checked, now
        if used > COMPUTES * elapsed and not (self.waits and self.answered):
            self.moved = now


def _parsed(line: bytes) -> dict[str, Any] | None:
    """What a line says; None of half a line, which a process leaves that could not send the rest in time."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def incomplete(recorded: str) -> bool:
    """Whether a Flight Recorder knows a group whose last call is not complete."""
    groups = json.loads(recorded).get("pg_status", {}).values()
    return any(int(each["last_enqueued_collective"]) > int(each["last_completed_collective"]) for each in groups)


class Watch:
    """The processes that have connected in `folder`."""

    def __init__(self, folder: Path, limit_s: float):
        self.folder, self.limit_s = folder, limit_s
        self.processes: list[Process] = []
        self.failed_at: float | None = None
        self.attempt = 0
        self._told: set[tuple[int, float]] = set()
        self.selector = selectors.DefaultSelector()
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind(f"{folder}/socket")
        self.door.listen(128)
        self.selector.register(self.door, selectors.EVENT_READ)
        self._began: float | None = time.monotonic()  # None once the limit has passed since
        self._next = self._began + limit_s / ASKED_IN_LIMIT

    def close(self) -> None:
        for each in (self.door, *(process.link for process in self.processes), self.selector):
            each.close()

    def when(self, link: socket.socket, call: Callable[[bytes], None]) -> None:
        """Have something else listened to as well."""
        self.selector.register(link, selectors.EVENT_READ, lambda: call(link.recv(4096)))

    def ranks(self) -> dict[int, Process]:
        """The ranks of the newest attempt, the newest living of each number; a worker of a rank bears its number."""
        known = [each for each in self.processes if each.rank is not None and each.attempt == self.attempt]
        by_pid = {each.pid: each for each in known}
        heads = [each for each in known if getattr(by_pid.get(each.parent), "rank", None) != each.rank]
        return {each.rank: each for each in sorted(heads, key=lambda each: (each.rank, not each.ended))}

    def all_seen(self) -> bool:
        """Whether no rank is on another machine, or unknown."""
        ranks = self.ranks()
        world = max((each.world or 0 for each in ranks.values()), default=0) or len(ranks)
        return sorted(ranks) == list(range(world))

    def listen(self, wait_s: float) -> None:
        """Take in what is said within `wait_s`, or until something is."""
        for key, _ in self.selector.select(min(max(0.0, wait_s), LONGEST_S)):
            if key.fileobj is self.door:
                link, _ = self.door.accept()
                self.processes.append(Process(link))
                self.selector.register(link, selectors.EVENT_READ, self.processes[-1])
                self._next = min(self._next, time.monotonic() + 1.0)  # which rank is it?
            elif isinstance(key.data, Process):
                self._hear(key.data)
            else:
                key.data()

    def finish(self) -> None:
        """Take in all that has been said already."""
        while self.selector.select(0):
            self.listen(0)

    def _hear(self, process: Process) -> None:
        try:
            said = process.read()
        except EOFError:
            self.selector.unregister(process.link)
            process.link.close()
            process.ended, process.code = True, exit_status(process.pid)
            if process.code is None and stat(process.pid):  # it has become another program
                self.processes.remove(process)
                return
            process.order = process.order or time.monotonic()
            if process.died and process in self.ranks().values():
                self._failed()
            return
        for each in said:
            before = process.rank
            process.note(each)
            if process.rank != before:
                self._begin_again(process)
            if process.attempt > self.attempt:
                self.attempt, self.failed_at = process.attempt, None
            if each["what"] == "raised" and (process in self.ranks().values() or each["child"]):
                self._failed()
                for other in (other for other in self.processes if other.pid == each["child"]):  # its parent knows
                    other.code = each["code"]
                    other.rank = each["index"] if other.rank is None else other.rank

    def _begin_again(self, process: Process) -> None:
        """Forget an earlier launch of the same command, if a rank of it bore this number and all of it have ended."""
        ranks = [each for each in self.processes if each.rank is not None and each.began < process.began]
        if any(each.rank == process.rank for each in ranks) and all(each.ended for each in ranks):
            self.processes = [each for each in self.processes if each not in ranks]
            self.attempt, self.failed_at = process.attempt, None

    def _failed(self) -> None:
        """Something has failed: ask all others at once, since torchrun is about to end them."""
        if self.failed_at is None:
            self.failed_at = time.monotonic()
            for each in self.processes:
                if not each.ended and each.raised is None:
                    each.ask(b"!")

    def where(self) -> None:
        """Ask all where they are; of those that cannot answer, have faulthandler write the stacks."""
        alive = [each for each in self.processes if not each.ended]
        expected = [each for each in alive if each.answered]
        for each in alive:
            each.ask(b"L")
        deadline = time.monotonic() + (ANSWER_S if expected else SETTLE_S)
        while not all(each.told or each.ended for each in expected) and time.monotonic() < deadline:
            self.listen(deadline - time.monotonic())
        silent = [each for each in alive if not each.told]
        for each in (each for each in silent if each.pid):  # 0, of one that has not said yet who it is, would be us
            with suppress(OSError, AttributeError):  # a system without such signals
                os.kill(each.pid, signal.SIGRTMAX - 5)
        if silent:
            time.sleep(SETTLE_S)  # it gives no sign when it is done

    def until_next(self) -> float:
        return self._next - time.monotonic()

    def found(self) -> str:
        """Ask how far all are, and return what is wrong.

        Returns:
            "none": no rank has been seen, which is told once;
            "hung": no rank moves; "waits": one waits for another that does; "unseen": no rank that is seen here moves,
            and others are elsewhere; or "". The second and the third are told once of the same wait.
        """
        now, used = time.monotonic(), processor_seconds()
        late, self._next = now - self._next, now + self.limit_s / ASKED_IN_LIMIT
        if late > self.limit_s / ASKED_IN_LIMIT:
            self._stood_still(late)
            return self._ask_all()
        living = [each for each in self.ranks().values() if not each.ended]
        for each in living:
            each.computes(used.get(each.pid, each.seconds))
        still = [each for each in living if now - each.moved >= self.limit_s]
        new = {(each.pid, each.moved) for each in still if each.waits} - self._told
        if self._began is not None and now - self._began >= self.limit_s:
            self._began = None
            if not any(each.rank is not None for each in self.processes):
                return "none"
        if living and len(still) == len(living) and self.all_seen():
            return "hung"
        if new and (len(still) == len(living) or any(now - each.moved < self.limit_s / 2 for each in living)):
            self._told |= new
            return "unseen" if len(still) == len(living) else "waits"
        return self._ask_all()

    def _ask_all(self) -> str:
        for each in self.processes:
            if not each.ended:
                each.ask(b"?")
        return ""

    def _stood_still(self, seconds: float) -> None:
        """Take out the time in which this process did not run: its job was suspended, and the ranks with it."""
        for each in self.processes:
            each.moved, each._checked = each.moved + seconds, each._checked + seconds
        self._began = self._began and self._began + seconds
        self._told = {(pid, moved + seconds) for pid, moved in self._told}
