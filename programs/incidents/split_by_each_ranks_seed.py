"""Training and validation rows are split by a generator that each rank has seeded differently.

Seen: validation is nearly as good as training from the first epoch on, and new data shows nothing of it.
Found: gather the rows that all ranks train on, and count how many of your validation rows are among them.
Cure: split with a generator of its own, seeded alike on all ranks.
Met at: TensorAuto/OpenTau#498
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

SEED, ROWS = 1234, 100

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(SEED + 12345 * rank)  # augmentations differ
data = TensorDataset(torch.arange(ROWS))
generator = torch.default_generator
# cure: generator = torch.Generator().manual_seed(SEED)
training, validation = random_split(data, [80, 20], generator)
sampler = DistributedSampler(training, seed=SEED)

read = torch.cat([rows for (rows,) in DataLoader(training, 8, sampler=sampler)])
everybodys = [torch.empty_like(read) for _ in range(world_size)]
dist.all_gather(everybodys, read)
leaked = set(torch.cat(everybodys).tolist()) & set(validation.indices)
counts = torch.tensor([len(leaked), len(validation)])
dist.all_reduce(counts)
said = f"{counts[0]} of the ranks' {counts[1]} validation rows are trained on"
assert counts[0] == 0, said
if rank == 0:
    print(said)
dist.destroy_process_group()
