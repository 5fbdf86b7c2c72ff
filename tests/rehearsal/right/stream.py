import itertools
import logging
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world = n, rank, world

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        shard, shards = self.rank * nw + wid, self.world * nw
        for i in itertools.islice(range(self.n), shard, None, shards):
            g = torch.Generator().manual_seed(i)
            x = torch.randn(5, generator=g)
            yield x, x.sum().unsqueeze(0)


def get_logger(rank):
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return logger


def worker():
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    logger = get_logger(rank)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Lines(640, rank, ws), batch_size=16 // ws, num_workers=1)
    total = torch.zeros(2)
    for x, y in loader:
        opt.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        opt.step()
        total += torch.tensor([loss.item() * len(x), float(len(x))])
    dist.all_reduce(total)
    logger.info("mean loss %.4f", total[0] / total[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
