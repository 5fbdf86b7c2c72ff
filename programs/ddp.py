"""Train a small network on several devices: `one_device.py` with six changes, marked by their numbers.

    torchrun --nproc-per-node 2 ddp.py
    torchrun --nproc-per-node 4 ddp.py --epochs 4 --checkpoint run.pt     # and again, with more epochs: it goes on

The numbers that it prints are those of `one_device.py`, whatever the number of ranks. Read next: `ddp_spawn.py`.
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
    """Return the share of rows that the model gets right; each rank looks at its own rows, each row once."""
    found = torch.zeros(2, device=device)
    mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    for x, y in DataLoader(mine, batch_size=256):
        found[0] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        found[1] += len(x)
    dist.all_reduce(found)  # 5: sums and counts over all ranks, then one division
    return (found[0] / found[1]).item()


def main():
    options = read_options()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # 1: the group, and a device of one's own
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    train, test = make_data(2048, seed=1), make_data(1001, seed=2)
    sampler = DistributedSampler(train, shuffle=True)  # 2: each rank its own rows
    loader = DataLoader(train, batch_size=options.batch // world_size, sampler=sampler)
    model = make_model().to(device)
    replica = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)  # 4: one model
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    first = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)  # 6: onto one's own device
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)  # 3: another order in each epoch
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
        if rank == 0:  # 5: one voice
            print(f"epoch {epoch}: loss {total.item() / len(train):.6f}, accuracy {accuracy:.6f}", flush=True)
        if options.checkpoint:
            if rank == 0:  # 6: one writer; the others wait, so that nobody loads half a file
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(state, options.checkpoint + ".part")
                os.replace(options.checkpoint + ".part", options.checkpoint)
            dist.barrier()

    dist.barrier()  # a thread of gloo that lets go of a tensor while Python shuts down would abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
