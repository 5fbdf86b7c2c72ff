"""What does a message between ranks cost?

A collective of s bytes takes about alpha + beta s: alpha before anything has moved, beta for each byte. Both are fitted
to measured times over sizes from some bytes to some MiB. The fit looks at relative errors; otherwise the largest size
would decide alone, and alpha, a ten-thousandth of its time, would be noise. What the line does not explain is kept as
residuals: where they bend, the backend changes its way.

Two bandwidths are usual. Algorithm bandwidth is bytes divided by time. Bus bandwidth multiplies it by the share of the
bytes that a rank has to send at least, so that it can be compared with the hardware's figure at any number of ranks.

Source: nccl-tests, doc/PERFORMANCE.md, for the sizes, the two bandwidths and their factors.
Left out on purpose: NCCL and GPUs, which nccl-tests measures, and ranks on several machines, whose clocks differ.
Read next: `link.py`, a link of which alpha and beta are chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_course.launcher import RankPool
from ddp_course.scaling.link import Link

SIZES = (256, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
RUN_LIMIT_S = 300.0


@dataclass(frozen=True)
class Collective:
    """How one collective is called, and how its bytes are counted."""

    factor: Callable[[int], float]  # from algorithm bandwidth to bus bandwidth, by the number of ranks
    call: Callable[[torch.Tensor, torch.Tensor], object]  # on all bytes, and on a rank's share of them
    what_counts: str  # which bytes are the size


# The size is that of the larger tensor: what a rank has in the end (gather), or in the beginning (scatter).
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(lambda w: 2 * (w - 1) / w, lambda whole, part: dist.all_reduce(whole), "the tensor"),
    "all_gather": Collective(
        lambda w: (w - 1) / w, lambda whole, part: dist.all_gather_into_tensor(whole, part), "all shares together"
    ),
    "reduce_scatter": Collective(
        lambda w: (w - 1) / w, lambda whole, part: dist.reduce_scatter_tensor(part, whole), "all shares together"
    ),
    "broadcast": Collective(lambda w: 1.0, lambda whole, part: dist.broadcast(whole, src=0), "the tensor"),
    "reduce": Collective(lambda w: 1.0, lambda whole, part: dist.reduce(whole, dst=0), "the tensor"),
    "all_to_all": Collective(
        lambda w: (w - 1) / w,
        lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
        "all that a rank sends, its own share too",
    ),
}


def bus_factor(op: str, world_size: int) -> float:
    """Return what turns algorithm bandwidth into bus bandwidth.

    Raises:
        ValueError: the collective is not in COLLECTIVES.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"collective {op!r} is not known; choose from {', '.join(COLLECTIVES)}")
    return COLLECTIVES[op].factor(world_size)


# --- The fit ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveCost:
    """Measured times of one collective, and the line through them."""

    op: str
    world_size: int
    sizes: tuple[int, ...]  # bytes, as nccl-tests counts them
    seconds: tuple[float, ...]  # measured
    alpha_s: float
    beta_s: float  # seconds a byte

    def predicted_s(self, nbytes: float) -> float:
        """What the line says for a size."""
        return self.alpha_s + self.beta_s * nbytes

    @property
    def residuals(self) -> list[float]:
        """By how much of itself each measured time is above the line; negative is below."""
        return [(t - self.predicted_s(size)) / t for size, t in zip(self.sizes, self.seconds, strict=True)]

    @property
    def bus_bytes_per_s(self) -> list[float]:
        """Bus bandwidth at each size."""
        factor = bus_factor(self.op, self.world_size)
        return [factor * size / t for size, t in zip(self.sizes, self.seconds, strict=True)]

    @property
    def peak_bus_bytes_per_s(self) -> float:
        """The bus bandwidth that the line comes near to as messages grow: latency counts for nothing there."""
        return bus_factor(self.op, self.world_size) / self.beta_s if self.beta_s else float("inf")

    @property
    def half_bytes(self) -> float:
        """The size at which half of the time is latency; half of the peak bandwidth is reached there."""
        return self.alpha_s / self.beta_s if self.beta_s else float("inf")

    def as_link(self) -> Link:
        """The link over which a ring all_reduce would take these times: alpha divided among its 2(W - 1) messages.

        Raises:
            ValueError: not an all_reduce, or the times do not grow with the size.
        """
        if self.op != "all_reduce" or not self.beta_s:
            raise ValueError(f"expected all_reduces that take longer with more bytes, found {self.op} {self.seconds}")
        messages = 2 * (self.world_size - 1)
        source = f"fitted to all_reduces of {self.world_size} ranks"
        return Link("this machine", self.alpha_s / messages, self.peak_bus_bytes_per_s, source)

    def sentence(self) -> str:
        """The fit in one line."""
        worst, most = max(map(abs, self.residuals)), max(self.bus_bytes_per_s)
        return (
            f"{self.op}, {self.world_size} ranks: alpha {1e6 * self.alpha_s:.0f} µs, beta {1e9 * self.beta_s:.3f} ns a "
            f"byte; bus bandwidth {self.peak_bus_bytes_per_s / 1e9:.2f} GB/s by this line (half of it is reached at "
            f"{self.half_bytes / 1024:,.0f} KiB), {most / 1e9:.2f} GB/s at most as measured; "
            f"the line is off by up to {worst:.0%}"
        )

    def table(self) -> str:
        """One line for each size, in the columns of nccl-tests and the fit's."""
        lines = [
            f"{'bytes':>10}  {'time µs':>10}  {'algbw GB/s':>10}  {'busbw GB/s':>10}  {'fit µs':>10}  {'above fit':>9}"
        ]
        for size, t, bus, left in zip(self.sizes, self.seconds, self.bus_bytes_per_s, self.residuals, strict=True):
            fit = 1e6 * self.predicted_s(size)
            lines.append(
                f"{size:10}  {1e6 * t:10.1f}  {size / t / 1e9:10.3f}  {bus / 1e9:10.3f}  {fit:10.1f}  {left:+9.0%}"
            )
        return "\n".join([self.sentence(), *lines])


