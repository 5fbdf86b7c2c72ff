"""The flag that averages gradients is set after the forward pass has read it.

Seen: four micro-batches of 16 rows end at a clearly worse loss than one batch of 64, on the same data.
Found: compare the ranks' gradients before the step; then look where DDP's `forward` reads `require_backward_grad_sync`.
Cure: set the flag before the forward pass of the last micro-batch, or wrap forward and backward in `no_sync()`.
Met at: karpathy/build-nanogpt#30
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
steps, grad_accum_steps = 3, 4

for _ in range(steps):
    optimizer.zero_grad()
    for micro_step in range(grad_accum_steps):
        x, y = torch.randn(16, 3), torch.randn(16, 1)
        sync = micro_step == grad_accum_steps - 1
        # cure: model.require_backward_grad_sync = sync
        loss = mse_loss(model(x), y) / grad_accum_steps
        model.require_backward_grad_sync = sync  # cure:
        loss.backward()
    optimizer.step()

weights = [torch.empty(1, 3) for _ in range(world_size)]
dist.all_gather(weights, model.module.weight.detach())
apart = (weights[0] - weights[1]).abs().max().item()
assert apart < 1e-6, f"after {steps} steps the ranks' weights differ by {apart:.3f}"
if rank == 0:
    print(f"after {steps} steps the ranks' weights differ by {apart:.3f}")
dist.destroy_process_group()
