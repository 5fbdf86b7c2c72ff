"""Where is this run, and how does it come back to that place?

What a run has behind it is more than weights: the position in the data, the curves so far, and half an epoch's sums.
All of it goes into each checkpoint, so a resumed run draws the same rows, adds to the same sums, and ends with the same
bits as a run that was never stopped. What the curves are differs from program to program; the rest is here.

One cause of other bits is DDP's own. After the first backward pass it plans its buckets again, in the order in which
gradients came. A sum of three or more numbers depends on where in a bucket they are. So the step after a resume would
add in the first order what the straight run adds in the second. `settle_buckets` has that behind it before step one.

Left out on purpose: files on the disk (`checkpoint/folder.py`), and what belongs into a state (`checkpoint/state.py`).
Read next: `epochs.py` and `tokens.py`, two kinds of curves.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.checkpoint import Checkpointer, CheckpointError, Loaded
from ddp_course.checkpoint.cadence import Cadence, Wish
from ddp_course.checkpoint.state import capture_state, restore_state, rng_state, set_rng_state
from ddp_course.logs import progress_bar, rank0_print
from ddp_course.train.config import Saving


class Curves(Protocol):
    """What a program notes on its way."""

    def after_step(self, *measured: Any) -> bool:
        """Note a step. Returns whether the end of a part, an epoch say, follows, which is saved anyway."""

    def state(self) -> dict[str, Any]:
        """What `capture_state` gets: "extra", the same on all ranks, and what else there is of it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was captured."""


class Run:
    """One rank's training run: counts its steps, saves when it is time, and goes on from what was saved.

    Args:
        config: its `checkpoint` may be None; then nothing is saved, and signals do what they always do.
        model: bare, not wrapped by DDP.
        data: holds the position in the rows or in the text.
    """

    def __init__(
        self, config: Saving, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, curves: Curves
    ) -> None:
        self.config, self.model, self.optimizer, self.data, self.curves = config, model, optimizer, data, curves
        self.step = self.first_step = self.saved = 0  # `saved`: the step of the last checkpoint
        self.stopping = False  # a signal asked for it
        self.bar = progress_bar(0, shown=False)  # the program puts its own here
        self.notes: list[str] = []  # what was done otherwise than asked for
        self.checkpoints = Checkpointer(config.checkpoint, config.keep) if config.checkpoint else None
        self.cadence: Cadence | None = None

    def __enter__(self) -> Run:
        if self.checkpoints:
            self.cadence = Cadence(self.config.save_every, self.config.save_seconds, self.config.timeout_s).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        if self.checkpoints:
            self.cadence.__exit__(*error)
            self.checkpoints.close()

    # --- Forward -----------------------------------------------------------------------------------

    def after_step(self, *measured: Any) -> bool:
        """Count a step, and save if it is time.

        Args:
            measured: what the curves note of it.
        Returns:
            Whether to stop; the same on every rank.
        Collective: those of the curves, and of `Cadence.next` and `save` if there is a checkpoint folder.
        """
        self.step += 1
        saved_anyway = self.curves.after_step(*measured)
        self.bar.update()
        wish = self.cadence.next(self.step) if self.cadence else Wish.GO_ON
        self.stopping = wish == Wish.STOP
        if wish and not saved_anyway:
            self.save()
        return self.stopping

    def finish(self) -> None:
        """Save what has not been saved, and wait until everything is on the disk. Call it only if nothing failed.

        Collective: that of `save`, one all_reduce, one barrier and one broadcast_object_list, if there is a
            checkpoint folder.
        """
        if self.checkpoints:
            if self.saved < self.step:
                self.save()
            self.cadence.finish()
            self.checkpoints.finish()

    # --- To the disk and back ----------------------------------------------------------------------

    def save(self) -> None:
        """Have rank 0 write all that there is, under the number of the step, if there is a checkpoint folder.

        Collective: those of `capture_state` and of the `Checkpointer`.
        """
        if not self.checkpoints:
            return
        noted = self.curves.state()
        noted["extra"] = {"config": asdict(self.config), **noted["extra"]}
        state = capture_state(self.model, self.optimizer, sampler=self.data, step=self.step, **noted)
        write = self.checkpoints.save_later if self.config.background else self.checkpoints.save
        write(state, self.step)
        self.saved = self.step

    def resume(self) -> None:
        """Go back to the latest checkpoint; if the folder has none, stay at the beginning and say so.

        Raises:
            CheckpointError: none of those there can be used, or they are of a run with other settings or other data.
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
        self.config.refuse_another_run(found.state["extra"].get("config", {}), found.path)
        try:
            self.note(*restore_state(found.state, self.model, self.optimizer, sampler=self.data))
        except ValueError as error:  # the place in the data is one in other data
            raise CheckpointError(f"{found.path} cannot be gone on from: {error}") from None
        self.step = self.first_step = self.saved = found.state["step"]
        self.curves.restore(found.state)


def settle_buckets(replica: DistributedDataParallel, example: torch.Tensor) -> None:
    """Have DDP make its last plan of the buckets now, by a backward pass that leaves nothing else behind.

    Two ranks need none: a sum of two numbers is the same in either order.

    Args:
        example: any batch.
    Collective: DDP's own of one forward and backward pass, every rank.
    Source: torch/csrc/distributed/c10d/reducer.cpp, rebuild_buckets.
    """
    if dist.get_world_size() <= 2:
        return
    before, generators = copy.deepcopy(replica.module.state_dict()), rng_state()
    replica.train()
    replica(example).sum().backward()
    replica.zero_grad()
    replica.module.load_state_dict(before)
    set_rng_state(generators)
