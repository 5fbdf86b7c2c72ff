"""Each rank evaluates with the BatchNorm statistics of its own rows, but those of rank 0 are saved.

Seen: the score in the training log is not the score that the saved checkpoint gets on the same data.
Found: compare `running_mean` on two ranks before the evaluation.
Cure: broadcast the buffers of rank 0 before evaluating, or take SyncBatchNorm.
Met at: open-mmlab/mmdetection#4582
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
held_out = torch.randn(16, 4), torch.randn(16, 1)


@torch.no_grad()
def evaluate(network):
    network.eval()
    x, y = (rows[rank::world_size] for rows in held_out)
    total = mse_loss(network(x), y, reduction="sum")
    dist.all_reduce(total)
    return total.item() / len(held_out[0])


model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(20):
    optimizer.zero_grad()
    mse_loss(model(torch.randn(8, 4) + rank), torch.randn(8, 1)).backward()
    optimizer.step()

# cure: for buffer in model.buffers():
# cure:     dist.broadcast(buffer, src=0)
logged = evaluate(model.module)
checkpoint = [model.module.state_dict()]
dist.broadcast_object_list(checkpoint, src=0)
saved = copy.deepcopy(model.module)
saved.load_state_dict(checkpoint[0])
said = f"the loss is {logged:.4f} in the log, {evaluate(saved):.4f} with what was saved"
assert abs(logged - evaluate(saved)) < 1e-6, said
if rank == 0:
    print(said)
dist.destroy_process_group()
