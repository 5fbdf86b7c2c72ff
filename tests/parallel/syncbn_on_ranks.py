"""Functions that the tests of SyncBatchNorm run on ranks. Ranks import this file, so it imports little."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.parallel import BucketedDDP, NaiveDDP, SyncBatchNorm
from tests.parallel.replicas_on_ranks import message_of

CHANNELS = 3


class Counted:
    """Counts the collectives that SyncBatchNorm starts."""

    def __enter__(self):
        self.calls: list[str] = []
        self.real = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}
        for name in self.real:
            setattr(dist, name, self._counting(name))
        return self

    def _counting(self, name):
        def call(*args, **kwargs):
            self.calls.append(name)
            return self.real[name](*args, **kwargs)

        return call

    def __exit__(self, *_):
        for name, real in self.real.items():
            setattr(dist, name, real)


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


# --- Training --------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)]
    return nn.Sequential(*layers).double()


WRAPPERS = {"torch": DistributedDataParallel, "bucketed": BucketedDDP, "naive": NaiveDDP}


def trained(rank: int, world_size: int, way: str, sizes, steps: int = 20) -> dict[str, torch.Tensor]:
    """Train on this rank's rows; `way` "alone" is one process with BatchNorm on the whole batch."""
    model = network()
    rows, start = sum(sizes), sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    replica = model if way == "alone" else WRAPPERS[way](SyncBatchNorm.convert(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x, y = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 2))
        optimizer.zero_grad()
        # So scaled that the mean over ranks is the mean over all rows, however they are divided.
        ((replica(x[mine]) - y[mine]).square().sum() * world_size / rows).backward()
        if way == "naive":
            replica.average_gradients()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained_all(rank, world_size, divisions):
    return {(way, sizes): trained(rank, world_size, way, sizes) for way in WRAPPERS for sizes in divisions}


# --- Single facts ------------------------------------------------------------------------------------


def facts(rank: int, world_size: int) -> dict:
    found: dict = {}
    layer = SyncBatchNorm(CHANNELS)
    x = torch.randn(4, CHANNELS, 2, 2, requires_grad=True)
    with Counted() as counted:
        y = layer(x)
        found["forward"] = list(counted.calls)
        y.sum().backward()
        found["and backward"] = list(counted.calls)
    with Counted() as counted, torch.no_grad():
        layer(x)
        found["no_grad"] = list(counted.calls)
        layer.eval()(x)
        SyncBatchNorm(CHANNELS, track_running_stats=False).eval()(x)
        found["and eval"] = list(counted.calls)

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
