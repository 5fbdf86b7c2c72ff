"""Where is the training of a GPT, and how does it come back to that place?

The same as `run.py`, for a training that counts steps instead of epochs: what can be chosen, what is done so far, when
it is saved, and from what it goes on. The learning rate is a formula of the step, and the place in the text is one
number. So the step, the weights and AdamW's moments are nearly all there is.

Left out on purpose: saving beside the training; and more steps for a run that is resumed, whose schedule would be
another one.
Read next: `train_gpt.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from ddp_course.checkpoint.cadence import Cadence, Wish
from ddp_course.checkpoint.folder import Checkpointer, CheckpointError
from ddp_course.checkpoint.state import capture_state, restore_state
from ddp_course.data.text import TokenStream
from ddp_course.gpt import GPT, SIZES
from ddp_course.groups import my_device
from ddp_course.logs import progress_bar
from ddp_course.metrics import each_rank, mean_over_ranks
from ddp_course.train.config import option

PRECISIONS = ("float32", "bf16")
WARM_UP = 3  # steps that the speed is not taken from: the first ones also allocate and plan


@dataclass(frozen=True)
class GPTConfig:
    """What to train, and how. Each field is also an option of the command line."""

    text: str | None = option(None, "a folder of Python files (default: Python's standard library)", free=True)
    size: str = option("mini", "how large the model is", tuple(SIZES))
    steps: int = option(400, "updates of the weights, those of a resumed run included")
    until: int = option(0, "save and leave after this step, to be resumed (0: the last one)", free=True)
    local_batch: int = option(8, "windows of one micro-batch on one rank")
    accumulation: int = option(2, "micro-batches in a step")
    lr: float = option(5e-3, "learning rate at the end of the warm-up")
    warmup: int = option(40, "steps in which the learning rate rises")
    weight_decay: float = option(0.1, "AdamW's, for matrices only")
    clip: float = option(1.0, "the largest norm of the gradient")
    precision: str = option("float32", "number format of the matrix products", PRECISIONS)
    held_out: int = option(512, "windows of held-out text for a loss (0: all of them)", free=True)
    held_out_every: int = option(0, "take the held-out loss after so many steps, too (0: only at the end)", free=True)
    sample: int = option(400, "bytes that rank 0 writes at the end", free=True)
    seed: int = option(0, "chooses the first weights and the order of the windows")
    checkpoint: str | None = option(None, "the folder in which rank 0 saves", free=True)
    save_every: int = option(0, "save after so many steps (0: only at the end)", free=True)
    keep: int = option(3, "how many of the last checkpoints stay there", free=True)
    resume: bool = option(False, "go on from the latest checkpoint, if there is one", free=True)
    timeout_s: float = option(60.0, "the longest a rank may wait for the others in one collective", free=True)
    progress: bool = option(True, "show a bar on rank 0", free=True)

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("local_batch", 1), ("accumulation", 1), ("keep", 1), ("save_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.clip <= 0:
            raise ValueError(f"clip={self.clip}: must be positive; inf clips nothing")
        for each in fields(self):
            choices, value = each.metadata["choices"], getattr(self, each.name)
            if choices and value not in choices:
                raise ValueError(f"{each.name}={value!r} is not known; choose from {', '.join(choices)}")
        if (self.resume or self.save_every or self.until) and not self.checkpoint:
            raise ValueError("resume, save_every and until need a checkpoint: say where it is (checkpoint=...)")


class Progress:
    """Counts steps, keeps the curves, saves when it is time, and goes on from what was saved.

    Collective: one all_reduce a step; with a checkpoint folder those of `Cadence`, `Checkpointer` and `capture_state`.
    """

    def __init__(self, config: GPTConfig, model: GPT, optimizer: torch.optim.Optimizer, stream: TokenStream) -> None:
        self.config, self.model, self.optimizer, self.stream = config, model, optimizer, stream
        self.step = self.first_step = self.saved = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.held_out: list[tuple[int, float]] = []
        self.times: list[float] = []  # seconds of each step of this process, saving left out
        self.stopping = False
        self.last = min(config.until or config.steps, config.steps)
        self.notes: list[str] = []
        self.bar = progress_bar(0, shown=False)
        self.cadence: Cadence | None = None
        self.checkpoints = Checkpointer(config.checkpoint, config.keep) if config.checkpoint else None

    def __enter__(self) -> Progress:
        if self.checkpoints:
            self.cadence = Cadence(self.config.save_every, timeout_s=self.config.timeout_s).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        if self.checkpoints:
            self.cadence.__exit__(*error)
            self.checkpoints.close()

    def steps(self) -> Iterator[int]:
        """Give the numbers of the steps that are left, from 0, to the last or until a signal asks to stop."""
        self.bar = progress_bar(self.config.steps, initial=self.step, shown=self.config.progress)
        while self.step < self.last and not self.stopping:
            self.started = clock(my_device())
            yield self.step

    def after_step(self, loss: float, norm: torch.Tensor) -> None:
        """Note a step, and save if it is time.

        Args:
            loss: this rank's mean; the ranks have equally many tokens.
        """
        self.losses.append(mean_over_ranks(loss, 1, my_device()))
        self.norms.append(float(norm))
        self.times.append(clock(my_device()) - self.started)
        self.step += 1
        self.bar.update()
        self.bar.set_postfix_str(f"loss {self.losses[-1]:.3f}")
        wish = self.cadence.next(self.step) if self.cadence else Wish.GO_ON
        self.stopping = wish == Wish.STOP
        if wish:
            self._save()

    def note_held_out(self, loss: float) -> None:
        self.held_out = [pair for pair in self.held_out if pair[0] < self.step] + [(self.step, loss)]

    def tokens_per_s(self, local_tokens: int) -> float:
        """Return the tokens of all ranks in a second, of the slowest rank's clock; 0 if no step was left to do.

        Collective: one all_gather, every rank.
        """
        timed = self.times[WARM_UP:] or self.times
        slowest = max(each_rank(sum(timed)))
        return dist.get_world_size() * local_tokens * len(timed) / slowest if slowest else 0.0

    def finish(self) -> None:
        """Save what has not been saved, and wait for the last answer of the others; for the good path only."""
        if self.checkpoints:
            if self.saved < self.step:
                self._save()
            self.cadence.finish()

    def _save(self) -> None:
        extra = {"config": asdict(self.config), "losses": self.losses, "norms": self.norms, "held_out": self.held_out}
        state = capture_state(self.model, self.optimizer, sampler=self.stream, step=self.step, extra=extra)
        self.checkpoints.save(state, self.step)
        self.saved = self.step

    def resume(self) -> None:
        """Go back to the latest checkpoint; if the folder has none, stay at the beginning and say so.

        Raises:
            CheckpointError: none of those there can be used, or they are of a run with other settings.
        Collective: see `Checkpointer.load_latest`.
        """
        found = self.checkpoints.load_latest()
        if not found:
            self.notes = [f"{self.config.checkpoint} has no checkpoint yet, so the run begins"]
            return
        extra = found.state["extra"]
        refuse_another_run(self.config, extra["config"], found.path)
        try:
            self.notes = restore_state(found.state, self.model, self.optimizer, sampler=self.stream)
        except ValueError as error:  # the stream's: another text
            raise CheckpointError(f"{found.path} cannot be gone on from: {error}") from None
        self.step = self.first_step = self.saved = found.step
        self.losses, self.norms = extra["losses"], extra["norms"]
        self.held_out = [tuple(pair) for pair in extra["held_out"]]


def refuse_another_run(config: GPTConfig, saved: dict, path: object) -> None:
    """Raise CheckpointError unless `saved` is of this very run: every setting that shapes it must be the same."""
    for name in (each.name for each in fields(config) if not each.metadata["free"]):
        if saved.get(name) != getattr(config, name):
            raise CheckpointError(
                f"{path} was written with {name}={saved.get(name)!r}, this run has {getattr(config, name)!r}; "
                f"go on with {name}={saved.get(name)!r}, or train anew without resume"
            )


def clock(device: torch.device) -> float:
    """Return the time in seconds, when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
