"""What does a rank know of its own training, that the others do not?

One `RankFacts` holds the notes of one rank, in plain values that can travel. `observer.py` takes them, and
`training_checks.py` lays those of all ranks side by side. What it sees there is a `Finding`.

Left out on purpose: gradients and activations. A fault that only they show is not found.
Read next: `training_checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Reference:
    """The run for which the learning rate was found good."""

    global_batch: int
    lr: float


@dataclass
class NotedMean:
    """What a rank knows of one metric, such as the loss of the test rows."""

    total: float | torch.Tensor = 0.0  # sum over its rows
    rows: int = 0
    batch_means: float | torch.Tensor = 0.0  # sum of the means of its batches
    batches: int = 0
    reported: float | None = None  # what the program says the metric is; None: this rank says nothing


@dataclass(frozen=True)
class Write:
    """One file, written by one rank."""

    path: str
    began: float  # seconds since 1970
    ended: float


@dataclass(frozen=True)
class Load:
    """One state, given to one model."""

    names: tuple[str, ...]  # in the state
    model_names: tuple[str, ...]  # in the model's own state
    devices: tuple[str, ...]  # where the state's tensors lie


@dataclass
class RankFacts:
    """The notes of one rank. The defaults describe a rank about which nothing was noted."""

    rank: int = 0
    host: str = "host"
    device: str = "cpu"
    cores: tuple[int, ...] = (0, 1, 2, 3)  # that this process may use
    threads: int = 1  # of torch, inside one operation
    epochs: list[list[int]] = field(default_factory=list)  # rows drawn for training, the last two epochs
    evaluated: list[int] = field(default_factory=list)  # rows drawn in the last evaluation
    evaluation_size: int | None = None  # rows that there are; None: not known
    local_batch: int | None = None
    lr: float | None = None
    reference: Reference | None = None
    means: dict[str, NotedMean] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)  # a short hash of each
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    of_batchnorm: tuple[str, ...] = ()  # which of the buffers are running statistics


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    fault: str  # its name in the failure lab
    rank: int | None  # the first rank that is to blame; None when all do the same
    evidence: str  # what was found, in numbers, and what would be right
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.fault}{'' if self.rank is None else f' (rank {self.rank})'}: {self.evidence}"
