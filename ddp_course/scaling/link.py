"""How does a laptop come to have a slow network?

On one machine the "network" is memory, so buckets and overlap hardly show. Here each all_reduce really runs, and its
result is held back until a link with a given latency and bandwidth would have delivered it. The link carries one
message at a time: a message starts when the last rank has launched it and the message before it has gone. All ranks
read the same clock and the same launch times, so all of them work out the same timetable.

What comes out of it is simulated, and whatever shows it has to say so.

Left out on purpose: other collectives than the buckets' all_reduce, GPUs, and ranks on several machines, which have
clocks of their own and a real network.
Read next: `simulate.py`, which predicts the same timetable without running anything.
"""

from __future__ import annotations

import heapq
import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from ddp_course.collectives import ring_seconds, tree_seconds
from ddp_course.scaling.spans import Span

ALGORITHMS = {"ring": ring_seconds, "tree": tree_seconds}
SLOTS = 4096  # messages whose launch times are remembered; a step has far fewer
CLOSE_LIMIT_S = 10.0


@dataclass(frozen=True)
class Link:
    """What each rank is connected by: a message of n bytes takes `latency_s` + n / `bytes_per_s`."""

    name: str
    latency_s: float
    bytes_per_s: float  # in one direction
    source: str = "made up"

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(
                f"link {self.name}: expected a latency of 0 s or more and a bandwidth above 0 bytes/s, "
                f"found {self.latency_s:g} s and {self.bytes_per_s:g} bytes/s"
            )

    def all_reduce_seconds(self, nbytes: float, world_size: int, algorithm: str = "ring") -> float:
        """Return how long an all_reduce of `nbytes` takes over this link; 0 with one rank.

        Raises:
            ValueError: the algorithm is neither "ring" nor "tree".
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm {algorithm!r} is not known; choose from {', '.join(ALGORITHMS)}")
        return ALGORITHMS[algorithm](nbytes, world_size, self.latency_s, self.bytes_per_s)


_NCCL = "NCCL's own cost model, src/graph/topo.h (bandwidth) and tuning.cc (latency of a ring's step, Simple): "
# A full Ethernet frame takes 1538 bytes of the wire, with preamble and gap; 1448 of them are TCP's payload.
_ETHERNET = "line rate x 1448/1538 (frames of 1500 bytes, IEEE 802.3, TCP with timestamps); latency: "
_TCP_SHARE = 1448 / 1538

LINKS: dict[str, Link] = {
    "nvlink": Link("NVLink 3", 3.4e-6, 12 * 20e9, _NCCL + "A100, 12 links of 20 GB/s, 3.4 us"),
    "pcie4": Link("PCIe 4 x16", 5.7e-6, 2 * 12e9, _NCCL + "12 GB/s for generation 3 x16, doubled; 5.7 us"),
    "100gbe": Link("100 GbE", 14e-6, 12e9, _NCCL + "12 GB/s for a 100 Gbit network, 14 us"),
    "10gbe": Link(
        "10 GbE", 20e-6, 1.25e9 * _TCP_SHARE, _ETHERNET + "20 us end to end, Hurwitz and Feng, Hot Interconnects 2003"
    ),
    "1gbe": Link(
        "1 GbE", 55e-6, 0.125e9 * _TCP_SHARE, _ETHERNET + "half of a TCP round trip of 110 us, serverfault.com/q/791539"
    ),
}


@dataclass(order=True)
class _Message:
    """An all_reduce that is done for real and waits for the link to have carried it."""

    due_s: float
    number: int
    flat: torch.Tensor = field(compare=False)
    future: torch.futures.Future = field(compare=False)


class SimulatedLink:
    """Holds back the results of all_reduces until `link` would have delivered them; use it in a `with` block.

    A thread sleeps until the next delivery, so waiting takes no processor time from the model.

    Args:
        link: one of LINKS, or a `Link` of your own.
        process_group: None is the default group. All its ranks on one machine, and tensors on the CPU.
        algorithm: how the link's time is counted, "ring" or "tree". What really runs is the backend's own.
    Raises:
        RuntimeError: the ranks are not on one machine.
    Collective: at construction one broadcast_object_list and one all_gather_object; every rank of the group.
    """

    def __init__(self, link: Link, process_group: dist.ProcessGroup | None = None, algorithm: str = "ring") -> None:
        self.link, self.process_group, self.algorithm = link, process_group, algorithm
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        link.all_reduce_seconds(1, self.world_size, algorithm)  # refuses an unknown algorithm before anything is open
        self._map = _shared_bytes(8 * SLOTS * self.world_size, process_group)
        self._launched_s = memoryview(self._map).cast("d")  # by message and rank
        self._sizes: list[int] = []  # of all messages of this rank, in order
        self._real_ends_s: list[float] = []  # when each was done for real, on this rank
        self._timetable: list[Span] = []  # of those whose launch times are known; the same on all ranks
        self._launches: list[float] = []  # and when their last rank launched them
        self._shown_from = 0
        self._waiting: list[_Message] = []  # a heap
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, name="simulated link", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"simulated {self.link.name}, {self.algorithm} of {self.world_size}"

    def attach(self, replica: Any) -> Any:
        """Let the gradients of `replica` travel over this link, and return it.

        Args:
            replica: a `BucketedDDP` or torch's `DistributedDataParallel`, without a communication hook so far.
        Raises:
            TypeError: something else.
            ValueError: it has another process group, or its parameters are not on the CPU.
        Collective: from now on, one all_reduce per bucket, as without the link.
        """
        if not hasattr(replica, "register_comm_hook"):
            raise TypeError(f"expected BucketedDDP or DistributedDataParallel, found {type(replica).__name__}")
        world = dist.group.WORLD
        if (replica.process_group or world) is not (self.process_group or world):
            raise ValueError(f"rank {self.rank}: the replica's process group is not the link's; give both the same one")
        if elsewhere := {param.device.type for param in replica.parameters()} - {"cpu"}:
            raise ValueError(f"rank {self.rank}: parameters on {elsewhere.pop()}; the simulated link is for the CPU")
        replica.register_comm_hook(None, self._hook)
        return replica

    def _hook(self, state, bucket):  # no annotations: torch checks them, and would take its own GradBucket only
        # Multiplied by 1/W, as both kinds of replica do without a hook: a division may differ in the last bit.
        return self.all_reduce(bucket.buffer().mul_(1.0 / self.world_size))

    def all_reduce(self, flat: torch.Tensor) -> torch.futures.Future:
        """Sum `flat` over the ranks, in place; the Future has it when the link has carried it.

        Raises:
            RuntimeError: the link is closed.
        Collective: one all_reduce; every rank of the group, in the same order.
        """
        with self._changed:  # messages are numbered in the order in which they are launched
            if self._closed:
                raise RuntimeError(f"rank {self.rank}: the {self} is closed; train inside its `with` block")
            message = _Message(0.0, len(self._sizes), flat, torch.futures.Future())
            self._sizes.append(flat.nbytes)
            self._real_ends_s.append(0.0)
            self._launched_s[message.number % SLOTS * self.world_size + self.rank] = time.monotonic()
            real = dist.all_reduce(flat, group=self.process_group, async_op=True)
        real.get_future().add_done_callback(partial(self._done_for_real, message))
        return message.future

    def seconds(self, nbytes: float) -> float:
        """Return how long the link is busy with an all_reduce of `nbytes`."""
        return self.link.all_reduce_seconds(nbytes, self.world_size, self.algorithm)

    def spans(self) -> list[Span]:
        """What the link has carried since the start or `clear`, in order: simulated, and the same on every rank."""
        with self._changed:
            return self._timetable[self._shown_from :]

    def launches(self) -> list[float]:
        """When the last rank launched each message of `spans`: one that starts later had to queue."""
        with self._changed:
            return self._launches[self._shown_from :]

    def late_s(self) -> list[float]:
        """By how much each message of `spans` was late on this rank: 0 unless the real all_reduce outlasted the link.

        Ask when none is under way.
        """
        with self._changed:
            shown = slice(self._shown_from, len(self._timetable))
            pairs = zip(self._real_ends_s[shown], self._timetable[shown], strict=True)
            return [max(0.0, real_end_s - span.end_s) for real_end_s, span in pairs]

    def real_ends(self) -> list[float]:
        """When the all_reduce of each message of `spans` was done for real on this rank; ask when none is under way."""
        with self._changed:
            return self._real_ends_s[self._shown_from : len(self._timetable)]

    def clear(self) -> None:
        """Let `spans` and what goes with it begin with the next message; call it when none is under way."""
        with self._changed:
            self._shown_from = len(self._timetable)

    # --- When a message is due -------------------------------------------------------------------

    def _done_for_real(self, message: _Message, real: torch.futures.Future) -> None:
        """Called by a thread of the backend."""
        try:
            real.value()
        except Exception as error:  # a rank is gone, say: whoever waits for the message must learn it
            message.future.set_exception(error)
            return
        with self._changed:
            self._real_ends_s[message.number] = time.monotonic()
            if not self._closed:
                self._plan(message.number)
                message.due_s = self._timetable[message.number].end_s
                heapq.heappush(self._waiting, message)
                self._changed.notify()
                return
        message.future.set_exception(self._too_late(message))

    def _plan(self, number: int) -> None:
        """Extend the timetable up to this message.

        It is done for real, so all ranks have launched it, and those before it as well.
        """
        for n in range(len(self._timetable), number + 1):
            row = n % SLOTS * self.world_size
            launched_s = max(self._launched_s[row : row + self.world_size])
            start_s = max(launched_s, self._timetable[-1].end_s if self._timetable else 0.0)
            end_s = start_s + self.seconds(self._sizes[n])
            name = f"all_reduce, simulated {self.link.name}"
            self._launches.append(launched_s)
            self._timetable.append(Span(name, start_s, end_s, "all-reduce", self._sizes[n]))

    def _deliver(self) -> None:
        """The thread: sleep until the next message is due, hand it over, and so on until `close`."""
        while True:
            with self._changed:
                if self._closed:
                    return
                left_s = self._waiting[0].due_s - time.monotonic() if self._waiting else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                message = heapq.heappop(self._waiting)
            message.future.set_result(message.flat)

    # --- The end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread; whoever still waits for a message gets an error.

        Raises:
            RuntimeError: the thread did not end.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            undelivered, self._waiting = self._waiting, []
            self._launched_s.release()
            self._map.close()
            self._changed.notify()
        for message in undelivered:
            message.future.set_exception(self._too_late(message))
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"rank {self.rank}: the thread of the {self} still runs after {CLOSE_LIMIT_S:g} s")

    def _too_late(self, message: _Message) -> RuntimeError:
        return RuntimeError(f"rank {self.rank}: the {self} was closed before message {message.number} had arrived")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _shared_bytes(count: int, process_group: dist.ProcessGroup | None) -> mmap.mmap:
    """Return memory that all ranks of the group see, zeros at first; its file is gone when this returns.

    Collective: one broadcast_object_list, one all_gather_object.
    """
    rank, path = dist.get_rank(process_group), [None]
    if rank == 0:
        handle, path[0] = tempfile.mkstemp(prefix="ddp_course_link_")
        os.ftruncate(handle, count)
        os.close(handle)
    dist.broadcast_object_list(path, group=process_group, group_src=0)
    try:
        with open(path[0], "r+b") as file:
            shared = mmap.mmap(file.fileno(), count)
    except OSError:
        shared = None
    opened: list[bool] = [False] * dist.get_world_size(process_group)
    dist.all_gather_object(opened, shared is not None, group=process_group)
    if rank == 0:
        os.unlink(path[0])
    if not all(opened):
        raise RuntimeError(
            f"rank {rank}: expected all ranks on one machine, but ranks "
            f"{[other for other, there in enumerate(opened) if not there]} cannot open {path[0]}; a simulated link "
            "needs one clock. Between machines there is a real network: use that"
        )
    return shared
