"""Where is this run, and how does it come back to that place?

A run is at a step within an epoch. What it has behind it is more than weights: the position in the data, the losses so
far, and half an epoch's sum of them. All of it goes into each checkpoint, so a resumed run draws the same rows, adds to
the same sums, and ends with the same bits as a run that was never stopped.

One cause of other bits is DDP's own. After its first backward pass it plans its buckets anew, in the order in which the
gradients came. A sum of three or more numbers depends on where in a bucket they are. So the step after a resume would
add in the first order what the straight run adds in the second. `settle_buckets` has that behind it before step one.

Left out on purpose: files on the disk (`checkpoint.py`), and what belongs into a state (`training_state.py`).
Read next: `train.py`.

Shapes: C image channels, H height, W width.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checkpoint.cadence import Cadence, Wish
from ddp_course.checkpoint.folder import Checkpointer, Loaded
from ddp_course.checkpoint.state import capture_state, restore_state, rng_state, set_rng_state
from ddp_course.data.sampler import ShardSampler
from ddp_course.groups import my_device
from ddp_course.logs import progress_bar, rank0_print
from ddp_course.train.config import Config
from ddp_course.train.schedule import share_of_rate


class Run:
    """One rank's training run: counts what is done, saves when it is time, and goes on from what was saved.

    Args:
        config: its `checkpoint` may be None; then nothing is saved, and signals do what they always do.
        model: bare, not wrapped by DDP.
        sampler: holds the position in the epoch.
    """

    def __init__(
        self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, sampler: ShardSampler
    ) -> None:
        self.config, self.model, self.optimizer, self.sampler = config, model, optimizer, sampler
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.epoch = self.step = self.first_epoch = self.first_step = 0
        self.losses: list[float] = []  # of the epochs behind us, over all ranks
        self.accuracies: list[float] = []
        self.own_losses: list[float | None] = []  # this rank's; None for epochs that other ranks began
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=my_device())  # of this epoch, on this rank
        self.rows = 0
        self.mixed = False  # whether other ranks' part of this epoch is in rank 0's sum
        self.stopping = False  # a signal asked for it
        self.bar = progress_bar(0, shown=False)  # `train` puts its own here
        self.notes: list[str] = []  # what was done otherwise than asked for
        self.checkpoints = Checkpointer(config.checkpoint, config.keep) if config.checkpoint else None
        self.cadence: Cadence | None = None

    def __enter__(self) -> Run:
        if self.checkpoints:
            self.cadence = Cadence(self.config.save_every, self.config.save_seconds, self.config.timeout_s).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.checkpoints:
            self.cadence.__exit__(*error)
            self.checkpoints.close()

    # --- Forward -----------------------------------------------------------------------------------

    def after_step(self, loss: torch.Tensor, rows: int) -> bool:
        """Count a step, and save if it is time.

        Args:
            loss: mean over this rank's `rows`; detached.
        Returns:
            Whether to stop; the same on every rank.
        Collective: those of `Cadence.next` and `save`, if there is a checkpoint folder.
        """
        self.loss_sum += loss * rows  # stays on the device: reading it would wait for the GPU
        self.rows += rows
        self.step += 1
        self.sampler.advance(rows)
        self.set_rate()
        self.bar.update()
        wish = self.cadence.next(self.step) if self.cadence else Wish.GO_ON
        self.stopping = wish == Wish.STOP
        if wish and len(self.sampler):  # after an epoch's last step, its end saves anyway
            self.save()
        return self.stopping

    def set_rate(self) -> None:
        """Give the optimizer the learning rate of the step that comes. The place in the data decides, nothing else."""
        place = self.sampler.epoch + self.sampler.consumed / self.sampler.length
        share = share_of_rate(self.config.schedule, place, self.config.epochs, self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * share

    def end_epoch(self, loss: float, accuracy: float) -> None:
        """Note what an epoch brought, and save.

        Collective: those of `save`, if there is a checkpoint folder.
        """
        self.losses.append(loss)
        self.accuracies.append(accuracy)
        self.own_losses.append(None if self.mixed else self.own_loss_sum() / self.rows)
        self.epoch, self.rows, self.mixed = self.epoch + 1, 0, False
        self.loss_sum.zero_()
        if self.checkpoints:
            self.save()

    def own_loss_sum(self) -> float:
        return self.loss_sum.item()

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the run before its last epoch."""
        return self.stopping and self.epoch < self.config.epochs

    def finish(self) -> None:
        """Wait until everything is on the disk. For the good path only.

        Collective: one all_reduce, one barrier and one broadcast_object_list, if there is a checkpoint folder.
        """
        if self.checkpoints:
            self.cadence.finish()
            self.checkpoints.finish()

    # --- To the disk and back ----------------------------------------------------------------------

    def save(self) -> None:
        """Have rank 0 write all that there is, under the number of the step.

        Collective: those of `capture_state` and of the `Checkpointer`.
        """
        own = {"loss_sum": self.own_loss_sum(), "rows": self.rows, "own_losses": self.own_losses, "mixed": self.mixed}
        extra = {"config": asdict(self.config), "losses": self.losses, "accuracies": self.accuracies}
        place = {"step": self.step, "epoch": self.epoch, "sampler": self.sampler}
        state = capture_state(self.model, self.optimizer, **place, extra=extra, own=own)
        write = self.checkpoints.save_later if self.config.background else self.checkpoints.save
        write(state, self.step)

    def resume(self) -> None:
        """Go back to the latest checkpoint; if the folder has none, stay at the beginning and say so.

        Raises:
            CheckpointError: none of those there can be used, or they are of a run with other settings.
        Collective: see `Checkpointer.load_latest`.
        """
        if found := self.checkpoints.load_latest():
            self._restore(found)
        else:
            self.note(f"{self.config.checkpoint} has no checkpoint yet, so the run begins")

    def note(self, *notes: str) -> None:
        """Remember what was done otherwise than asked for; rank 0 says it at once."""
        self.notes += notes
        rank0_print(*(f"note: {note}\n" for note in notes), sep="", end="", file=sys.stderr)

    def _restore(self, found: Loaded) -> None:
        state = found.state
        self.config.refuse_another_run(state["extra"].get("config", {}), found.path)
        self.note(*restore_state(state, self.model, self.optimizer, sampler=self.sampler))
        self.epoch, self.step = self.first_epoch, self.first_step = state["epoch"], state["step"]
        self.losses, self.accuracies = state["extra"]["losses"], state["extra"]["accuracies"]
        owns = state["own"]
        if len(owns) == self.world_size:
            mine = owns[self.rank]
        else:  # the sums of the ranks that were go to rank 0, so that the epoch's mean is still over all its rows
            totals = {name: sum(own[name] for own in owns) for name in ("loss_sum", "rows")}
            mine = totals if self.rank == 0 else {"loss_sum": 0.0, "rows": 0}
            mine |= {"own_losses": [None] * len(self.losses), "mixed": totals["rows"] > 0}
        self.own_losses, self.rows, self.mixed = mine["own_losses"], mine["rows"], mine["mixed"]
        self.loss_sum.fill_(mine["loss_sum"])


def settle_buckets(replica: DistributedDataParallel, image_CHW: torch.Size) -> None:
    """Have DDP make its last plan of the buckets now, by a backward pass that leaves nothing else behind.

    Two ranks need none: a sum of two numbers is the same in either order.

    Collective: DDP's own of one forward and backward pass, every rank.
    Source: torch/csrc/distributed/c10d/reducer.cpp, rebuild_buckets.
    """
    if dist.get_world_size() <= 2:
        return
    before, generators = copy.deepcopy(replica.module.state_dict()), rng_state()
    parameter = next(replica.parameters())
    replica.train()
    replica(torch.zeros(2, *image_CHW, dtype=parameter.dtype, device=parameter.device)).sum().backward()
    replica.zero_grad()
    replica.module.load_state_dict(before)
    set_rng_state(generators)
