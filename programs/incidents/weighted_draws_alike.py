"""A WeightedRandomSampler draws from a generator that all ranks have seeded alike.

Seen: every GPU processes the same batches; with four of them an epoch is no shorter and the result no better.
Found: print the indices of the first batch on each rank.
Cure: give the sampler a generator whose seed depends on the rank, and let it draw 1/W of the epoch.
Met at: EPFL-VILAB/omnidata-paper-code-dump#5
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

SEED, ROWS = 7, 64

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(SEED)
rare = torch.arange(ROWS) % 8 == 0
data = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 3), rare.float())
model = DistributedDataParallel(nn.Linear(3, 1))
generator = torch.Generator().manual_seed(SEED)
# cure: generator.manual_seed(1000 * SEED + rank)
sampler = WeightedRandomSampler(1 + 6.0 * rare, ROWS // world_size, generator=generator)

drawn = []
for rows, x, y in DataLoader(data, batch_size=8, sampler=sampler):
    nn.functional.mse_loss(model(x)[:, 0], y).backward()
    drawn += rows.tolist()

draws = [torch.empty(len(drawn), dtype=torch.long) for _ in range(world_size)]
dist.all_gather(draws, torch.tensor(drawn))
same = (draws[0] == draws[1]).sum().item()
assert same < len(drawn), f"{same} of {len(drawn)} draws are the same on both ranks"
if rank == 0:
    print(f"{same} of {len(drawn)} draws are the same on both ranks")
dist.destroy_process_group()
