"""A rank whose loss is not finite skips the step, and the others wait for it.

Seen: training with your own data hangs after a while, with no line in the log until the timeout.
Found: print step and loss on each rank before the first collective of a step: one rank has inf or nan there.
Cure: decide together: all_reduce the flag with MAX, then all ranks skip or none does.
Met at: pytorch/audio#3749
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
batches = torch.randn(4, world_size, 8, 4)
batches[-1, 1, 0] = torch.inf  # one bad recording
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

steps = 0
for batch in batches[:, rank]:
    loss = model(batch).square().sum()
    invalid = (~loss.isfinite()).int()
    # cure: dist.all_reduce(invalid, op=dist.ReduceOp.MAX)
    if invalid:
        continue
    frames = torch.tensor(len(batch))
    dist.all_reduce(frames)
    optimizer.zero_grad()
    (loss * world_size / frames).backward()
    optimizer.step()
    steps += 1

dist.barrier()
if rank == 0:
    print(f"both ranks took {steps} of {len(batches)} steps")
dist.destroy_process_group()
