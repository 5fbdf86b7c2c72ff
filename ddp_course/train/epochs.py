"""What is noted of a run that counts epochs, and what must be saved of it?

Half an epoch has a sum that is not yet a mean. Each rank has its own, and saves its own; if the run goes on with
another number of ranks, rank 0 takes all sums over, so that the epoch's mean is still that of all its rows.

Read next: `images.py`, the program.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_course.data.sampler import ShardSampler
from ddp_course.groups import my_device
from ddp_course.train.config import Config
from ddp_course.train.schedule import share_of_rate


class EpochCurves:
    """Losses and accuracies by epoch, and the place within one; gives the optimizer its learning rate.

    Args:
        sampler: holds the position in the epoch.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer, sampler: ShardSampler) -> None:
        self.config, self.optimizer, self.sampler = config, optimizer, sampler
        self.epoch = self.first_epoch = 0
        self.losses: list[float] = []  # of the epochs behind us, over all ranks
        self.accuracies: list[float] = []
        self.own_losses: list[float | None] = []  # this rank's; None for epochs that other ranks began
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=my_device())  # of this epoch, on this rank
        self.rows = 0
        self.mixed = False  # whether other ranks' part of this epoch is in rank 0's sum

    def after_step(self, loss: torch.Tensor, rows: int) -> bool:
        """Note a step.

        Args:
            loss: mean over this rank's `rows`; detached.
        Returns:
            Whether it was the epoch's last.
        """
        self.loss_sum += loss * rows  # stays on the device: reading it would wait for the GPU
        self.rows += rows
        self.sampler.advance(rows)
        self.set_rate()
        return not len(self.sampler)

    def set_rate(self) -> None:
        """Give the optimizer the learning rate of the step that comes. The place in the data decides, nothing else."""
        place = self.sampler.epoch + self.sampler.consumed / self.sampler.length
        share = share_of_rate(self.config.schedule, place, self.config.epochs, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * share

    def end_epoch(self, loss: float, accuracy: float) -> None:
        """Note what an epoch brought."""
        self.losses.append(loss)
        self.accuracies.append(accuracy)
        self.own_losses.append(None if self.mixed else self.loss_sum.item() / self.rows)
        self.epoch, self.rows, self.mixed = self.epoch + 1, 0, False
        self.loss_sum.zero_()

    def state(self) -> dict[str, Any]:
        own = {"loss_sum": self.loss_sum.item(), "rows": self.rows, "own_losses": self.own_losses, "mixed": self.mixed}
        return {"epoch": self.epoch, "extra": {"losses": self.losses, "accuracies": self.accuracies}, "own": own}

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch = self.first_epoch = state["epoch"]
        self.losses, self.accuracies = state["extra"]["losses"], state["extra"]["accuracies"]
        owns, rank = state["own"], dist.get_rank()
        if len(owns) == dist.get_world_size():
            mine = owns[rank]
        else:  # the sums of the ranks that were go to rank 0
            totals = {name: sum(own[name] for own in owns) for name in ("loss_sum", "rows")}
            mine = totals if rank == 0 else {"loss_sum": 0.0, "rows": 0}
            mine |= {"own_losses": [None] * len(self.losses), "mixed": totals["rows"] > 0}
        self.own_losses, self.rows, self.mixed = mine["own_losses"], mine["rows"], mine["mixed"]
        self.loss_sum.fill_(mine["loss_sum"])
