"""The optimizer is built before FSDP replaces the parameters.

Seen: the loss stays where it began, with no error; without FSDP the same program learns.
Found: compare the model's parameters before and after a step, or their ids with those of the optimizer.
Cure: build the optimizer from the wrapped model's parameters.
Met at: huggingface/accelerate#3256
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
inputs = torch.randn(32, 8)
targets = inputs.sum(1, keepdim=True)
rows = slice(rank, None, world_size)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # cure:
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
# cure: optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

dist.destroy_process_group()
report = f"rank {rank}: loss {losses[0]:.3f} in step 1, {losses[-1]:.3f} in step 20"
assert losses[-1] < losses[0], report
if rank == 0:
    print(report)
