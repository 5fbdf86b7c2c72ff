"""The recall is averaged over ranks that have unequal numbers of positives.

Seen: the same checkpoint has another recall on two GPUs than on one, and precision and F1 differ as well.
Found: print hits and positives of each rank beside its recall.
Cure: add up the counts over the ranks first, and divide once.
Met at: allenai/allennlp#4050
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
labels = torch.rand(1000) < torch.linspace(0.6, 0.0, 1000)  # rarer towards the end
scores = torch.rand(1000) - torch.linspace(0.0, 0.5, 1000) + 0.5 * labels
predicted = scores > 0.5

rows = torch.arange(1000).chunk(world_size)[rank]
hits = (predicted & labels)[rows].sum()
counts = torch.stack([hits, labels[rows].sum()]).double()
# cure: dist.all_reduce(counts)
recall = counts[0] / counts[1]
dist.all_reduce(recall)
recall /= world_size

dist.destroy_process_group()
expected = (predicted & labels).sum() / labels.sum()
assert abs(recall - expected) < 1e-6, (
    f"rank {rank} found {hits} of {labels[rows].sum()} positives; the ranks' recall is "
    f"{recall:.3f}, that of all 1000 rows {expected:.3f}"
)
if rank == 0:
    print(f"recall {recall:.3f} of {counts[1]:.0f} positives")
