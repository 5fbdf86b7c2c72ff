"""Accumulation adds the micro-batches' gradients where it should average them.

Seen: with 32 accumulation steps the printed loss is four times that with 8, and a learning rate that was fine diverges.
Found: compare the gradient before the step with that of one process on all rows of the step.
Cure: divide each micro-batch's mean loss by the number of micro-batches before its backward pass.
Met at: agokrani/distillKitPlus#5
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES, ROWS = 4, 16

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(ROWS, 3), torch.randn(ROWS, 1)
model = DistributedDataParallel(nn.Linear(3, 1))
alone = copy.deepcopy(model.module)

shard = x[rank::world_size], y[rank::world_size]
batches = zip(*(rows.chunk(MICRO_BATCHES) for rows in shard), strict=True)
for i, (inputs, targets) in enumerate(batches, 1):
    with contextlib.nullcontext() if i == MICRO_BATCHES else model.no_sync():
        loss = mse_loss(model(inputs), targets)
        # cure: loss = loss / MICRO_BATCHES
        loss.backward()

mse_loss(alone(x), y).backward()
times = (model.module.weight.grad.norm() / alone.weight.grad.norm()).item()
assert abs(times - 1) < 1e-4, f"the gradient is {times:.2f} times that of all rows"
if rank == 0:
    print(f"the gradient is {times:.2f} times that of all rows")
dist.destroy_process_group()
