import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

CKPT = "state.pt"


def save(model, opt, sched, epoch, rank):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if rank == 0:
        torch.save(
            {
                "model": model.module.state_dict(),
                "opt": opt.state_dict(),
                "sched": sched.state_dict(),
                "epoch": epoch,
                "rng": rng,
            },
            CKPT + ".tmp",
        )
        os.replace(CKPT + ".tmp", CKPT)
    dist.barrier()


def load(model, opt, sched, rank):
    if not os.path.exists(CKPT):
        return 0
    state = torch.load(CKPT, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    sched.load_state_dict(state["sched"])
    torch.set_rng_state(state["rng"][rank].clone())
    return state["epoch"]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = x[:, :1].sin()
    model = DDP(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
    torch.manual_seed(1000 + rank)
    ds = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.DistributedSampler(ds, world, rank)
    loader = torch.utils.data.DataLoader(
        ds, batch_size=64 // world, sampler=sampler, generator=torch.Generator().manual_seed(5)
    )
    start = load(model, opt, sched, rank)
    for epoch in range(start, 4):
        sampler.set_epoch(epoch)
        s = torch.zeros(2)
        for a, b in loader:
            opt.zero_grad()
            loss = (model(a) - b).square().mean()
            loss.backward()
            opt.step()
            s += torch.tensor([loss.item() * len(a), len(a)])
        sched.step()
        dist.all_reduce(s)
        if rank == 0:
            print("epoch", epoch, "loss", (s[0] / s[1]).item())
        save(model, opt, sched, epoch + 1, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
