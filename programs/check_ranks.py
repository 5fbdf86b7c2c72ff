"""Do the ranks have equal weights, and did each of them read its own samples?

Call `check(model, x)` on all ranks, after a step, with the step's batch of samples.
"""

import torch.distributed as dist
from torch.nn.utils import parameters_to_vector


def check(model, x):
    """Print how far the ranks' weights are apart, and how many samples differ."""
    weights = parameters_to_vector(model.parameters()).detach()  # in one vector
    first = weights.clone()
    dist.broadcast(first, src=0)  # now `first` has rank 0's weights
    apart = (weights - first).abs().max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)  # of the rank that differs most
    samples = x.double().flatten(1).sum(dim=1).tolist()  # a number for each sample
    read = [None] * dist.get_world_size()
    dist.all_gather_object(read, samples)  # a list from each rank
    read = sum(read, [])  # one list of all ranks' samples
    if dist.get_rank() == 0:
        print(f"weights differ by up to {apart:.2g};", end=" ")
        print(f"{len(read)} samples were read, {len(set(read))} of them different")
