"""The loss is averaged in place for the log, and then differentiated.

Seen: two runs log the same loss and end a point apart; only the line that averages the loss differs.
Found: compare a gradient with that of one process on the whole batch: it is world_size times too small.
Cure: average a detached copy; DDP averages the gradients.
Met at: NVIDIA/apex#664
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 1)
inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
(whole,) = torch.autograd.grad(mse_loss(model(inputs), targets), [model.weight])

replica = DistributedDataParallel(model)
rows = slice(rank, None, world_size)
loss = mse_loss(replica(inputs[rows]), targets[rows])
logged = loss  # cure: logged = loss.detach().clone()
dist.all_reduce(logged)
logged /= world_size
loss.backward()

dist.destroy_process_group()
ratio = (model.weight.grad.norm() / whole.norm()).item()
report = f"loss {logged:.3f}; the gradient is {ratio:.2f} times that of one process"
assert abs(ratio - 1) < 1e-5, report
if rank == 0:
    print(report)
