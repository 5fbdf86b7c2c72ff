"""Each rank clips its shard by the norm of that shard.

Seen: with sharded gradients the steps have another length than under DDP, with the same max_norm and the same data.
Found: print the norm that each rank clips by: the gradient has one norm, and the ranks have several.
Cure: add up the squares of all shards before the root, with one all_reduce.
Met at: pytorch/pytorch#72548
"""

import torch
import torch.distributed as dist
from torch import nn

MAX_NORM = 1.0

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(7, 2)
inputs, targets = torch.randn(16, 7), 10 * torch.randn(16, 2)
rows = slice(rank, None, world_size)
nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()

gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
dist.all_reduce(gradient)
gradient /= world_size
shard = gradient.chunk(world_size)[rank].clone()  # the part that this rank updates

squares = shard.square().sum()
# cure: dist.all_reduce(squares)
norm = squares.sqrt()
shard *= min(1.0, MAX_NORM / norm.item())

shards = [torch.empty_like(shard) for _ in range(world_size)]
dist.all_gather(shards, shard)
dist.destroy_process_group()
clipped = torch.cat(shards).norm().item()
assert clipped < MAX_NORM + 1e-5, (
    f"rank {rank} clipped by a norm of {norm:.2f}, the gradient's is "
    f"{gradient.norm():.2f}; clipped to {MAX_NORM}, it has {clipped:.2f}"
)
if rank == 0:
    print(f"a norm of {norm:.2f} clipped to {clipped:.2f}")
