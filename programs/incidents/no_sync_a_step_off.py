"""Gradients are averaged in the first micro-batch of a step instead of the last.

Seen: the loss falls more slowly than on one GPU, and only as soon as gradients are accumulated.
Found: compare the gradient of one parameter on two ranks just before `optimizer.step()`.
Cure: synchronise in the backward pass before the step: `(i + 1) % accumulate == 0`, not `i % accumulate == 0`.
Met at: modelscope/FunASR#3472
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(8)]
accumulate = 4

for i, (x, y) in enumerate(batches):
    last = i % accumulate == 0  # cure: last = (i + 1) % accumulate == 0
    with contextlib.nullcontext() if last else model.no_sync():
        (mse_loss(model(x), y) / accumulate).backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()

weights = [torch.empty(1, 3) for _ in range(world_size)]
dist.all_gather(weights, model.module.weight.detach())
apart = (weights[0] - weights[1]).abs().max().item()
assert apart < 1e-6, f"after 2 steps the ranks' weights differ by {apart:.3f}"
if rank == 0:
    print(f"after 2 steps the ranks' weights differ by {apart:.3f}")
dist.destroy_process_group()
