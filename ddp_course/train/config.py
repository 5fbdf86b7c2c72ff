"""What can be chosen about a training run?

Each field of a program's config is also an option of the command line, with the same name, default and help. A config
travels to the ranks by value and into every checkpoint, so that a run is never resumed as another one.

Read next: `images.py`, which does what `Config` says.
"""

from __future__ import annotations

from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

import torch

from ddp_course.checkpoint import CheckpointError
from ddp_course.data import DATASETS
from ddp_course.train.schedule import SCHEDULES

MODELS = ("mlp", "mlp_bn", "resnet18")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def option(
    default: Any,
    says: str,
    choices: tuple[str, ...] = (),
    *,
    least: float | None = None,
    above: float | None = None,
    free: bool = False,
    saves: bool = False,
) -> Any:
    """Describe a field.

    Args:
        least: the smallest value that makes sense.
        above: what every value that makes sense is greater than.
        free: a run may be resumed with another value, without becoming another run.
        saves: means something only with a checkpoint folder.
    """
    told = {"help": says, "choices": choices, "least": least, "above": above, "free": free or saves, "saves": saves}
    return field(default=default, metadata=told)


@dataclass(frozen=True)
class Options:
    """A dataclass whose fields are all made by `option`: what makes no sense is refused."""

    def __post_init__(self) -> None:
        for each in fields(self):
            says, value = each.metadata, getattr(self, each.name)
            if says["least"] is not None and value < says["least"]:
                raise ValueError(f"{each.name}={value}: must be at least {says['least']}")
            if says["above"] is not None and value <= says["above"]:
                raise ValueError(f"{each.name}={value}: must be above {says['above']}")
            if says["choices"] and value not in says["choices"]:
                raise ValueError(f"{each.name}={value!r} is not known; choose from {', '.join(says['choices'])}")
            if says["saves"] and value and not self.checkpoint:
                raise ValueError(f"{each.name} needs a checkpoint: say where it is (checkpoint=...)")

    @classmethod
    def options(cls) -> list[Field]:
        """All fields, the program's own first."""
        of_every_run = {each.name for each in fields(Saving)}
        return sorted(fields(cls), key=lambda each: each.name in of_every_run)

    def makes_another_run(self, each: Field) -> bool:
        """Whether a run that goes on with another value of this field is another run."""
        return not each.metadata["free"]

    def refuse_another_run(self, saved: dict[str, Any], path: Any) -> None:
        """Raise unless `saved`, the config of the checkpoint at `path`, is of this very run.

        A setting that `saved` does not know is newer than the file; its default is what was done then.

        Raises:
            CheckpointError: a setting that shapes the run differs; names it and both values.
        """
        wanted = asdict(self)
        for each in filter(self.makes_another_run, fields(self)):
            was = saved.get(each.name, each.default)
            if was != wanted[each.name]:
                raise CheckpointError(
                    f"{path} was written with {each.name}={was!r}, this run has {wanted[each.name]!r}; "
                    f"go on with {each.name}={was!r}, or train again without resume"
                )


@dataclass(frozen=True, kw_only=True)
class Saving(Options):
    """What can be chosen about every run that saves."""

    checkpoint: str | None = option(None, "the folder in which rank 0 saves", free=True)
    save_every: int = option(0, "save after this many steps, too (0: only when a part is done)", least=0, saves=True)
    save_seconds: float = option(0.0, "save when this many seconds have passed, too (0: never)", least=0, saves=True)
    background: bool = option(False, "write checkpoints while the training goes on", saves=True)
    keep: int = option(3, "how many of the last checkpoints stay there", least=1, free=True)
    resume: bool = option(False, "go on from the latest checkpoint, if there is one", saves=True)
    timeout_s: float = option(60.0, "the longest a rank may wait for the others in a collective", above=0, free=True)
    hang_report: float = option(
        0.0, "report a hang after this many seconds, and end the ranks (0: never)", least=0, free=True
    )
    progress: bool = option(True, "show a bar on rank 0", free=True)


@dataclass(frozen=True)
class Config(Saving):
    """How to train a network on images. Each field is also an option of the command line."""

    dataset: str = option("digits", "the images to learn", DATASETS)
    root: str | None = option(None, "the folder with the files of a dataset that is not built in", free=True)
    model: str = option("mlp", "the network", MODELS)
    hidden: int = option(256, "width of the MLP's hidden layers", least=1)
    epochs: int = option(20, "passes over the training rows, those of a resumed run included", least=1, free=True)
    local_batch: int = option(16, "rows in one rank's batch; the global batch is this times the world size", least=1)
    lr: float = option(0.1, "learning rate")
    momentum: float = option(0.9, "momentum of SGD")
    weight_decay: float = option(0.0, "share of each weight that is added to its gradient", least=0)
    schedule: str = option("constant", "how the learning rate changes from the first epoch to the last", SCHEDULES)
    warmup: float = option(0.0, "epochs in which the learning rate rises to its height; 0.5 is half an epoch", least=0)
    augment: bool = option(False, "shift training images at random, and mirror them where the dataset allows it")
    seed: int = option(0, "chooses the first weights, the order of the rows and what augment does")
    dtype: str = option("float32", "number format of the model", tuple(DTYPES))
    amp: bool = option(False, "compute in bfloat16 where that is safe; the weights stay in float32")
    channels_last: bool = option(False, "store images pixel by pixel, as the convolutions of GPUs want them")
    compile: bool = option(False, "let torch.compile fuse the small operations, if this machine can")
    workers: int = option(0, "processes of each rank that read rows ahead (0: none)", least=0, free=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "cosine" and self.warmup >= self.epochs:
            raise ValueError(f"warmup={self.warmup}: must end before the last epoch does (epochs={self.epochs})")
        if self.amp and self.dtype != "float32":
            raise ValueError(f"amp is for weights in float32, not in {self.dtype}")

    def makes_another_run(self, each: Field) -> bool:
        # More epochs are more of the same, unless the learning rate depends on where the end is.
        return super().makes_another_run(each) or (each.name == "epochs" and self.schedule == "cosine")
