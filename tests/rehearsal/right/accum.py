import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def setup():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def batches(rank, world, epoch, n=480, bs=8):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    mine = order[rank::world]
    return mine.split(bs)


def log(rank, *words):
    if rank == 0:
        print(*words)


def main(accumulate=3):
    rank, world = setup()
    torch.manual_seed(3)
    data = torch.randn(480, 6)
    target = data.mean(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
    ddp = DistributedDataParallel(model)
    optim = torch.optim.SGD(ddp.parameters(), lr=0.05 * world)
    for epoch in range(2):
        running = torch.zeros(1)
        count = 0
        parts = batches(rank, world, epoch)
        for i, idx in enumerate(parts):
            last = (i + 1) % accumulate == 0 or i + 1 == len(parts)
            ctx = contextlib.nullcontext() if last else ddp.no_sync()
            with ctx:
                loss = torch.nn.functional.mse_loss(ddp(data[idx]), target[idx]) / accumulate
                loss.backward()
            running += loss.detach() * accumulate
            count += 1
            if last:
                optim.step()
                optim.zero_grad()
        dist.all_reduce(running)
        log(rank, "epoch", epoch, "loss", running.item() / (count * world))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
