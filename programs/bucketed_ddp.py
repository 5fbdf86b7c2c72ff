"""A DDP of our own with buckets and no_sync, compared with torch's DDP and one process.

torchrun --standalone --nproc-per-node 2 bucketed_ddp.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

STEPS, BATCH = 28, 64  # 64 samples a step on 1, 2 or 4 ranks together


class BucketDDP(nn.Module):
    """A replica of rank 0's module; for parameters of one dtype that are all used."""

    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module, self.sync, self.send, self.sent = module, True, False, 0
        self.buckets, self.missing, self.works = [[]], set(), []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        for param in reversed([p for p in module.parameters() if p.requires_grad]):
            if sum(p.nbytes for p in self.buckets[-1]) >= cap_bytes:
                self.buckets.append([])
            self.buckets[-1].append(param)
            param.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *inputs, **kwargs):  # notes if its backward communicates
        self.send = self.sync if torch.is_grad_enabled() else self.send
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self):
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def ready(self, param):
        if not self.send:
            return
        if not self.missing:  # the first hook of this backward
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.missing = {p for bucket in self.buckets for p in bucket}
        self.missing.discard(param)
        for bucket in self.buckets[len(self.works) :]:  # those not sent yet
            if not self.missing.isdisjoint(bucket):
                break  # a full bucket waits for those before it in the plan
            flat = torch.cat([p.grad.flatten() for p in bucket]) / dist.get_world_size()
            self.works.append((dist.all_reduce(flat, async_op=True), flat))
            self.sent += 1

    def finish(self):
        for bucket, (work, flat) in zip(self.buckets, self.works, strict=True):
            work.wait()
            means = flat.split([param.numel() for param in bucket])
            for param, mean in zip(bucket, means, strict=True):
                param.grad.copy_(mean.view_as(param))
        self.works = []


def train(replica, x, y, rank, world_size):
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = slice(step * BATCH + rank, (step + 1) * BATCH, world_size)
        (x0, x1), (y0, y1) = x[batch].chunk(2), y[batch].chunk(2)
        with getattr(replica, "no_sync", contextlib.nullcontext)():
            (F.cross_entropy(replica(x0), y0) / 2).backward()
        (F.cross_entropy(replica(x1), y1) / 2).backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in replica.parameters()])


def main():
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one each
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, device=device), torch.tensor(labels, device=device)
    nets = []
    for seed in (0, rank, rank):  # other first weights, until DDP broadcasts rank 0's
        torch.manual_seed(seed)
        nets += [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(x)]
    own = BucketDDP(nets[1], cap_bytes=5_000)
    theirs = nn.parallel.DistributedDataParallel(nets[2])
    alone = train(nets[0], x, y, 0, 1)
    for name, replica in (("own DDP", own), ("torch's DDP", theirs)):
        weights = train(replica, x, y, rank, world_size)
        off = (weights - alone).abs().max()
        dist.all_reduce(off, op=dist.ReduceOp.MAX)  # of the worst rank
        if rank == 0:
            print(f"{name:11} norm {weights.norm():.9f}, largest difference {off:.9f}")
    if rank == 0:
        print(f"one process norm {alone.norm():.9f}; own DDP: {own.sent} all-reduces")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
