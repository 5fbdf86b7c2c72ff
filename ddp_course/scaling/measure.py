"""How fast do N ranks train, and what is a step made of?

Each rank takes the same steps as in training, and reads the clock between their parts: data, forward, backward,
optimizer. A hook on every parameter notes when the last gradient is there; what backward takes after that moment is
communication that nothing hides. Ranks of every world size live side by side, and take turns: a round measures each of
them once, and the next round goes the other way round. So noise of the machine, and its warming up, hit all alike.

One rank alone trains the bare module, since nobody would wrap it; what wrapping costs is then part of what is lost.

Left out on purpose: GPUs, where a clock read by the program says when work was handed over, not when it was done.
What a forward pass communicates (SyncBatchNorm, DDP's buffers) counts as forward here; `trace.py` tells it apart.
Read next: `collective_cost.py`, what the messages cost; or `efficiency.py`, what is made of the times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_course.data import Images, load
from ddp_course.data.sampler import ShardSampler
from ddp_course.launcher import RankPool
from ddp_course.parallel.ddp import BucketedDDP
from ddp_course.parallel.naive import NaiveDDP
from ddp_course.scaling.cores import cores_note, own_cores, pin
from ddp_course.scaling.efficiency import BACKWARD, DATA, EXPOSED, FORWARD, MODES, OPTIMIZER, PARTS, Sample, Scaling
from ddp_course.scaling.link import Link, SimulatedLink
from ddp_course.train.config import Config
from ddp_course.train.images import build_model

REPLICAS = ("torch", "course", "naive")
RUN_LIMIT_S = 300.0  # for one run on one set of ranks


@dataclass(frozen=True)
class Workload:
    """What is trained while the clock runs."""

    model: str = "mlp"  # as in Config
    hidden: int = 1024  # width of the MLP's hidden layers
    dataset: str = "digits"
    batch: int = 64  # rows of one backward pass: on each rank (weak), or over all ranks (strong)
    accumulation: int = 1  # backward passes in one step; the gradients are averaged in the last one
    replica: str = "torch"  # "torch": DistributedDataParallel, "course": BucketedDDP, "naive": all after backward
    bucket_mb: float = 25.0  # size in MiB at which a bucket closes
    link: Link | None = None  # send through a simulated link like this

    def __post_init__(self) -> None:
        if self.replica not in REPLICAS:
            raise ValueError(f"replica={self.replica!r} is not known; choose from {', '.join(REPLICAS)}")
        for name in ("batch", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.link is not None and self.replica == "naive":
            raise ValueError("the simulated link needs buckets: choose replica='torch' or 'course'")

    @property
    def title(self) -> str:
        """A few words for tables and pictures."""
        width = f" of width {self.hidden}" if self.model != "resnet18" else ""
        several = f" in {self.accumulation} passes a step" if self.accumulation > 1 else ""
        over = f", over a simulated link ({self.link.name})" if self.link else ""
        return f"{self.model}{width} on {self.dataset}, batches of {self.batch}{several}, {self.replica} replicas{over}"


@dataclass(frozen=True)
class Steps:
    """What one rank noted in one run: for each step, the seconds of its parts."""

    rows: int  # of this rank, in one step
    seconds: list[dict[str, float]]
    ready_s: list[float]  # when the last gradient was there, on the clock that all ranks of a machine share


# --- In the parent ---------------------------------------------------------------------------------


def measure_scaling(
    world_sizes: Sequence[int] = (1, 2),
    workload: Workload | None = None,
    *,
    mode: str = "weak",
    repeats: int = 7,
    steps: int = 20,
    warmup: int = 5,
    start_method: str = "forkserver",
) -> Scaling:
    """Measure each number of ranks `repeats` times, in turn.

    Args:
        world_sizes: all are compared with the smallest.
        mode: "weak" keeps the rows of each rank, "strong" those of all ranks together.
        steps: measured in one run.
        warmup: steps before them, which are dropped: in the first, memory and threads are new, and DDP plans its
            buckets again.
    Raises:
        ValueError: an argument is wrong; says which.
        RankError: a rank failed.
    """
    workload, sizes = workload or Workload(), sorted(set(world_sizes))
    _check(sizes, workload, mode, repeats, steps)
    found: dict[int, list[Sample]] = {size: [] for size in sizes}
    with ExitStack() as stack:
        settings = {"backend": "gloo", "start_method": start_method, "quiet": True}
        pools = {size: stack.enter_context(RankPool(size, **settings)) for size in sizes}
        for done in range(repeats):
            for size in sizes if done % 2 == 0 else reversed(sizes):
                batch = workload.batch // (size if mode == "strong" else 1)
                args = (workload, batch, steps, warmup, own_cores(size))
                found[size].append(summarised(pools[size].run(timed_steps, args, limit_s=RUN_LIMIT_S)))
    notes = [cores_note(size) for size in sizes]
    if 1 in sizes:
        notes.append("1 rank trains the bare module, without DistributedDataParallel or the like")
    return Scaling(mode, {size: tuple(samples) for size, samples in found.items()}, workload.title, tuple(notes))


def _check(sizes: list[int], workload: Workload, mode: str, repeats: int, steps: int) -> None:
    if not sizes or sizes[0] < 1:
        raise ValueError(f"world_sizes={sizes}: expected numbers of ranks from 1 on")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not known; choose from {', '.join(MODES)}")
    if repeats < 2 or steps < 1:
        raise ValueError(f"repeats={repeats}, steps={steps}: an interval needs two runs of at least one step")
    if mode == "strong" and (uneven := [size for size in sizes if workload.batch % size]):
        raise ValueError(f"a batch of {workload.batch} rows cannot be divided among {uneven[0]} ranks; choose another")


def summarised(by_rank: Sequence[Steps]) -> Sample:
    """Make one sample of what the ranks of one run noted: means over steps and ranks."""
    count = len(by_rank) * len(by_rank[0].seconds)
    seconds = {part: sum(step[part] for rank in by_rank for step in rank.seconds) / count for part in PARTS}
    waiting = 0.0
    for number, ready in enumerate(zip(*(rank.ready_s for rank in by_rank), strict=True)):
        for rank, mine in zip(by_rank, ready, strict=True):
            waiting += min(max(ready) - mine, rank.seconds[number][EXPOSED])
    return Sample(sum(rank.rows for rank in by_rank), seconds, waiting / count)


# --- On each rank ----------------------------------------------------------------------------------


def timed_steps(
    rank: int, world_size: int, workload: Workload, batch: int, steps: int, warmup: int, cores: list[int] | None
) -> Steps:
    """Take `warmup` steps, then `steps` more with the clock running.

    Collective: the replica's own; one barrier before the first step that counts.
    """
    pin(cores[rank] if cores else None)
    torch.manual_seed(0)
    images = load(workload.dataset)
    model = build_model(Config(model=workload.model, hidden=workload.hidden, dataset=workload.dataset), images)
    batches = _endless(images, batch, rank, world_size)
    last = LastGradient(model)  # before the replica, so that its hooks run before the replica's
    with ExitStack() as stack:
        replica = _replica(model, workload, world_size, stack)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        step = TimedStep(replica, last, optimizer, workload.accumulation)
        for _ in range(warmup):
            step(batches)
        dist.barrier()
        noted = [step(batches) for _ in range(steps)]
    last.close()
    del replica, step
    gc.collect()  # DDP's reducer, before the next one is built
    return Steps(batch * workload.accumulation, [seconds for seconds, _ in noted], [ready for _, ready in noted])


class LastGradient:
    """Knows when the newest gradient was there; at the end of backward that is the last one.

    Made before a replica, it notes each gradient before the replica copies it or sends it away.
    """

    def __init__(self, model: nn.Module) -> None:
        self.ready_s = 0.0
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in parameters]

    def _note(self, parameter: nn.Parameter) -> None:
        self.ready_s = time.monotonic()

    def close(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()


class TimedStep:
    """One training step that notes when each of its parts is over."""

    def __init__(
        self, replica: nn.Module, last: LastGradient, optimizer: torch.optim.Optimizer, accumulation: int = 1
    ) -> None:
        self.replica, self.last, self.optimizer, self.accumulation = replica, last, optimizer, accumulation

    def __call__(self, batches: Iterator) -> tuple[dict[str, float], float]:
        """Return the seconds of each part, and when the last gradient was there."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for left in reversed(range(self.accumulation)):
            at = [time.monotonic()]
            x_NCHW, label_N = next(batches)
            at.append(time.monotonic())
            with self.replica.no_sync() if left and hasattr(self.replica, "no_sync") else nullcontext():
                loss = F.cross_entropy(self.replica(x_NCHW), label_N)
                at.append(time.monotonic())
                loss.backward()
            if not left and isinstance(self.replica, NaiveDDP):
                self.replica.average_gradients()
            at += [self.last.ready_s, time.monotonic()]
            for part, begin, end in zip((DATA, FORWARD, BACKWARD, EXPOSED), at, at[1:], strict=False):
                seconds[part] += end - begin
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds[OPTIMIZER] = time.monotonic() - at[-1]
        return seconds, self.last.ready_s


def _replica(model: nn.Module, workload: Workload, world_size: int, stack: ExitStack) -> nn.Module:
    if world_size == 1:
        return model
    if workload.replica == "naive":
        return NaiveDDP(model, flat=True)
    kind = DistributedDataParallel if workload.replica == "torch" else BucketedDDP
    replica = kind(model, bucket_cap_mb=workload.bucket_mb)
    if workload.link is not None:
        stack.enter_context(SimulatedLink(workload.link)).attach(replica)
    return replica


def _endless(images: Images, batch: int, rank: int, world_size: int) -> Iterator:
    """Batches of one size, epoch after epoch."""
    sampler = ShardSampler(images, world_size, rank, drop_last=True)
    if len(sampler) < batch:
        raise ValueError(
            f"rank {rank}: a batch of {batch} rows does not fit into the {len(sampler)} rows that each of {world_size} "
            "ranks has; choose a smaller batch or fewer ranks"
        )
    loader = DataLoader(images, batch, sampler=sampler, drop_last=True)
    while True:
        yield from loader
        sampler.set_epoch(sampler.epoch + 1)
