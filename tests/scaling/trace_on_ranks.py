"""Functions that the tests of trace.py run on ranks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.scaling.trace import record_trace, stage
from tests.refusals import message_of

WIDTH, LAYERS = 32, 5
BUCKET_MB = 1.5 * WIDTH * WIDTH * 4 / 2**20  # two layers are over it, so a bucket holds at most two


class Gate(torch.autograd.Function):
    """The identity. Its backward lets nothing pass before the first bucket has been reduced."""

    @staticmethod
    def forward(ctx, x, gradient_futures):
        ctx.futures = gradient_futures
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.futures is not None:
            assert ctx.futures, "no bucket was launched although the last layers are done"
            ctx.futures[0].wait()
        return grad, None


class Gated(nn.Module):
    """Layers of equal size; the first is behind the gate in backward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.later = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)))
        self.futures = None

    def forward(self, x):
        return self.later(Gate.apply(self.first(x), self.futures))


def gated_step(rank, world_size, wrap=DistributedDataParallel, options=None):
    """Spans of a step in which, whatever the machine's load, the first bucket is reduced amid backward.

    Also those of the same step inside no_sync, and the payload of all gradients.
    """
    torch.manual_seed(0)
    module = Gated()
    replica = wrap(module, bucket_cap_mb=BUCKET_MB, **(options or {}))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    futures = []

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
        futures.append(future)
        return future

    replica.register_comm_hook(None, hook)

    def step(synchronised=True, gated=True):
        futures.clear()
        module.futures = futures if synchronised and gated else None
        with nullcontext() if synchronised else replica.no_sync():
            with stage("forward"):
                loss = replica(torch.ones(8, WIDTH)).square().mean()
            with stage("backward"):
                loss.backward()
        with stage("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    step(gated=False)  # torch's DDP puts all in one bucket at first, and plans again after this
    step(gated=False)
    with_sync = record_trace(step, warmup=1)
    without = record_trace(lambda: step(synchronised=False), warmup=0)
    payload = sum(parameter.numel() * 4 for parameter in module.parameters())
    dist.barrier()
    return with_sync, without, payload


def reduced_after_backward(rank, world_size):
    """Spans of a step in which the gradients wait for the end of backward."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()

    def step():
        with stage("forward"):
            loss = module(torch.ones(2, 4, dtype=torch.float64)).sum()
        with stage("backward"):
            loss.backward()
        with stage("waiting"):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad)

    return record_trace(step, warmup=1)


def ping_pong(rank, world_size, rounds=4):
    """A message goes to and fro; each rank marks the moments when it holds it."""
    message, peer = torch.zeros(1), 1 - rank

    def play():
        for _ in range(rounds):
            if rank == 1:
                dist.recv(message, peer)
            with stage("forward"):
                message.add_(1)
            dist.send(message, peer)
            if rank == 0:
                dist.recv(message, peer)

    return record_trace(play, warmup=1)


def refusals(rank, world_size):
    """What is said when nothing is marked, or a stage is not known."""
    wrong = (lambda: record_trace(lambda: torch.ones(1).add(1)), lambda: stage("backwards"))
    return [message_of(call) for call in wrong]
