"""Every rank's sampler shuffles with a seed of its own.

Seen: two ranks read the same samples within an epoch, and other samples are read by none.
Found: gather the indices of one epoch from all ranks and count how often each occurs.
Cure: one seed for the sampler on all ranks; seeds that differ by rank are for augmentation and dropout.
Met at: NVlabs/LongLive#71
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 7

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
dataset = TensorDataset(torch.arange(1000))
seed = SEED + rank  # cure: seed = SEED
sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed)
loader = DataLoader(dataset, batch_size=50, sampler=sampler)

drawn = torch.zeros(len(dataset), dtype=torch.int64)
for (indices,) in loader:
    drawn[indices] += 1
dist.all_reduce(drawn)

dist.destroy_process_group()
never, twice = int((drawn == 0).sum()), int((drawn == 2).sum())
report = f"of {len(dataset)} samples, {never} are never drawn, {twice} twice"
assert never == twice == 0, report
if rank == 0:
    print(report)
