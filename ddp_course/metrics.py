"""What is the loss, over all ranks?

Each rank knows the loss of its own rows. The loss of all rows is the sum over ranks divided by the count over
ranks. The mean of the ranks' means is another number as soon as one rank has fewer rows than another.

Read next: `train.py`, which reports both each rank's own loss and the reduced one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def mean_over_ranks(
    total: float | torch.Tensor, count: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the sum of all ranks' totals over the sum of their counts, the same on every rank.

    Args:
        total: this rank's sum, of losses or of correct answers; not its mean.
        count: the rows in that sum; may be 0 on some ranks.
        device: where the group's backend takes its tensors from.
    Raises:
        ValueError: no rank has a row.
    Collective: one all_reduce of two numbers, every rank of `group`.
    """
    total_and_count = torch.tensor([float(total), float(count)], dtype=torch.float64, device=device)
    dist.all_reduce(total_and_count, group=group)
    all_total, all_count = total_and_count.tolist()
    if all_count == 0:
        raise ValueError("there is no mean: no rank has a row; look at the size of the dataset")
    return all_total / all_count
