"""The loss is computed by a method of the wrapped network, so DDP sees no forward pass and averages nothing.

Seen: training on eight GPUs gives a model like that of one GPU with an eighth of the data; only rank 0's is kept.
Found: compare the weights of two ranks after a few steps, and look for `model.module` in the training loop.
Cure: let the network's `forward` return the loss, and call the DDP object.
Met at: OpenTSLM/OpenTSLM#49
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def compute_loss(self, batch):
        return mse_loss(self.layer(batch["series"]), batch["answer"])

    forward = compute_loss


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Forecaster())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(STEPS):
    batch = {"series": torch.randn(8, 4), "answer": torch.randn(8, 1)}
    optimizer.zero_grad()
    loss = model.module.compute_loss(batch)  # cure: loss = model(batch)
    loss.backward()
    optimizer.step()

weights = [torch.empty(1, 4) for _ in range(world_size)]
dist.all_gather(weights, model.module.layer.weight.detach())
apart = (weights[0] - weights[1]).abs().max().item()
assert apart < 1e-6, f"after {STEPS} steps the ranks' weights differ by {apart:.3f}"
if rank == 0:
    print(f"after {STEPS} steps the ranks' weights differ by {apart:.3f}")
dist.destroy_process_group()
