"""ReduceLROnPlateau is stepped with the loss of the rank's own rows.

Seen: the log shows another learning rate for each process, although all run the same schedule.
Found: print `optimizer.param_groups[0]["lr"]` on every rank after each epoch.
Cure: step the schedule with the loss averaged over the ranks.
Met at: lucidrains/DALLE-pytorch#268
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
x = torch.ones(4, 1)
y = x * (3 if rank == 0 else -1)

for _ in range(8):
    optimizer.zero_grad()
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    average = loss.detach() / world_size
    # cure: dist.all_reduce(average)
    schedule.step(average)

rate = torch.tensor(optimizer.param_groups[0]["lr"])
rates = [torch.empty_like(rate) for _ in range(world_size)]
dist.all_gather(rates, rate)
said = f"the ranks' learning rates are {rates[0]:.4f} and {rates[1]:.4f}"
assert rates[0] == rates[1], said
if rank == 0:
    print(said)
dist.destroy_process_group()
