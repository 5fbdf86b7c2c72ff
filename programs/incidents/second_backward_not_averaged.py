"""Two forward passes are followed by two backward passes, and only the first of these is averaged.

Seen: a discriminator's weights part on the ranks as soon as real and fake images have a backward pass each.
Found: print one gradient on two ranks after each backward pass: equal after the first, not after the second.
Cure: add the losses and call `backward()` once; or run forward and backward of one loss before those of the next.
Met at: pytorch/pytorch#47260
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
discriminator = DistributedDataParallel(nn.Linear(6, 1))
torch.manual_seed(1 + rank)

real, fake = torch.randn(8, 6) + 1, torch.randn(8, 6)
of_real, of_fake = discriminator(real), discriminator(fake)
real_loss = bce(of_real, torch.ones(8, 1))
fake_loss = bce(of_fake, torch.zeros(8, 1))
real_loss.backward()  # cure:
fake_loss.backward()  # cure: (real_loss + fake_loss).backward()

gradients = [torch.empty(1, 6) for _ in range(world_size)]
dist.all_gather(gradients, discriminator.module.weight.grad)
apart = (gradients[0] - gradients[1]).abs().max().item()
assert apart < 1e-6, f"before the step the ranks' gradients differ by {apart:.3f}"
if rank == 0:
    print(f"before the step the ranks' gradients differ by {apart:.3f}")
dist.destroy_process_group()