def fit_link(op: str, sizes: Sequence[int], seconds: Sequence[float], world_size: int) -> CollectiveCost:
    """Fit alpha and beta to measured times, so that the sum of squared relative errors is least; neither is negative.

    Args:
        sizes: bytes, as `COLLECTIVES[op].what_counts` says; two different ones at least.
        seconds: the time of each.
    Raises:
        ValueError: too few sizes, a time that is not positive, one rank, or an unknown collective.
    """
    bus_factor(op, world_size)
    if world_size < 2:
        raise ValueError(f"{world_size} rank sends nothing: measure collectives with two ranks or more")
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or min(seconds) <= 0:
        raise ValueError(
            f"expected a positive time for each of two sizes or more, found {list(sizes)}, {list(seconds)}"
        )
    # Divided by the times, the model is alpha u + beta v = 1: ordinary least squares.
    u, v = [1 / t for t in seconds], [size / t for size, t in zip(sizes, seconds, strict=True)]
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    alpha = (sum(u) * vv - sum(v) * uv) / (uu * vv - uv * uv)
    beta = (sum(v) * uu - sum(u) * uv) / (uu * vv - uv * uv)
    if alpha < 0:
        alpha, beta = 0.0, sum(v) / vv
    elif beta < 0:
        alpha, beta = sum(u) / uu, 0.0
    return CollectiveCost(op, world_size, tuple(sizes), tuple(seconds), alpha, beta)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


# --- The measurement -------------------------------------------------------------------------------


Readings = dict[tuple[str, int], list[list[tuple[float, float]]]]  # by collective and size: rounds of (start, end)


def timed_collectives(rank: int, world_size: int, ops: list[str], sizes: list[int], rounds: int) -> Readings:
    """Call each collective with each size, `rounds` times over, and note when each call began and ended.

    The ranks are not pinned. Nothing is computed here, and on one core gloo's thread would wait for the thread that
    waits for it: small messages then took up to 3 ms longer, in no order.

    Collective: two barriers and one collective for each call, every rank.
    """
    torch.set_num_threads(1)
    noted: Readings = {(op, size): [] for op in ops for size in sizes}
    tensors = {size: (torch.zeros(size // 4), torch.zeros(size // 4 // world_size)) for size in sizes}
    for number in range(rounds + 1):
        for op, size in noted:
            readings = [_one_call(COLLECTIVES[op].call, *tensors[size]) for _ in range(_calls(size))]
            if number:  # in the first round memory and connections are new
                noted[op, size].append(readings)
    return noted


def _calls(size: int) -> int:
    return max(3, min(20, 2**22 // size))


def _one_call(call: Callable, whole: torch.Tensor, part: torch.Tensor) -> tuple[float, float]:
    dist.barrier()
    start = time.monotonic()
    call(whole, part)
    end = time.monotonic()
    dist.barrier()  # else the messages of the next call's barrier would share the wire with this one's
    return start, end


def _median(by_rank: Sequence[Readings], op: str, size: int) -> float:
    rounds = [call_seconds(readings) for readings in zip(*(noted[op, size] for noted in by_rank), strict=True)]
    return statistics.median(statistics.median(calls) for calls in rounds)


def call_seconds(readings: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Return the time of each call: from when the last rank entered until the last one left.

    Until the last one enters, the others wait for a late rank and not for the link. And a broadcast's root may leave
    long before the others have what it sent.

    Args:
        readings: for each rank, start and end of each call, on one clock.
    """
    return [max(end for _, end in one) - max(start for start, _ in one) for one in zip(*readings, strict=True)]
