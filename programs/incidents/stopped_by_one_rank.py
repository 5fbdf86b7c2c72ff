"""Each rank stops early by its own validation loss, so one leaves the loop alone.

Seen: training stands still after some epochs; one process has printed that it stopped, the others wait in backward.
Found: print the validation loss and the decision of every rank, not of rank 0 alone.
Cure: reduce the loss over the ranks before it is judged, so that all stop in the same epoch or none.
Met at: Lightning-AI/pytorch-lightning#379
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

PATIENCE = 2

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.linspace(0, 1, 8).view(8, 1)
train_y, validation_y = 2 * x, (2 - 4 * rank) * x  # sorted by class, then divided

best, bad_epochs = float("inf"), 0
for epoch in range(10):
    optimizer.zero_grad()
    mse_loss(model(x), train_y).backward()
    optimizer.step()
    with torch.no_grad():
        loss = mse_loss(model.module(x), validation_y) / world_size
    # cure: dist.all_reduce(loss)
    bad_epochs = 0 if loss < best else bad_epochs + 1
    best = min(best, loss.item())
    if bad_epochs == PATIENCE:
        print(f"rank {rank} stops after epoch {epoch}")
        break

dist.barrier()
dist.destroy_process_group()
