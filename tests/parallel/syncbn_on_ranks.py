"""Functions that the tests of SyncBatchNorm run on ranks. Ranks import this file, so it imports little."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.parallel import SyncBatchNorm
from tests.refusals import message_of

CHANNELS = 3


def the_batch(rows: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    size = (rows, CHANNELS, *shape)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 2 + 5), torch.randn(
        size, generator=generator, dtype=torch.float64
    )


def a_layer(shape: tuple[int, ...], **options) -> nn.Module:
    layer = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(shape)](
        CHANNELS, **options
    )
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 2, generator=torch.Generator().manual_seed(0))
        nn.init.uniform_(layer.bias, -1, 1, generator=torch.Generator().manual_seed(1))
    return layer.double()


def off_by(rank: int, world_size: int, sizes, shape, options) -> dict[str, float]:
    """Two steps of one layer on all rows by BatchNorm, and on this rank's by ours: the largest differences."""
    whole, start = a_layer(shape, **options), sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    sync = SyncBatchNorm.convert(copy.deepcopy(whole))
    found: dict[str, float] = {}

    def compare(name, ours, theirs):
        different = (ours - theirs).abs().max().item() if ours.numel() else 0.0
        found[name] = max(found.get(name, 0.0), different)

    for step in range(2):
        x, dy = the_batch(sum(sizes), shape)
        x = x + step
        all_x, own_x = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        all_y, own_y = whole(all_x), sync(own_x)
        whole.zero_grad(), sync.zero_grad()
        (all_y * dy).sum().backward()
        (own_y * dy[mine]).sum().backward()
        compare("output", own_y, all_y[mine])
        compare("input gradient", own_x.grad, all_x.grad[mine])
        for (name, theirs), ours in zip(whole.named_parameters(), sync.parameters(), strict=True):
            total = ours.grad.clone()
            dist.all_reduce(total)
            compare(f"{name} gradient", total, theirs.grad)
        for (name, theirs), ours in zip(whole.named_buffers(), sync.buffers(), strict=True):
            compare(name, ours.double(), theirs.double())
    whole.eval(), sync.eval()
    x, _ = the_batch(4, shape)
    compare("eval", sync(x), whole(x))
    return found


def off_by_all(rank, world_size, cases):
    return [off_by(rank, world_size, *case) for case in cases]


# --- Single facts ------------------------------------------------------------------------------------


def facts(rank: int, world_size: int) -> dict:
    found: dict = {}
    layer = SyncBatchNorm(CHANNELS)
    x = torch.randn(4, CHANNELS, 2, 2, requires_grad=True)
    with Collectives() as seen:
        layer(x).sum().backward()
    found["training"] = [(call.op, call.in_backward) for call in seen.calls]
    with Collectives() as seen, torch.no_grad():
        layer(x)
        layer.eval()(x)
        SyncBatchNorm(CHANNELS, track_running_stats=False).eval()(x)
    found["no_grad and eval"] = [call.op for call in seen.calls]

    half = SyncBatchNorm(CHANNELS)(torch.randn(8, CHANNELS).bfloat16() + 100)
    found["bfloat16"] = (str(half.dtype), round(half.float().std(correction=0).item(), 1) > 0.5)

    far = SyncBatchNorm(1)
    values = 1e4 + torch.arange(8.0).view(8, 1) / 8 + rank / 16  # 16 values over two ranks, 1/16 apart
    far(values)
    found["variance"] = far.running_var.item()

    one = [dist.new_group([peer]) for peer in range(world_size)][rank]
    alone, plain = SyncBatchNorm(CHANNELS, process_group=one), nn.BatchNorm2d(CHANNELS)
    own = torch.randn(4, CHANNELS, 2, 2, generator=torch.Generator().manual_seed(rank))
    found["group of one"] = (alone(own) - plain(own)).abs().max().item() < 1e-6

    found["one value"] = message_of(lambda: SyncBatchNorm(CHANNELS)(torch.zeros(1 - rank, CHANNELS)))
    found["channels"] = message_of(lambda: SyncBatchNorm(CHANNELS)(torch.zeros(4, 5)))
    found["torch's own"] = message_of(lambda: nn.SyncBatchNorm(CHANNELS)(torch.zeros(4, CHANNELS)))
    again = SyncBatchNorm(CHANNELS)(x).square().sum()
    (first,) = torch.autograd.grad(again, x, create_graph=True)
    found["second derivative"] = message_of(lambda: first.sum().backward())
    return found


def off_torchs_own(rank: int, world_size: int) -> dict[str, float]:
    """One step of torch's SyncBatchNorm and of ours, on this rank's GPU."""
    ours = SyncBatchNorm(CHANNELS).cuda()
    theirs = nn.SyncBatchNorm(CHANNELS).cuda()
    x = torch.randn(4, CHANNELS, 2, 2, generator=torch.Generator().manual_seed(rank)).cuda()
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ours(one) ** 3).sum().backward()
    (theirs(two) ** 3).sum().backward()
    pairs = {"input": (one.grad, two.grad), "weight": (ours.weight.grad, theirs.weight.grad)}
    pairs |= {name: (getattr(ours, name), getattr(theirs, name)) for name in ("running_mean", "running_var")}
    return {name: (a - b).abs().max().item() for name, (a, b) in pairs.items()}
