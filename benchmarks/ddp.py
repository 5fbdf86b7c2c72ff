"""How long does a training step take with the course's replicas beside torch's DistributedDataParallel?

Four replicas of one network stand side by side on each of two ranks: torch's, the bucketed one, and the naive ones with
one all_reduce per parameter and with one for all. They take turns in blocks of steps, in an order drawn anew and the
same on every rank. A block's time is that of its slowest rank, a ratio is formed within one block. Before the clock
starts, all four must have come to the same parameters: a quick step that averages nothing is no step.

Left out on purpose: a GPU, where launching is cheap and waiting is long, and a real network. On loopback, gloo and the
network share the cores, so overlap gains little here, and what is compared is mostly the work around the all_reduces.
Read next: `measure.py`, what is made of the samples.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Plan, Result, Row, Target, find, limit
from ddp_course import RankError, RankPool
from ddp_course.models import MLP, resnet18_small
from ddp_course.parallel import BucketedDDP, NaiveDDP

TITLE = "One training step (forward, backward, averages, SGD): the course's replicas beside torch's DDP"
NOTES = [
    "Seconds of the slowest rank, per step; gloo on loopback, gradients as views into buckets in both DDPs.",
    "A ratio is that of two ways within one block of steps.",
]
BASE, LIMIT = "torch", 1.03
WAYS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "torch": ("torch's DDP", lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)),
    "bucketed": ("BucketedDDP", BucketedDDP),
    "naive": ("NaiveDDP", NaiveDDP),
    "flat": ("NaiveDDP, flat", lambda model: NaiveDDP(model, flat=True)),
}


def deep() -> nn.Module:
    """100 layers of 64: most of a step is the work around 200 small gradients."""
    widths = [64] * 101
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())), nn.Flatten())


SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # network, shape of a batch, steps a block
    "deep": (deep, (32, 64), 6),
    "wide": (lambda: MLP(1024, 2048, 10), (32, 1024), 4),
    "resnet18": (lambda: resnet18_small(10), (4, 3, 16, 16), 2),
}
BLOCKS, QUICK_BLOCKS, WARM_UP = 41, 3, 3
LIMIT_S = 300.0  # for all blocks of one network


def timed_steps(rank: int, world_size: int, shape: str, blocks: int) -> dict[str, list[float]]:
    """Return this rank's seconds per step, by way, for each block.

    Collective: one barrier per block and way, and what each way does in a step.
    """
    build, batch_shape, steps = SHAPES[shape]
    torch.manual_seed(rank)
    x = torch.randn(batch_shape)
    replicas, optimizers = {}, {}
    for name, (_, wrap) in WAYS.items():
        torch.manual_seed(0)
        replicas[name] = wrap(build())
        optimizers[name] = torch.optim.SGD(replicas[name].parameters(), lr=0.01)

    def take_steps(name: str, count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step(replicas[name], optimizers[name], x)
        return (time.perf_counter() - start) / count

    for name in WAYS:
        take_steps(name, WARM_UP)
        refuse_other_parameters(rank, name, replicas[name], replicas[BASE])
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    rng = random.Random(shape)  # the same order on every rank
    for _ in range(blocks):
        for name in rng.sample(list(WAYS), len(WAYS)):
            seconds[name].append(take_steps(name, steps))
    return seconds


def step(replica: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train on one batch. Collective: what the replica does in its forward, backward and averaging."""
    optimizer.zero_grad()
    score_NK = replica(x)
    F.cross_entropy(score_NK, torch.zeros(len(x), dtype=torch.long)).backward()
    if isinstance(replica, NaiveDDP):
        replica.average_gradients()
    optimizer.step()


def refuse_other_parameters(rank: int, name: str, replica: nn.Module, expected: nn.Module) -> None:
    pairs = zip(replica.module.named_parameters(), expected.module.parameters(), strict=True)
    for (param_name, param), theirs in pairs:
        if not torch.allclose(param, theirs, rtol=1e-4, atol=1e-5):
            off = (param - theirs).abs().max().item()
            raise RuntimeError(f"rank {rank}: {name} has another {param_name} than torch's DDP, off by {off:.2g}")


def measure(plan: Plan) -> Result:
    """Time the four ways on 2 ranks, or on those that `plan` names, for each network that it wants."""
    known = {row.key for row in empty_rows(2)}
    if unknown := plan.only - known:
        sys.exit(f"ddp has no row {', '.join(sorted(unknown))}; choose from {', '.join(sorted(known))}")
    rows = [row for world_size in plan.world_sizes for row in empty_rows(world_size)]
    for world_size in plan.world_sizes:
        mine = {row.key: row for row in rows if row.ranks == world_size}
        shapes = [shape for shape in SHAPES if any(plan.wants(key) for key in mine if key.endswith(f"_{shape}"))]
        try:
            with RankPool(world_size, backend="gloo", start_method="forkserver", quiet=True) as ranks:
                for shape in shapes:
                    print(f"ddp: {world_size} ranks, {shape}", file=sys.stderr, flush=True)
                    with limit(LIMIT_S, f"{shape} on {world_size} ranks"):
                        blocks = QUICK_BLOCKS if plan.quick else BLOCKS
                        fill(mine, shape, ranks.run(timed_steps, (shape, blocks)))
        except (RankError, TimeoutError) as error:
            for row in mine.values():
                row.failed = "" if row.samples else f"{type(error).__name__}: {error}"
    wanted = [row for row in rows if plan.wants(row.key)]
    return Result(TITLE, wanted, targets(wanted), NOTES)


def empty_rows(world_size: int) -> list[Row]:
    rows = []
    for shape in SHAPES:
        rows += [Row(f"{key}_{shape}", f"{label}, {shape}", world_size) for key, (label, _) in WAYS.items()]
        rows += [
            Row(f"{key}_ratio_{shape}", f"{label} / {WAYS[BASE][0]}, {shape}", world_size, unit="")
            for key, (label, _) in WAYS.items()
            if key != BASE
        ]
    return rows


def fill(rows: dict[str, Row], shape: str, by_rank: list[dict[str, list[float]]]) -> None:
    """Turn the ranks' seconds into the samples of one network: the slowest rank of each block, and ratios per block."""
    slowest = {way: [max(block) for block in zip(*(found[way] for found in by_rank), strict=True)] for way in WAYS}
    for way, seconds in slowest.items():
        rows[f"{way}_{shape}"].samples += seconds
        if way != BASE:
            pairs = zip(seconds, slowest[BASE], strict=True)
            rows[f"{way}_ratio_{shape}"].samples += [ours / theirs for ours, theirs in pairs]


def targets(rows: list[Row]) -> list[Target]:
    """The bucketed replica's step may take `LIMIT` times torch's, on 2 ranks."""
    found = {shape: find(rows, f"bucketed_ratio_{shape}", 2) for shape in SHAPES}
    return [
        Target(f"BucketedDDP / torch's DDP, {shape}, 2 ranks", LIMIT, row.median if row else None)
        for shape, row in found.items()
    ]
