"""A DDP of our own, compared with torch's DDP and with one process on whole batches.

torchrun --standalone --nproc-per-node 2 own_ddp.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, BATCH, SAMPLES = 3, 64, 1792  # a batch is that of all ranks together


class OwnDDP(nn.Module):
    """A replica of rank 0's module, whose gradients are means over the ranks."""

    def __init__(self, module):
        super().__init__()
        self.module, self.works = module, []
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_average)

    def forward(self, *inputs, **kwargs):
        if torch.is_grad_enabled():  # in training; rank 0's buffers for all
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(*inputs, **kwargs)

    def start_average(self, parameter):
        if not self.works:  # in the first hook; private, but FSDP uses it, too
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        parameter.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for work in self.works:
            work.wait()
        self.works.clear()


class Digits(nn.Module):
    """Two layers, and a buffer: the mean of some samples."""

    def __init__(self, seed, x):
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("mean", x.mean(dim=0))
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers((x - self.mean) / 16)


def train(replica, x, y, rank, world_size):
    """Train on this rank's part of each batch."""
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        if rank == 0:  # the other ranks get this mean in the next forward
            next(replica.buffers()).copy_(x[order[:BATCH]].mean(dim=0))
        for batch in order.split(BATCH):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(replica(x[mine]), y[mine]).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 1.0)  # of the mean
            optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(replica(x), y)
    return loss.item(), torch.cat([p.detach().flatten() for p in replica.parameters()])


def main():
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    pixels, labels = load_digits(return_X_y=True)
    x, y = (torch.tensor(each[:SAMPLES], device=device) for each in (pixels, labels))
    alone = Digits(0, x[::world_size]).to(device)  # on every rank, whole batches
    own, other = (Digits(rank, x[rank::world_size]).to(device) for _ in range(2))
    ddp = DistributedDataParallel(other, device_ids=[device] if cuda else None)
    runs = {
        "one process": train(alone, x, y, 0, 1),
        "own DDP": train(OwnDDP(own), x, y, rank, world_size),
        "torch's DDP": train(ddp, x, y, rank, world_size),
    }
    for name, (loss, weights) in runs.items():
        ends = torch.stack([weights, -weights])  # maxima: highest, minus lowest
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        apart = ends.sum(dim=0).max().item()
        if rank == 0:
            off = (weights - runs["one process"][1]).abs().max().item()
            numbers = f"ranks apart {apart}   from one process {off:.12f}"
            print(f"{name:12} loss {loss:.12f}   {numbers}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
