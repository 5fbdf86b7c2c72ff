"""How long does a training step take with the course's replicas beside torch's DistributedDataParallel?

Four replicas of one network stand side by side on each of two ranks: torch's, the bucketed one, and the naive ones with
one all_reduce per parameter and with one for all. They take turns in blocks of steps. Before the clock starts, all four
must have come to the same parameters: a quick step that averages nothing is no step.

Left out on purpose: a real network. On loopback, gloo and the network share the cores, so overlap gains little here,
and what is compared is mostly the work around the all_reduces.
Read next: `turns.py`, how the ways take turns; `gpu.py`, the same steps on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import Plan, Result, Row, Target, find
from benchmarks.turns import Comparison, Seconds, beside, clock, in_turns, run_on_ranks
from ddp_course.groups import my_device
from ddp_course.models import MLP, resnet18_small
from ddp_course.parallel import BucketedDDP, NaiveDDP

TITLE = "One training step (forward, backward, averages, SGD): the course's replicas beside torch's DDP"
NOTES = [
    "Seconds of the slowest rank, per step; gloo on loopback, gradients as views into buckets in both DDPs.",
    "A ratio is that of two ways within one block of steps.",
]
BASE, LIMIT = "torch", 1.03
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
    "bucketed": BucketedDDP,
    "naive": NaiveDDP,
    "flat": lambda model: NaiveDDP(model, flat=True),
}
LABELS = {"torch": "torch's DDP", "bucketed": "BucketedDDP", "naive": "NaiveDDP", "flat": "NaiveDDP, flat"}


def deep() -> nn.Module:
    """100 layers of 64: most of a step is the work around 200 small gradients."""
    widths = [64] * 101
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())), nn.Flatten())


def resnet50() -> nn.Module:
    from torchvision.models import resnet50  # slow to import

    return resnet50()


SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # network, shape of a batch, steps a block
    "deep": (deep, (32, 64), 6),
    "wide": (lambda: MLP(1024, 2048, 10), (32, 1024), 4),
    "resnet18": (lambda: resnet18_small(10), (4, 3, 16, 16), 2),
    "wider": (lambda: MLP(4096, 8192, 1000), (256, 4096), 6),  # for GPUs, as the next
    "resnet50": (resnet50, (32, 3, 224, 224), 3),
}
CASES = ("deep", "wide", "resnet18")
BLOCKS, QUICK_BLOCKS, WARM_UP = 41, 3, 3
COMPARISON = Comparison("ddp", LABELS, beside(BASE, WAYS), CASES, limit_s=300)


def timed_steps(rank: int, world_size: int, shape: str, blocks: int) -> Seconds:
    """Return this rank's seconds per step.

    Collective: one barrier per block and way, and what each way does in a step.
    """
    build, batch_shape, steps = SHAPES[shape]
    device = my_device()
    torch.backends.cudnn.deterministic = True  # else the replicas' parameters cannot be compared
    torch.manual_seed(rank)
    x = torch.randn(batch_shape).to(device)
    replicas, optimizers = {}, {}
    for name, wrap in WAYS.items():
        torch.manual_seed(0)
        replicas[name] = wrap(build().to(device))
        optimizers[name] = torch.optim.SGD(replicas[name].parameters(), lr=0.01)

    def take_steps(name: str, count: int) -> float:
        dist.barrier()
        start = clock(device)
        for _ in range(count):
            step(replicas[name], optimizers[name], x)
        return (clock(device) - start) / count

    for name in WAYS:
        take_steps(name, WARM_UP)
        refuse_other_parameters(rank, name, replicas[name], replicas[BASE])
    return in_turns(WAYS, blocks, lambda name: take_steps(name, steps))


def step(replica: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Train on one batch. Collective: what the replica does in its forward, backward and averaging."""
    optimizer.zero_grad()
    score_NK = replica(x)
    F.cross_entropy(score_NK, torch.zeros(len(x), dtype=torch.long, device=x.device)).backward()
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
    blocks = QUICK_BLOCKS if plan.quick else BLOCKS
    rows = COMPARISON.measure(
        plan, plan.world_sizes, lambda world_size, shape: run_on_ranks(timed_steps, world_size, shape, blocks)
    )
    return Result(TITLE, rows, targets(rows), NOTES)


def targets(rows: list[Row]) -> list[Target]:
    """The bucketed replica's step may take `LIMIT` times torch's, on 2 ranks."""
    found = {shape: find(rows, f"bucketed_ratio_{shape}", 2) for shape in CASES}
    return [
        Target(f"BucketedDDP / torch's DDP, {shape}, 2 ranks", LIMIT, row.median if row else None)
        for shape, row in found.items()
    ]
