"""The gradients are divided and used before the all-reduce that sums them is over.

Seen: two GPUs reach a worse perplexity than one, and no two runs are alike.
Found: keep the rank's own gradient, and compare what the step used with the mean of all ranks.
Cure: wait for the work that `async_op=True` returns, before the buffer is read or changed.
Met at: OpenNMT/OpenNMT-py#2295
"""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def load_batch():
    time.sleep(rank)  # the disk of rank 1 is slower
    return torch.full((2, 4), 1.0 + rank)


def average_gradients(gradients):
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    work = dist.all_reduce(buffer, async_op=True)
    # cure: work.wait()
    buffer /= world_size
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return work


model(load_batch()).mean().backward()
mean = model.weight.grad.clone()
work = average_gradients([weight.grad for weight in model.parameters()])
optimizer.step()
work.wait()
dist.all_reduce(mean)
used, mean = model.weight.grad[0, 0].item(), mean[0, 0].item() / world_size
print(f"rank {rank} stepped with the gradient {used:.2f}, the mean is {mean:.2f}")
dist.barrier()
assert rank > 0 or abs(used - mean) < 1e-6, f"the step used {used:.2f}, not {mean:.2f}"
dist.destroy_process_group()
