"""What is noted of a run that counts steps, and what must be saved of it?

The learning rate is a formula of the step, and the place in the text is one number. So the step, the weights and
AdamW's moments are nearly all there is; the curves come with them, so that a resumed run shows them whole.

Left out on purpose: more steps for a run that is resumed, whose schedule would be another one.
Read next: `gpt.py`, the program.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.groups import my_device
from ddp_course.metrics import each_rank, mean_over_ranks

WARM_UP = 3  # steps that the speed is not taken from: the first ones also allocate and plan


class StepCurves:
    """Loss and norm of each step, held-out losses, and how long the steps took."""

    def __init__(self) -> None:
        self.losses: list[float] = []  # over all ranks
        self.norms: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.times: list[float] = []  # seconds of each step of this process, saving left out
        self.started = 0.0

    def before_step(self) -> None:
        self.started = clock(my_device())

    def after_step(self, loss: float, norm: torch.Tensor) -> bool:
        """Note a step.

        Args:
            loss: this rank's mean; the ranks have equally many tokens.
        Collective: one all_reduce, every rank.
        """
        self.losses.append(mean_over_ranks(loss, 1, my_device()))
        self.norms.append(float(norm))
        self.times.append(clock(my_device()) - self.started)
        return False

    def note_held_out(self, loss: float) -> None:
        step = len(self.losses)
        self.held_out = [pair for pair in self.held_out if pair[0] < step] + [(step, loss)]

    def tokens_per_s(self, local_tokens: int) -> float:
        """Return the tokens of all ranks in a second, of the slowest rank's clock; 0 if no step was left to do.

        Collective: one all_gather, every rank.
        """
        timed = self.times[WARM_UP:] or self.times
        slowest = max(each_rank(sum(timed)))
        return dist.get_world_size() * local_tokens * len(timed) / slowest if slowest else 0.0

    def state(self) -> dict[str, Any]:
        return {"extra": {"losses": self.losses, "norms": self.norms, "held_out": self.held_out}}

    def restore(self, state: dict[str, Any]) -> None:
        extra = state["extra"]
        self.losses, self.norms = extra["losses"], extra["norms"]
        self.held_out = [tuple(pair) for pair in extra["held_out"]]


def clock(device: torch.device) -> float:
    """Return the time in seconds, when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
