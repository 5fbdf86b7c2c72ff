"""A stream is divided among the ranks, but not among the workers of a rank.

Seen: with two workers a streamed epoch has twice as many batches as rows would give, and overfits early.
Found: let every rank collect the ids it read in one epoch, and count how often each comes.
Cure: divide by rank and worker: `rank + world_size * worker.id` is the first row, `world_size * num_workers` the step.
Met at: huggingface/datasets#3423
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class Lines(IterableDataset):
    """The numbers of a file's lines, those of this rank."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        first, step = rank, world_size
        # cure: worker = torch.utils.data.get_worker_info()
        # cure: first += world_size * worker.id
        # cure: step *= worker.num_workers
        yield from range(first, self.count, step)


lines = Lines(count=32)
read = torch.cat(list(DataLoader(lines, batch_size=4, num_workers=2)))
everybodys = [torch.empty_like(read) for _ in range(world_size)]
dist.all_gather(everybodys, read)
times = Counter(torch.cat(everybodys).tolist())
said = f"{times.total()} lines were read, {len(times)} of them different"
assert set(times.values()) == {1} and len(times) == lines.count, said
if rank == 0:
    print(said)
dist.destroy_process_group()
