"""The schedule takes one step for each rank, and its length counts the ranks' steps once.

Seen: with 4 GPUs the learning rate has reached its end after a quarter of the training.
Found: log the learning rate of every step with one process and with two.
Cure: give the scheduler the number of its own steps: world_size times the optimizer's.
Met at: Lightricks/LTX-Video-Trainer#67
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR

STEPS = 100


class PreparedScheduler:
    """Counts the batches of all ranks, as a loader of one process would."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self):
        for _ in range(dist.get_world_size()):
            self.scheduler.step()


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
length = STEPS  # cure: length = STEPS * dist.get_world_size()
scheduler = PreparedScheduler(LinearLR(optimizer, 1.0, 0.0, total_iters=length))
used = 0
for _ in range(STEPS):
    used += optimizer.param_groups[0]["lr"] > 0
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    scheduler.step()

rank = dist.get_rank()
dist.destroy_process_group()
assert used == STEPS, f"the learning rate is 0 from step {used} of {STEPS} on"
if rank == 0:
    print(f"{used} of {STEPS} steps have a learning rate above 0")
