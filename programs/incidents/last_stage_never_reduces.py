"""A 1F1B schedule sums the copies' gradients while the pipeline drains, and the last stage has nothing to drain.

Seen: a pipeline with data parallelism trains worse than the pipeline alone; no rank fails or waits.
Found: compare the gradients of the copies of each stage: those of the first stage agree, those of the last do not.
Cure: reduce in the last backward pass of every stage, wherever in the schedule that is.
Met at: huggingface/picotron#5
Ranks: 4
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, stage = dist.get_rank(), dist.get_rank() % 2
copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][stage]
schedule = ["FFBFBFBB", "FBFBFBFB"][stage]  # forward and backward of 4 micro-batches
torch.manual_seed(stage)
layer = nn.Linear(3, 3, bias=False)
in_flight, sends = [], []


def reduce(weight):
    if sync:
        dist.all_reduce(weight.grad, group=copies)


def forward():
    x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    if stage == 1:
        dist.recv(x.data, rank - 1)
    in_flight.append((x, layer(x)))
    if stage == 0:
        sends.append(dist.isend(in_flight[-1][1].detach(), rank + 1))


def backward():
    x, y = in_flight.pop(0)
    gradient = y.detach().clone()  # of the loss, half the sum of squares
    if stage == 0:
        dist.recv(gradient, rank + 1)
    y.backward(gradient)
    if stage == 1:
        sends.append(dist.isend(x.grad, rank - 1))


layer.weight.register_post_accumulate_grad_hook(reduce)
for i, step in enumerate(schedule):
    sync = schedule[i - 1 : i + 1] == "BB"  # cure: sync = i == len(schedule) - 1
    forward() if step == "F" else backward()
_ = [send.wait() for send in sends]

gradients = [torch.empty(3, 3) for _ in range(2)]
dist.all_gather(gradients, layer.weight.grad, group=copies)
apart = (gradients[0] - gradients[1]).abs().max().item()
assert apart < 1e-6, f"the gradients of stage {stage} differ by {apart:.2f}"
if rank == 1:
    print(f"the gradients of stage {stage} differ by {apart:.2f}")
dist.destroy_process_group()
