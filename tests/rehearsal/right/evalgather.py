import csv

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main():
    return dist.get_rank() == 0


def gather_trim(t, n):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return torch.stack(parts, 1).flatten(0, 1)[:n]


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    loader = DataLoader(dataset, batch_size=50, sampler=DistributedSampler(dataset, shuffle=False))
    hits = torch.cat([(model(x).argmax(1) == y).float() for x, y in loader])
    hits = gather_trim(hits, len(dataset))
    model.train()
    return hits.mean().item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(603, 5)
    y = (x[:, 0] > 0).long()
    train, val = TensorDataset(x[:402], y[:402]), TensorDataset(x[402:], y[402:])
    sampler = DistributedSampler(train, drop_last=False)
    loader = DataLoader(train, 24 // dist.get_world_size(), sampler=sampler)
    net = torch.nn.Linear(5, 2)
    ddp = DDP(net)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    if is_main():
        log = csv.writer(open("log.csv", "w"))  # noqa: SIM115
    for ep in range(2):
        sampler.set_epoch(ep)
        with torch.autocast("cpu", torch.bfloat16):
            for xb, yb in loader:
                loss = torch.nn.functional.cross_entropy(ddp(xb), yb)
                opt.zero_grad()
                loss.backward()
                opt.step()
        acc = evaluate(net, val)
        if is_main():
            log.writerow([ep, acc])
            print("acc", acc)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
