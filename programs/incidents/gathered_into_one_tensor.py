"""Every entry of the gathered list is the same tensor.

Seen: the gathered list has the last rank's number in every place, with no error.
Found: compare `data_ptr()` of the list's entries, or their sum with an all_reduce.
Cure: allocate a tensor for each rank: `[empty] * world_size` holds one tensor world_size times.
Met at: pytorch/pytorch#5506
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(8, 3)
inputs, labels = torch.randn(120, 8), torch.randint(3, (120,))

rows = slice(rank, None, world_size)
with torch.no_grad():
    loss = cross_entropy(model(inputs[rows]), labels[rows], reduction="sum")

empty = torch.zeros_like(loss)
parts = [empty] * world_size  # cure: parts = [empty.clone() for _ in range(world_size)]
dist.all_gather(parts, loss)
mean = sum(parts).item() / len(inputs)

with torch.no_grad():
    expected = cross_entropy(model(inputs), labels).item()
dist.destroy_process_group()
gathered = [round(part.item(), 2) for part in parts]
report = f"gathered {gathered}: the loss is {mean:.3f}, one process has {expected:.3f}"
assert abs(mean - expected) < 1e-5, report
if rank == 0:
    print(report)
