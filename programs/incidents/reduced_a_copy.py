"""The all_reduce adds up a copy, and nobody reads the copy.

Seen: each rank prints another validation loss, although the line above has an all_reduce.
Found: print the value before and after the call: it has not changed.
Cure: convert first, keep the result under a name, and reduce that: `.to()` returns a new tensor.
Met at: pytorch/pytorch#102435
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 1)
inputs, targets = torch.randn(64, 4), torch.randn(64, 1)

total_loss = torch.zeros(1)
rows = torch.arange(rank, len(inputs), world_size)
with torch.no_grad():
    for batch in rows.split(8):
        total_loss += mse_loss(model(inputs[batch]), targets[batch], reduction="sum")
    expected = mse_loss(model(inputs), targets).item()

# cure: total_loss = total_loss.to(torch.float64)
dist.all_reduce(total_loss.to(torch.float64))  # cure: dist.all_reduce(total_loss)
loss = total_loss.item() / len(inputs)

dist.destroy_process_group()
report = f"rank {rank} reports a loss of {loss:.3f}; one process has {expected:.3f}"
assert abs(loss - expected) < 1e-5, report
if rank == 0:
    print(report)
