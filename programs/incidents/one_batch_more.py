"""The rows of a stream do not divide by the number of ranks, so one rank has a batch more than the other.

Seen: the first epochs of small files end well; with the full data the job stands still at the end of the epoch.
Found: count the batches of each rank without training.
Cure: give each rank the same number of rows, here by leaving out the last; or train within `with model.join():`.
Met at: pytorch/pytorch#141069
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, world_size = dist.get_rank(), dist.get_world_size()


class Rows(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for row in range(rank, self.count, world_size):
            yield torch.full((3,), float(row))


torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
count = 101
# cure: count -= count % world_size
steps = 0
for x in DataLoader(Rows(count), batch_size=10):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    steps += 1

dist.barrier()
if rank == 0:
    print(f"each rank took {steps} steps, {count} rows in all")
dist.destroy_process_group()
