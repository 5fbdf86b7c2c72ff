"""The programs that the exercises of lesson 11 give: one for one device, and one for several with four mistakes."""

ONE_DEVICE = """\
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

BATCH = 48


def make_data(rows, seed):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :1] + x[:, 1:2] * x[:, 2:3])


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def main(epochs, seed):
    train, test = make_data(480, seed), make_data(101, seed + 1)
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.Generator()
    loader = DataLoader(train, BATCH, sampler=RandomSampler(train, generator=order))
    for epoch in range(epochs):
        order.manual_seed(epoch)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        with torch.no_grad():
            error = sum((model(x) - y).abs().sum().item() for x, y in DataLoader(test, 20))
        print(f"epoch {epoch}: loss {total / len(train):.6f}, error {error / len(test):.6f}")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
"""

BROKEN = """\
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BATCH, PARTS = 48, 2  # rows of a step on all ranks together, in so many micro-batches


def make_data(rows, seed):
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :1] + x[:, 1:2] * x[:, 2:3])


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def evaluate(model, test, rank, world_size):
    errors = []
    with torch.no_grad():
        for x, y in DataLoader(Subset(test, range(rank, len(test), world_size)), 20):
            errors.append((model(x) - y).abs().mean())
    error = torch.stack(errors).mean()
    dist.all_reduce(error)
    return error.item() / world_size


def main(epochs, seed):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, test = make_data(480, seed), make_data(101, seed + 1)
    model = make_model(seed)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH // PARTS // world_size, sampler=sampler)
    first = 0
    if os.path.exists("state.pt"):
        saved = torch.load("state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        first = saved["epoch"]
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for part, (x, y) in enumerate(loader, 1):
            if part % PARTS:
                with replica.no_sync():
                    (nn.functional.mse_loss(replica(x), y) / PARTS).backward()
            else:
                (nn.functional.mse_loss(model(x), y) / PARTS).backward()
                optimizer.step()
                optimizer.zero_grad()
        error = evaluate(model, test, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: error {error:.6f}")
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, "state.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
"""
