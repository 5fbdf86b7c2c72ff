"""The validation loss is reduced to rank 0, and every rank decides by its own copy.

Seen: training with FSDP hangs after some epoch, in the save of the best model; saving every epoch, it never does.
Found: print on every rank the loss that is compared with the best one.
Cure: all_reduce: after `dist.reduce` only rank `dst` has the sum.
Met at: pytorch/pytorch#77562
"""

from datetime import timedelta

import torch
import torch.distributed as dist

VALIDATION = [[0.9, 0.2], [0.4, 0.5]]  # the loss by epoch and rank

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, world_size = dist.get_rank(), dist.get_world_size()
shard = torch.full((4,), float(rank))  # of the weights

best, saved = torch.inf, []
for epoch, losses in enumerate(VALIDATION):
    loss = torch.tensor(losses[rank])
    dist.reduce(loss, dst=0)  # cure: dist.all_reduce(loss)
    loss /= world_size
    if loss < best:
        best = loss
        weights = [torch.empty_like(shard) for _ in range(world_size)]
        dist.all_gather(weights, shard)  # a whole model is saved
        saved.append(epoch)

dist.barrier()
if rank == 0:
    print(f"epochs {saved} saved, the best loss is {best:.2f}")
dist.destroy_process_group()
