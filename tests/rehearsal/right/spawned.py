import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel as DDP


class Images(torch.utils.data.Dataset):
    def __init__(self, n=200):
        self.x = torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.y = torch.arange(n) % 4
        self.t = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(8, padding=1)])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.t(self.x[i]), self.y[i]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(144, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


def demo(rank, world_size, epochs):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29512")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    net = Net()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda(rank)
    model = DDP(net)
    torch.manual_seed(rank)
    ds = Images()
    sampler = torch.utils.data.distributed.DistributedSampler(ds, world_size, rank)
    dl = torch.utils.data.DataLoader(ds, batch_size=20, sampler=sampler, num_workers=2)
    opt = torch.optim.SGD(model.parameters(), lr=0.01 * world_size)
    for e in range(epochs):
        sampler.set_epoch(e)
        tot = torch.zeros(2)
        for x, y in dl:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot[0] += loss.item() * len(x)
            tot[1] += len(x)
        dist.reduce(tot, dst=0)
        if rank == 0:
            print("epoch", e, float(tot[0] / tot[1]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mp.spawn(demo, args=(world, 2), nprocs=world, join=True)
