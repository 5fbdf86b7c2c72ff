"""Train a small network on several devices: `one_device.py` with six numbered changes.

    torchrun --standalone --nproc-per-node 2 ddp.py
    torchrun --standalone --nproc-per-node 4 ddp.py --epochs 8 --checkpoint run.pt

It prints the numbers of `one_device.py` if the number of ranks divides the batch.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH = 64  # of all ranks together


def make_data(samples, seed):
    """Points of a plane in two classes, inside and outside of a ring."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.norm(dim=1) < 1.2).long())


def make_model():
    torch.manual_seed(0)
    hidden = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, 2))


def evaluate(model, data, device):
    """Return the share of samples that the model gets right."""
    found = torch.zeros(2, device=device)
    for x, y in DataLoader(data, batch_size=256):
        found[0] += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        found[1] += len(x)
    dist.all_reduce(found)  # 5: sums over all ranks, then one division
    return (found[0] / found[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint")
    options = parser.parse_args()
    # A GPU for each rank of this machine; where there are fewer, the CPU for all.
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    # 1: a group of ranks, each with a device of its own
    dist.init_process_group(backend, device_id=device if cuda else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train, test = make_data(2048, seed=1), make_data(1001, seed=2)
    sampler = DistributedSampler(train, seed=0)  # 2: each rank has its own samples
    loader = DataLoader(train, BATCH // world_size, sampler=sampler)
    test = Subset(test, range(rank, len(test), world_size))
    model = make_model().to(device)
    # 3: equal weights at the start, and the mean gradient in each step
    replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
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
        # The loss of all ranks' samples: part of change 5.
        dist.all_reduce(total)
        model.eval()
        with torch.no_grad():
            accuracy = evaluate(model, test, device)
        mean = total.item() / len(train)
        if rank == 0:  # 5: one rank prints
            print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.4f}")
        if options.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state["epoch"] = epoch + 1
            if rank == 0:  # 6: one rank writes, and the others wait for the file
                torch.save(state, options.checkpoint + ".part")
                os.replace(options.checkpoint + ".part", options.checkpoint)
            dist.barrier()

    dist.barrier()  # no rank leaves while another still communicates with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
