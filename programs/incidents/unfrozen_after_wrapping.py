"""DDP averages the parameters that were trainable when it was built, and the backbone was frozen then.

Seen: from the epoch in which the backbone is unfrozen, validation improves on rank 0 and gets worse on the others.
Found: print a checksum of each layer's weights on every rank after each epoch.
Cure: wrap the network again once it is unfrozen; or freeze by a learning rate of 0 and leave `requires_grad` alone.
Met at: Lightning-AI/pytorch-lightning#20340
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

UNFREEZE_AT, EPOCHS = 1, 3

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
backbone, head = nn.Linear(4, 4), nn.Linear(4, 1)
network = nn.Sequential(backbone, nn.Tanh(), head)
backbone.requires_grad_(False)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
x, y = torch.randn(16, 4), torch.randn(16, 1)

for epoch in range(EPOCHS):
    if epoch == UNFREEZE_AT:
        backbone.requires_grad_(True)
        # cure: model = DistributedDataParallel(network)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()

apart = []
for layer in (backbone, head):
    weights = [torch.empty_like(layer.weight) for _ in range(world_size)]
    dist.all_gather(weights, layer.weight.detach())
    apart.append((weights[0] - weights[1]).abs().max().item())
said = f"the ranks' backbones differ by {apart[0]:.3f}, their heads by {apart[1]:.3f}"
assert max(apart) < 1e-6, said
if rank == 0:
    print(said)
dist.destroy_process_group()
