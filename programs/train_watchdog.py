"""Train on handwritten digits, and find a hang: the missing ranks, and all stacks.

torchrun --standalone --nproc-per-node 2 train_watchdog.py

With `--stuck 1 --limit 10` rank 1 hangs on purpose.
"""

import argparse
import faulthandler
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Watchdog:
    """Say where each rank is, and which are missing, when `check` is not reached.

    A rank's stack is written after the limit. Rank 0 waits twice as long for
    the others, and they wait three times as long for rank 0.
    """

    def __init__(self, limit_s):
        self.limit_s = limit_s
        self.stacks = open(f"rank{dist.get_rank()}.stack", "w")  # noqa: SIM115
        patience = timedelta(seconds=3 * limit_s)  # else 30 minutes
        self.group = dist.new_group(backend="gloo", timeout=patience)  # under NCCL, too
        self.watch()

    def check(self):
        """Wait for all ranks: call it on each of them, where you suspect the hang."""
        patience = timedelta(seconds=2 * self.limit_s)
        dist.monitored_barrier(self.group, patience, wait_all_ranks=True)
        self.watch()

    def watch(self):
        # Writes the stack unless the next call, or `stop`, comes before.
        faulthandler.dump_traceback_later(self.limit_s, file=self.stacks)

    def stop(self):
        faulthandler.cancel_dump_traceback_later()
        self.stacks.close()


def read_slowly():
    while True:
        time.sleep(1)  # a file system that does not answer


parser = argparse.ArgumentParser()
parser.add_argument("--stuck", type=int, help="this rank hangs in epoch 1")
parser.add_argument("--limit", type=float, default=300, help="seconds between checks")
args = parser.parse_args()

# One GPU for each rank where there are enough, else the CPU.
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
backend = "nccl" if cuda else "gloo"
dist.init_process_group(backend, device_id=device if cuda else None)
rank, world_size = dist.get_rank(), dist.get_world_size()

pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
digits = TensorDataset(x, y)
sampler = DistributedSampler(digits, seed=0)
loader = DataLoader(digits, 32 // world_size, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
replica = DistributedDataParallel(model, device_ids=[device] if cuda else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

watchdog = Watchdog(args.limit)
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for x, y in loader:
        if epoch == 1 and rank == args.stuck:
            read_slowly()
        watchdog.check()  # here all ranks have a batch
        loss = nn.functional.cross_entropy(replica(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(x)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / len(digits):.4f}", flush=True)

watchdog.stop()
dist.barrier()  # leave together: without it, gloo sometimes aborts as a rank ends
dist.destroy_process_group()
