"""What does a rank say about itself: its calls, its line, what it waits for?

Plain data that travels from the ranks to whoever makes a report of it. Calls are counted on each group apart, so the
numbers of ranks that are in step are equal; messages are counted for each sender, receiver and tag.

Read next: `recorder.py`, where the calls are noted; `wait_graph.py`, who keeps whom waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ddp_course.launcher.lines import Line

MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Collective:
    """One collective, or one message, as a rank entered it."""

    number: int  # counts from 1 since a `mark`, on each channel apart; 0 if nobody has counted
    seq: int  # counts from 1 since the group was made: equal on all ranks that are in step
    op: str  # "all_reduce", "send"
    dtype: str  # "float32"; "" for a barrier
    sizes: tuple[tuple[int, ...], ...]  # of the tensors that this rank gives; in a recv, of those it gets
    group: str  # "" for the default group
    members: tuple[int, ...]  # the ranks of the group; of a message, its sender and receiver
    finished: bool
    entered_ns: int  # on the clock of `time.time_ns`
    reduce: str = ""  # "sum", "max", ... where something is reduced
    root: int | None = None  # src or dst, where there is one, as a rank of the default group
    tag: int = 0  # of a message
    of: str = ""  # "ranks [0, 1]", of a new group
    line: Line | None = None  # of the program, that asked for it

    @property
    def channel(self) -> str:
        return channel_of(self.op, self.group, self.members, self.tag)

    @property
    def n_bytes(self) -> int:
        """Payload of this rank, in bytes."""
        import torch  # here, so that `ddp-course read` does without it

        item_size = getattr(torch, self.dtype).itemsize if self.dtype else 0
        return item_size * sum(map(math.prod, self.sizes))

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        root = "" if self.root is None else f" {_PREPOSITIONS.get(self.op, 'to')} rank {self.root}"
        tensors = f"{self.dtype} {', '.join(str(list(size)) for size in self.sizes)}" if self.sizes else ""
        payload = size_text(self.n_bytes) if self.sizes else ""
        reduce = "" if self.reduce == "sum" else self.reduce
        facts = ", ".join(filter(None, (tensors, payload, reduce, f"tag {self.tag}" if self.tag else "")))
        number = f" #{self.number}" * bool(self.number)
        return f"{self.op}{number}{of}{root}{f' ({facts})' * bool(facts)}{f' on {self.group}' * bool(self.group)}"


def channel_of(op: str, group: str, members: Sequence[int], tag: int) -> str:
    """Return where a call is counted: with its group; a message with its sender, receiver and tag."""
    if op in MESSAGES:
        return f"{group}:{members[0]}>{members[1]}:{tag}"
    return f"{group}:new groups" if op == "new_group" else group


_PREPOSITIONS = {"broadcast": "from", "scatter": "from", "recv": "from"}


def size_text(n_bytes: float) -> str:
    """Say a size with the unit that fits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def listed_ranks(ranks: Collection[int]) -> str:
    """Return "rank 1", or "ranks 0, 1 and 2"."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


@dataclass
class Whereabouts:
    """What one rank was doing when it was asked."""

    rank: int
    status: str  # "running", "returned", "raised", "died" or "silent"
    line: Line | None = None  # the learner's innermost line
    recent: list[Collective] = field(default_factory=list)  # newest last
    detail: str = ""  # of a rank that raised or died: how
    entered: dict[str, int] = field(default_factory=dict)  # how many calls, by channel, since the groups were made
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)  # who takes part, by channel
    oddities: list[tuple[str, Line | None]] = field(default_factory=list)  # such as "ended its process group"
    ended: list[str] = field(default_factory=list)  # groups that it has ended, now or earlier
    key: str = ""  # what it waits for in the store
    key_since_ns: int = 0
    asked_ns: int = field(default_factory=time.time_ns)

    @property
    def waiting_in(self) -> Collective | None:
        """The oldest call this rank has entered and not left."""
        return next((c for c in self.recent if not c.finished), None)

    @property
    def waited_s(self) -> float:
        """How long it has been in that call, or waited at the store, in seconds; 0 if in none."""
        since_ns = self.key_since_ns if self.key else self.waiting_in.entered_ns if self.waiting_in else self.asked_ns
        return (self.asked_ns - since_ns) / 1e9
