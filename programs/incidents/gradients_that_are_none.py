"""Parameters without a gradient are left out of the averaging, each rank its own.

Seen: a model with a head for each task learns badly on two GPUs, or hangs where a reduced gradient is read.
Found: print the names of the parameters that each rank reduces, in order: the lists differ.
Cure: reduce the same parameters everywhere: a rank that did not use one contributes zeros.
Met at: deepspeedai/DeepSpeed#291
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

TASKS = ["digits", "letters"]


def loss_of(model, task, inputs):
    return model[task](model["trunk"](inputs)).square().mean()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.ModuleDict({"trunk": nn.Linear(6, 6)})
model.update({task: nn.Linear(6, 3) for task in TASKS})
one_process = copy.deepcopy(model)
batches = [torch.randn(8, 6) for _ in TASKS]  # this step, each rank has another task

loss_of(model, TASKS[rank], batches[rank]).backward()
for parameter in model.parameters():
    if parameter.grad is None:
        continue  # cure: parameter.grad = torch.zeros_like(parameter)
    dist.all_reduce(parameter.grad)
    parameter.grad /= world_size

for task, batch in zip(TASKS, batches, strict=True):
    (loss_of(one_process, task, batch) / len(TASKS)).backward()
mine, expected = model[TASKS[rank]].weight.grad, one_process[TASKS[rank]].weight.grad
apart = (mine - expected).norm() / expected.norm()
dist.all_reduce(apart, op=dist.ReduceOp.MAX)
dist.destroy_process_group()
report = f"a head's gradient differs from one process's by {apart:.0%} of its norm"
assert apart < 1e-5, report
if rank == 0:
    print(report)
