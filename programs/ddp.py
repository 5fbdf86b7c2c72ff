"""Train a small network on several devices: `one_device.py` with six changes, marked by their numbers.

    torchrun --nproc-per-node 2 ddp.py
    torchrun --nproc-per-node 4 ddp.py --epochs 4 --checkpoint run.pt     # again, with more epochs: it continues

It prints the numbers of `one_device.py` if the number of ranks divides the batch. Read next: `ddp_spawn.py`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from one_device import make_data, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def read_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--checkpoint")
    return parser.parse_args()


def evaluate(model, data, device):
    """Return the share of rows that the model gets right."""
    found = torch.zeros(2, device=device)
    mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    for x, y in DataLoader(mine, batch_size=256):
        found[0] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        found[1] += len(x)
    dist.all_reduce(found)  # 5: sums and counts over all ranks, then one division
    return (found[0] / found[1]).item()


def main():
    options = read_options()
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    # 1: a group of ranks, each with a device of its own
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train, test = make_data(2048, seed=1), make_data(1001, seed=2)
    sampler = DistributedSampler(train, shuffle=True)  # 2: rows of its own for each rank
    loader = DataLoader(train, batch_size=options.batch // world_size, sampler=sampler)
    model = make_model().to(device)
    # 3: equal weights at the start, and averaged gradients in each step
    replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    first = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)  # 4: a new order in each epoch
        total = torch.zeros((), device=device)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replica(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(x)
        dist.all_reduce(total)
        model.eval()
        with torch.no_grad():
            accuracy = evaluate(model, test, device)
        mean = total.item() / len(train)
        if rank == 0:  # 5: one rank prints
            print(f"epoch {epoch}: loss {mean:.6f}, accuracy {accuracy:.6f}", flush=True)
        if options.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["epoch"] = epoch + 1
            if rank == 0:  # 6: one rank writes, and the others wait until the file is complete
                torch.save(state, options.checkpoint + ".part")
                os.replace(options.checkpoint + ".part", options.checkpoint)
            dist.barrier()

    # wait for all ranks before shutting down: gloo may still be using a tensor
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
