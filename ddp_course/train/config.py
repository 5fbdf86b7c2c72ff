"""What can be chosen about a training run?

Each field of `Config` is also an option of the command line, with the same name, default and help. A config travels
to the ranks by value and into every checkpoint, so that a run is never resumed as another one.

Read next: `train.py`, which does what it says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from ddp_course.checkpoint.folder import CheckpointError
from ddp_course.data import DATASETS
from ddp_course.train.schedule import SCHEDULES

MODELS = ("mlp", "mlp_bn", "resnet18")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def option(default: Any, says: str, choices: tuple[str, ...] = (), *, free: bool = False) -> Any:
    """Describe a field. `free`: a run may be resumed with another value, without becoming another run."""
    return field(default=default, metadata={"help": says, "choices": choices, "free": free})


@dataclass(frozen=True)
class Config:
    """What to train, and how. Each field is also an option of the command line."""

    dataset: str = option("digits", "the images to learn", DATASETS)
    root: str | None = option(None, "the folder with the files of a dataset that is not built in", free=True)
    model: str = option("mlp", "the network", MODELS)
    hidden: int = option(256, "width of the MLP's hidden layers")
    epochs: int = option(20, "passes over the training rows, those of a resumed run included", free=True)
    local_batch: int = option(16, "rows in one rank's batch; the global batch is this times the world size")
    lr: float = option(0.1, "learning rate")
    momentum: float = option(0.9, "momentum of SGD")
    weight_decay: float = option(0.0, "share of each weight that is added to its gradient")
    schedule: str = option("constant", "how the learning rate changes from the first epoch to the last", SCHEDULES)
    warmup: float = option(0.0, "epochs in which the learning rate rises to its full height; 0.5 is half an epoch")
    augment: bool = option(False, "shift training images at random, and mirror them where the dataset allows it")
    seed: int = option(0, "chooses the first weights, the order of the rows and what augment does")
    dtype: str = option("float32", "number format of the model", tuple(DTYPES))
    amp: bool = option(False, "compute in bfloat16 where that is safe; the weights stay in float32")
    channels_last: bool = option(False, "store images pixel by pixel, as the convolutions of GPUs want them")
    compile: bool = option(False, "let torch.compile fuse the small operations, if this machine can")
    workers: int = option(0, "processes of each rank that read rows ahead (0: the rank reads itself)", free=True)
    checkpoint: str | None = option(None, "the folder in which rank 0 saves after every epoch", free=True)
    save_every: int = option(0, "save after this many steps, too (0: only after epochs)", free=True)
    save_seconds: float = option(0.0, "save when this many seconds have passed, too (0: never)", free=True)
    background: bool = option(False, "write checkpoints while the training goes on", free=True)
    keep: int = option(3, "how many of the last checkpoints stay there", free=True)
    resume: bool = option(False, "go on from the latest checkpoint, if there is one", free=True)
    timeout_s: float = option(60.0, "the longest a rank may wait for the others in one collective", free=True)
    hang_report: float = option(0.0, "report a hang after this many seconds, and end the ranks (0: never)", free=True)
    progress: bool = option(True, "show a bar on rank 0", free=True)

    def __post_init__(self) -> None:
        for name, least in (
            ("hidden", 1),
            ("epochs", 1),
            ("local_batch", 1),
            ("keep", 1),
            ("save_every", 0),
            ("workers", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        for name in ("save_seconds", "hang_report", "warmup", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s}: must be positive")
        for each in fields(self):
            choices, value = each.metadata["choices"], getattr(self, each.name)
            if choices and value not in choices:
                raise ValueError(f"{each.name}={value!r} is not known; choose from {', '.join(choices)}")
        if self.schedule == "cosine" and self.warmup >= self.epochs:
            raise ValueError(f"warmup={self.warmup}: must end before the last epoch does (epochs={self.epochs})")
        if self.amp and self.dtype != "float32":
            raise ValueError(f"amp is for weights in float32, not in {self.dtype}")
        for name in ("resume", "save_every", "save_seconds", "background"):
            if getattr(self, name) and not self.checkpoint:
                raise ValueError(f"{name} needs a checkpoint: say where it is (checkpoint=...)")

    def refuse_another_run(self, saved: dict[str, Any], path: Any) -> None:
        """Raise unless `saved`, the config of the checkpoint at `path`, is of this very run.

        A setting that `saved` does not know is newer than the file; its default is what was done then. More epochs
        make another run if the learning rate depends on where the end is.

        Raises:
            CheckpointError: a setting that shapes the run differs; names it and both values.
        """
        wanted = asdict(self)
        for each in fields(self):
            free = each.metadata["free"] and not (each.name == "epochs" and self.schedule == "cosine")
            was = saved.get(each.name, each.default)
            if not free and was != wanted[each.name]:
                raise CheckpointError(
                    f"{path} was written with {each.name}={was!r}, this run has {wanted[each.name]!r}; "
                    f"go on with {each.name}={was!r}, or train anew without resume"
                )
