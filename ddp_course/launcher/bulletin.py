"""How do ranks without a parent tell each other where they are?

Ranks that torchrun started share no pipe, but they share the job's key-value store. It serves as a bulletin board:
one rank sounds the alarm, every rank that can posts where it is, and a rank posts for a neighbour on its host that
cannot speak. Notes are JSON; the ranks of a restarted job have a board of their own, without the notes of the dead.

Left out on purpose: when to sound the alarm and what to make of the notes, which is `watchdog.py`'s part.
Read next: `watchdog.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from ddp_course.groups import Place
from ddp_course.launcher.failure import Failure
from ddp_course.launcher.lines import Line
from ddp_course.launcher.rank_status import Collective, Whereabouts
from ddp_course.rendezvous import ROUND

STORE_LIMIT_S = 5.0  # to reach the store
POLL_S = 0.05


@dataclass(frozen=True)
class Note:
    """What is known of one rank."""

    where: Whereabouts
    failure: Failure | None = None
    speaks: bool = True  # the rank wrote it itself, and takes part in the report

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Note:
        found = json.loads(text)
        where, failure = found["where"], found["failure"]
        where["line"] = _line(where["line"])
        where["recent"] = [_collective(each) for each in where["recent"]]
        where["oddities"] = [(words, _line(line)) for words, line in where["oddities"]]
        if failure:
            failure = Failure(**failure | {"line": _line(failure["line"])})
        return cls(Whereabouts(**where), failure, found["speaks"])


def _line(found: dict | None) -> Line | None:
    return Line(**found) if found else None


def _collective(found: dict) -> Collective:
    sizes, members = tuple(tuple(size) for size in found["sizes"]), tuple(found["members"])
    return Collective(**found | {"sizes": sizes, "members": members, "line": _line(found["line"])})


@dataclass(frozen=True)
class Address:
    """Where a neighbour on the same host finds a rank that cannot speak."""

    pid: int
    birth: str  # so that a later process with the same number is not taken for it
    stacks: int  # its descriptor of the nameless file into which faulthandler writes

    @property
    def alive(self) -> bool:
        return birth(self.pid) == self.birth

    def read_stacks(self) -> str:
        """What faulthandler has written there; "" on a system without /proc."""
        try:
            with open(f"/proc/{self.pid}/fd/{self.stacks}", errors="replace") as file:
                return file.read()
        except OSError:
            return ""


def birth(pid: int) -> str:
    """Return when a living process began, in the system's count; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return ""
    except ProcessLookupError:  # it ended while we read
        return ""
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "alive"


class Bulletin:
    """One rank's connection to the board of its job. Any method may raise what a lost store raises: RuntimeError.

    Args:
        place: who this rank is.
        address: what a neighbour needs to know of it.
    Raises:
        ValueError: MASTER_ADDR or MASTER_PORT is not set.
        RuntimeError: no store answers there within `STORE_LIMIT_S`.
    """

    def __init__(self, place: Place, address: Address):
        self.place = place
        host, port = store_address()
        client = dist.TCPStore(host, port, None, False, timedelta(seconds=STORE_LIMIT_S), wait_for_workers=False)
        prefix = f"ddp_course/watchdog/{_round(client)}"
        nth = client.add(f"{prefix}/entered/{place.rank}", 1)  # a program may enter one watchdog after another
        self.store = dist.PrefixStore(f"{prefix}/{nth}", client)
        self.store.set(f"address/{place.rank}", json.dumps(asdict(address)))

    def sound_alarm(self) -> None:
        self.store.set("alarm", "1")

    def alarmed(self) -> bool:
        return self.store.check(["alarm"])

    def post(self, note: Note) -> None:
        """Pin up what is known of `note.where.rank`; what was there before is replaced."""
        self.store.set(f"note/{note.where.rank}", note.to_json())
        self.store.add("answers", 1)

    def posted(self, rank: int) -> bool:
        return self.store.check([f"note/{rank}"])

    def note(self, rank: int) -> Note:
        """The note about a rank; one that says "silent" if there is none."""
        if not self.posted(rank):
            return Note(Whereabouts(rank, "silent"), speaks=False)
        return Note.from_json(self.store.get(f"note/{rank}"))

    def notes(self) -> list[Note]:
        return [self.note(rank) for rank in range(self.place.world_size)]

    def wait_for_all(self, limit_s: float) -> bool:
        """Whether there is a note about every rank before `limit_s` is over."""
        return _comes_true(lambda: self.store.add("answers", 0) >= self.place.world_size, limit_s)

    def is_first_speaker(self, ranks: range) -> bool:
        """Whether no rank of `ranks` below this one takes part; as a rule one question, to the first, settles it."""
        return not any(self.note(rank).speaks for rank in ranks if rank < self.place.rank)

    def may_tell(self) -> bool:
        """True for exactly one rank, the first that asks."""
        return self.store.add("tellers", 1) == 1

    def set_told(self) -> None:
        self.store.set("told", "1")

    def wait_told(self, limit_s: float) -> bool:
        return _comes_true(lambda: self.store.check(["told"]), limit_s)

    def address(self, rank: int) -> Address | None:
        """Where a rank is found; None if it has not come to the board yet."""
        key = f"address/{rank}"
        return Address(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    @property
    def neighbours(self) -> range:
        """The ranks of this host; launchers number them one after the other."""
        first = self.place.rank - self.place.local_rank
        return range(first, first + self.place.local_world_size)


def _comes_true(question: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return answer


def store_address() -> tuple[str, int]:
    """Return host and port of the job's store."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ValueError("a Watchdog needs the job's store: MASTER_ADDR and MASTER_PORT, which torchrun sets")
    return host, int(port)


def _round(client: dist.Store) -> str:
    """A name for the ranks that run now; the store may keep what ranks before a restart wrote."""
    if client.check([ROUND]):  # `rendezvous.enter_round` has made one up
        return client.get(ROUND).decode()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
