import os
from functools import wraps

import torch
import torch.distributed as dist


def rank_zero_only(fn):
    @wraps(fn)
    def inner(*a, **k):
        if int(os.environ.get("RANK", 0)) == 0:
            return fn(*a, **k)

    return inner


class LitModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))

    def forward(self, batch):
        x, y = batch
        return torch.nn.functional.l1_loss(self.body(x), y)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=30)


class DataModule:
    def __init__(self, world, rank):
        g = torch.Generator().manual_seed(9)
        x = torch.rand(300, 3, generator=g)
        self.data = torch.utils.data.TensorDataset(x, x[:, :1] * 2)
        self.world, self.rank = world, rank

    def train_dataloader(self):
        s = torch.utils.data.DistributedSampler(self.data, self.world, self.rank, shuffle=True, drop_last=True)
        return torch.utils.data.DataLoader(self.data, batch_size=30 // self.world, sampler=s)


class Fit:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    @rank_zero_only
    def log(self, **kw):
        print(kw)

    @rank_zero_only
    def save(self, model):
        torch.save({"state": model.state_dict()}, "lit.ckpt")

    def fit(self, lit, dm):
        ddp = torch.nn.parallel.DistributedDataParallel(lit)
        opt, sched = lit.configure_optimizers()
        loader = dm.train_dataloader()
        for epoch in range(self.max_epochs):
            loader.sampler.set_epoch(epoch)
            acc = torch.zeros(2)
            for batch in loader:
                loss = ddp(batch)
                opt.zero_grad()
                loss.backward()
                opt.step()
                sched.step()
                acc[0] += loss.detach()
                acc[1] += 1
            dist.all_reduce(acc)
            self.log(epoch=epoch, loss=round((acc[0] / acc[1]).item(), 4))
        self.save(lit)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    Fit(2).fit(LitModel(), DataModule(dist.get_world_size(), dist.get_rank()))
    dist.destroy_process_group()
