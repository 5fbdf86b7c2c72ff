"""The checkpoint has the random state of rank 0 only, and all ranks load it.

Seen: after a resume the loss leaves the curve of the run that was not stopped, although weights and data are equal.
Found: compare the first dropout masks after the resume on two ranks: they are the same mask.
Cure: save one random state for each rank, and load your own.
Met at: radixark/miles#3187
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)  # another dropout mask on every rank
dropout, inputs = nn.Dropout(0.5), torch.ones(1000)
dropout(inputs)

temporary = tempfile.TemporaryDirectory() if rank == 0 else None
names = [temporary.name if temporary else None]
dist.broadcast_object_list(names, src=0)
folder = Path(names[0])
if rank == 0:
    torch.save({"step": 1, "generator": torch.get_rng_state()}, folder / "run.pt")
# cure: torch.save({"generator": torch.get_rng_state()}, folder / f"rank{rank}.pt")
dist.barrier()
expected = dropout(inputs)  # the second step of a run that is not stopped

state = torch.load(folder / "run.pt", weights_only=True)
# cure: state |= torch.load(folder / f"rank{rank}.pt", weights_only=True)
torch.set_rng_state(state["generator"])
resumed = dropout(inputs)
differ = (resumed != expected).sum()
dist.all_reduce(differ)  # all ranks have loaded
if temporary:
    temporary.cleanup()
dist.destroy_process_group()
report = f"{differ} of {world_size * 1000} dropout decisions differ after the resume"
assert differ == 0, report
if rank == 0:
    print(report)
