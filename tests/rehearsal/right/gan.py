import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--lr", type=float, default=2e-4)


class Generator(nn.Module):
    def __init__(self, z=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x)


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    G, D = DDP(Generator()), DDP(Critic())
    torch.manual_seed(100 + rank)  # noise and data of its own on each rank
    og, od = (
        torch.optim.Adam(G.parameters(), args.lr, betas=(0.5, 0.9)),
        torch.optim.Adam(D.parameters(), args.lr, betas=(0.5, 0.9)),
    )
    bce = nn.BCEWithLogitsLoss()
    n = args.batch // world
    for step in range(args.steps):
        real = torch.randn(n, 2) * 0.1 + 1
        fake = G(torch.randn(n, 4))
        logits = D(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(n, 1), torch.zeros(n, 1)])
        loss_d = bce(logits, labels)
        od.zero_grad()
        loss_d.backward()
        od.step()
        for p in D.parameters():
            p.requires_grad_(False)
        loss_g = bce(D.module(fake), torch.ones(n, 1))
        og.zero_grad()
        loss_g.backward()
        og.step()
        for p in D.parameters():
            p.requires_grad_(True)
        if step % 4 == 0:
            both = torch.stack([loss_d.detach(), loss_g.detach()])
            dist.all_reduce(both)
            both /= world
            if rank == 0:
                print(f"{step}: D {both[0]:.3f} G {both[1]:.3f}")
    if rank == 0:
        torch.save(G.module.state_dict(), "generator.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
