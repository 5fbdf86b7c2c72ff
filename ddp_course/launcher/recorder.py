"""What has this rank been asked to send, and what does it still wait for?

`interception.py` tells the recorder of every collective and message before torch acts on it. The recorder counts them,
compares each with what the other ranks do in theirs, and keeps the last few, so that another thread can say at any time
what this rank waits for.

Read next: `compare_calls.py`, the comparison; `wait_graph.py`, what is made of the notes of all ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from ddp_course.launcher.compare_calls import SharedCalls
from ddp_course.launcher.group_facts import GroupFacts, Groups
from ddp_course.launcher.lines import Line, Place, line_at
from ddp_course.launcher.rank_status import MESSAGES, Collective, Whereabouts, channel_of

MOST_KEPT, MOST_REPORTED = 500, 100  # calls
# In these a rank may give tensors of a size of its own, or none.
_OWN_SIZES = {"scatter", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier"}


# What a note has in common with what is told of it.
_SAME = ("seq", "op", "dtype", "sizes", "members", "finished", "entered_ns", "reduce", "root", "tag", "of")


@dataclass(slots=True)
class Note:
    """One call, while it may be under way."""

    group: GroupFacts
    op: str
    members: tuple[int, ...]
    place: Place | None
    dtype: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    reduce: str = ""
    root: int | None = None
    tag: int = 0
    of: str = ""
    channel: str = ""
    seq: int = 0
    entered_ns: int = 0
    work: dist.Work | None = None
    finished: bool = False

    def settled(self) -> bool:
        """Whether it has ended well; lets go of its tensors then."""
        if not self.finished and self.work is not None and self.work.is_completed():
            work, self.work = self.work, None
            with suppress(RuntimeError):  # it has failed
                if self.op not in MESSAGES:  # these complete only when they are waited for, and must not be again
                    work.wait()
                self.finished = True
        return self.finished

    def told(self, since: dict[str, int]) -> Collective:
        same = {name: getattr(self, name) for name in _SAME}
        number = self.seq - since.get(self.channel, 0)
        return Collective(number=number, group=self.group.label, line=line_at(self.place), **same)

    def doing(self) -> str:
        """Say what must be equal on all ranks of the group."""
        numbers = [math.prod(size) for size in self.sizes] if self.op not in _OWN_SIZES else []
        if "gather" in self.op and not self.group.gloo:
            numbers = []
        sizes = f"{' + '.join(map(str, numbers))} {self.dtype}" if numbers else ""
        root = "" if self.root is None else f"rank {self.root}"
        facts = ", ".join(filter(None, (sizes, self.reduce, root, self.of)))
        return f"{self.op}({facts}) of ranks {', '.join(map(str, self.members))}"


class Recorder:
    """The notes of this process."""

    def __init__(self) -> None:
        self.groups = Groups(self.forget)
        self.total = 0  # of all calls: cheap to look at
        self.shared: SharedCalls | None = None  # where the launcher has made the default group
        self.oddities: list[tuple[str, Place | None]] = []
        self.ended: set[str] = set()  # labels of groups
        self.key, self.key_since_ns = "", 0  # what is waited for at the store
        self._counts: Counter[str] = Counter()  # calls by channel
        self._members: dict[str, tuple[int, ...]] = {}  # who takes part, by channel
        self._notes: deque[Note] = deque(maxlen=MOST_KEPT)
        self._open: list[Note] = []
        self._lock = threading.RLock()

    def enter(self, note: Note) -> None:
        """Note a call that is about to be made.

        Raises:
            Disagreement: another rank does something else in the call of this number.
        """
        note.entered_ns = time.time_ns()
        note.channel = channel_of(note.op, note.group.label, note.members, note.tag)
        with self._lock:
            self.total += 1
            self._counts[note.channel] += 1
            self._members[note.channel] = note.members
            note.seq = self._counts[note.channel]
            for other in self._open:  # gloo's reduce_scatter never says that it is complete
                if other.group.gloo and other.channel == note.channel and other.op.startswith("reduce_scatter"):
                    other.finished, other.work = True, None
            self._notes.append(note)
            self._open = [*self._still_open(), note]
        torch_compares = dist.get_debug_level() == dist.DebugLevel.DETAIL
        if self.shared and self.shared.holds() and note.op not in MESSAGES and not torch_compares:
            name = note.group.name if note.channel == note.group.label else note.channel
            self.shared.check(name, note.group.born, note.seq, note.doing(), note.members)

    def _still_open(self) -> Iterator[Note]:
        """The calls that are under way. NCCL's end in their order: behind one that has not, no other need be asked.

        The GPU may be a hundred calls behind, and to ask about each in every call would cost more than the call.
        """
        waiting = set()
        for note in self._open[-MOST_REPORTED:]:
            if note.channel in waiting or not note.settled():
                yield note
                if not note.group.gloo:
                    waiting.add(note.channel)

    def withdraw(self, note: Note) -> None:
        """Forget a call that torch has refused before it was made."""
        with self._lock:
            self._counts[note.channel] -= 1
            self._open.remove(note)
            if note in self._notes:
                self._notes.remove(note)

    def waited(self, work: dist.Work, well: bool) -> None:
        """Let go of a call that somebody has waited for: of its tensors, and of its group's connections.

        Args:
            well: whether the wait has ended without an error.
        """
        with self._lock:
            for note in [note for note in self._open if note.work is work]:
                if note.group.gloo and well:
                    note.finished, note.work = True, None
                if note.settled():
                    self._open.remove(note)

    def forget(self, label: str) -> None:
        """Count from 1 on a group of a name that an earlier group had."""
        with self._lock:
            for channel in [channel for channel in self._counts if channel.partition(":")[0] == label]:
                del self._counts[channel], self._members[channel]

    # --- When somebody asks --------------------------------------------------------------------------

    def mark(self) -> dict[str, int]:
        """Return what `recorded` needs in order to count from here."""
        with self._lock:
            return dict(self._counts)

    def recorded(self, since: dict[str, int] | None = None) -> list[Collective]:
        """Return the last calls, oldest first, those after the `mark` if one is given."""
        since = since or {}
        with self._lock:
            self._open = [note for note in self._open if not note.settled()]
            notes = [note for note in self._notes if note.seq > since.get(note.channel, 0)]
        return [note.told(since) for note in notes[-MOST_REPORTED:]]

    def whereabouts(self, rank: int, line: Line | None = None, since: dict[str, int] | None = None) -> Whereabouts:
        """Return what this rank is doing, now at `line`; without a `mark`, only how many calls it has made."""
        return Whereabouts(
            rank,
            "running",
            line,
            [] if since is None else self.recorded(since),
            entered=self.mark(),
            members=dict(self._members),
            oddities=[(words, line_at(place)) for words, place in self.oddities],
            ended=list(self.ended),
            key=self.key,
            key_since_ns=self.key_since_ns,
        )
