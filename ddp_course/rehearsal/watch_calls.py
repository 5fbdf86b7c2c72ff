"""Which calls does a rank's program make in which others must join, and by which lines did it come to each?

A note for each call has the operation, its size, and the path: the lines of the learner's file since the call before.
Two ranks that part can be followed back to the line at which their paths parted, which is the cause, not the symptom.

Left out on purpose: messages between two ranks, which have no partner to be compared with.
Read next: `rehearse_calls.py`, which compares the ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_course.rehearsal.notes import Writer, around
from ddp_course.rehearsal.source import COLLECTIVES

MOST_LINES = 5_000  # of one path
DEEP = 1_000_000  # a step of the path is depth * DEEP + line


class CallsWatch:
    """The eyes of one rank for calls in which others must join.

    Args:
        turns: lines of the program that leave a loop or a try early; how often each was reached is noted.
        loops: for a line inside loops, the names that the loops set.
    """

    def __init__(self, writer: Writer, turns: set[int], loops: dict[int, list[str]]):
        self.writer, self.turns, self.loops = writer, turns, loops
        self.path: list[int] = []
        self.reached: Counter[int] = Counter()
        self.latest: dict[int, tuple[int, list[int]]] = {}  # when a turn was reached last, and from where
        self.depth = self.joined = 0
        self.awaited = False  # whether a replica waits for gradients
        self.of: str | None = None  # whose gradient is reduced next

    def install(self) -> None:
        for name in (*COLLECTIVES, "new_group"):
            if hasattr(dist, name):
                around(dist, name, self._at_collective(name))
        around(DistributedDataParallel, "join", self._at_join)
        around(torch.autograd, "backward", self._at_backward)

    def follow(self) -> None:
        """Begin to note the program's lines in this thread."""
        sys.settrace(self._at_call)

    # --- lines ----------------------------------------------------------------------------------------

    def _at_call(self, frame: FrameType, event: str, arg: Any) -> Callable | None:
        if frame.f_code.co_filename != self.writer.script:
            return None
        self.depth += 1
        return self._at_line

    def _at_line(self, frame: FrameType, event: str, arg: Any) -> Callable:
        line = frame.f_lineno
        if event == "line":
            if len(self.path) < MOST_LINES:
                self.path.append(self.depth * DEEP + line)
            if line in self.turns:
                self.reached[line] += 1
                self.latest[line] = (sum(self.reached.values()), self.writer.lines())
        elif event == "return":
            self.depth -= 1
        return self._at_line

    def _taken(self) -> dict:
        path, self.path = self.path, []
        return {"path": path, "whole": len(path) < MOST_LINES, "turns": list(self.reached.items())}

    def last_of(self, lines: set[int]) -> list[int]:
        """The lines at work when one of these was reached last; [] if none was."""
        return max((self.latest[line] for line in lines if line in self.latest), default=(0, []))[1]

    # --- calls ----------------------------------------------------------------------------------------

    def _at_collective(self, op: str) -> Callable:
        def seen(call: Callable, *args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            members = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
            own = "/torch/" not in sys._getframe(2).f_code.co_filename  # seen, stand_in, whoever called
            if members is None or len(members) == dist.get_world_size():
                given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
                what = (given[0].numel(), str(given[0].dtype).removeprefix("torch.")) if given else (None, None)
                if op == "new_group":
                    what = self._members(*args, **kwargs), "ranks"
                self.note(op, own=own, size=what[0], dtype=what[1])
            return call(*args, **kwargs)

        return seen

    @staticmethod
    def _members(ranks: list[int] | None = None, *_: Any, **__: Any) -> int:
        return dist.get_world_size() if ranks is None else len(ranks)

    def note(self, op: str, **facts: Any) -> None:
        """Note a call in which every rank must join."""
        self.writer.note("call", op=op, joined=self.joined, names=self._names(), **facts, **self._taken())

    def note_end(self, **facts: Any) -> None:
        """Note that the program is over on this rank."""
        sys.settrace(None)
        self.writer.note("end", **facts, **self._taken())

    def _names(self) -> list[str]:
        """What the loops around this line stand at, where that is a text: which of several values is reduced."""
        frame = self.writer.frame()
        names = self.loops.get(frame.f_lineno, []) if frame else []
        found = (frame.f_locals.get(name, frame.f_globals.get(name)) for name in names)
        of, self.of = self.of, None
        return [of] if of else [str(each) for each in found if isinstance(each, str | int)]

    def _at_backward(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.awaited:
            self.awaited = False
            self.note("backward")
        return call(*args, **kwargs)

    def at_forward(self, replica: DistributedDataParallel) -> None:
        """A replica is called: it may wait for gradients, and may broadcast its buffers."""
        if torch.is_grad_enabled() and replica.require_backward_grad_sync:
            self.awaited = True
        sends = getattr(replica, "_check_sync_bufs_pre_fwd", None)
        if sends is not None and sends():
            self.note("forward")

    @contextlib.contextmanager
    def _at_join(self, call: Callable, replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.joined += 1
        try:
            with call(replica, *args, **kwargs) as inside:
                yield inside
        finally:
            self.joined -= 1
