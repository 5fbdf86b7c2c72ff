"""What does each rank do beside its training loop, so that a silent fault shows?

    observer = TrainingObserver(model, optimizer, reference=Reference(global_batch=16, lr=0.1))
    observer.training_rows(loader)
    observer.evaluation_rows(test_loader)
    ...                                              # train; the loop stays as it was
    observer.batch("test loss", loss, len(label_N))  # in every step of a mean
    observer.reported("test loss", value)            # what the program says it is
    with observer.writing(path):
        torch.save(state, path)
    observer.loaded(state, model)                    # just before model.load_state_dict(state)
    for finding in observer.look():                  # on every rank
        print(finding)

Each call takes notes and talks to nobody. `look` brings the notes of all ranks together, once. Whatever was not
noted is not judged.

Left out on purpose: streaming datasets, whose rows have no numbers; and any cost in the step but a list's append.
Read next: `training_checks.py`, what the notes say.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Subset

from ddp_course.diagnose.training_checks import look
from ddp_course.diagnose.training_facts import Finding, Load, NotedMean, RankFacts, Reference, Write

ROWS_KEPT = 200_000  # of one epoch: what a rank sends to the others stays below 2 MB an epoch


class TrainingObserver:
    """Takes notes on one rank, and looks at those of all ranks together.

    Args:
        model: bare or wrapped by DDP; looked at, never changed.
        optimizer: its first group's rate is compared with the reference; None: not judged.
        reference: the global batch and the rate of the run that was tuned; None: the rate is not judged.
        device: this rank's own; None: the one of the model's first parameter.
        group: the ranks that train together; None: the default group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        reference: Reference | None = None,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.optimizer, self.group = model, optimizer, group
        if device is None:
            device = next((parameter.device for parameter in model.parameters()), "cpu")
        self._epochs: deque[list[int]] = deque(maxlen=2)
        self._evaluations: deque[list[int]] = deque([[]], maxlen=1)
        self._notes = RankFacts(host=socket.gethostname(), device=str(device), reference=reference)

    def training_rows(self, loader: DataLoader) -> None:
        """Note from now on which rows `loader` draws. Each pass over it is an epoch; the last two are kept.

        Raises:
            TypeError: the loader's rows have no numbers that could be noted.
        """
        _tap(loader, self._epochs)
        self._notes.local_batch = loader.batch_sampler.batch_size

    def evaluation_rows(self, loader: DataLoader) -> None:
        """Note from now on which rows `loader` draws. Each pass over it is an evaluation; the last is kept.

        A `Subset` is looked through: its rows have the numbers that they have in the set below.

        Raises:
            TypeError: the loader's rows have no numbers that could be noted.
        """
        _tap(loader, self._evaluations)
        self._notes.evaluation_size = None if isinstance(loader.dataset, Subset) else len(loader.dataset)

    def batch(self, name: str, mean: float | torch.Tensor, rows: int) -> None:
        """Note the mean of a metric over one batch of this rank. After `reported`, the next one begins again."""
        noted = self._notes.means.get(name)
        if noted is None or noted.reported is not None:
            noted = self._notes.means[name] = NotedMean()
        # A tensor stays on its device until `facts`: reading it here would wait for the GPU.
        mean = mean.detach().double() if isinstance(mean, torch.Tensor) else mean
        noted.total, noted.rows = noted.total + mean * rows, noted.rows + rows
        noted.batch_means, noted.batches = noted.batch_means + mean, noted.batches + 1

    def reported(self, name: str, value: float | torch.Tensor) -> None:
        """Note what the program says the metric is, over all ranks. Ranks that say nothing don't call this."""
        self._notes.means.setdefault(name, NotedMean()).reported = float(value)

    @contextmanager
    def writing(self, path: str | os.PathLike) -> Iterator[None]:
        """Note that this rank writes `path` within the block."""
        began = time.time()
        yield
        self._notes.writes.append(Write(str(Path(path).resolve()), began, time.time()))

    def loaded(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Note the very state that `model.load_state_dict` gets: its names, and where its tensors lie."""
        devices = sorted({str(value.device) for value in state.values() if isinstance(value, torch.Tensor)})
        self._notes.loads.append(Load(tuple(state), tuple(model.state_dict()), tuple(devices)))

    def look(self) -> list[Finding]:
        """Return what is wrong, the same on every rank; an empty list if nothing is.

        The notes stay, so it may be called after every epoch.

        Collective: one all_gather_object, every rank of the group.
        """
        mine = self.facts()
        everyone: list[Any] = [mine]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(everyone, mine, group=self.group)
        return look(everyone)

    def facts(self) -> RankFacts:
        """Return this rank's notes, and how its model, threads and cores are now. Talks to nobody."""
        layers = [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, _BatchNorm)]
        statistics = {f"{name}.{own}".lstrip(".") for name, layer in layers for own, _ in layer.named_buffers()}
        buffers = {name: buffer.detach().cpu().clone() for name, buffer in self.model.named_buffers()}
        affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        return replace(
            self._notes,
            rank=dist.get_rank(self.group) if dist.is_initialized() else 0,
            cores=tuple(sorted(affinity(0))),
            threads=torch.get_num_threads(),
            epochs=list(self._epochs),
            evaluated=list(self._evaluations[-1]),
            lr=_rate(self.optimizer) if self.optimizer else None,
            means={
                name: replace(noted, total=float(noted.total), batch_means=float(noted.batch_means))
                for name, noted in self._notes.means.items()
            },
            writes=list(self._notes.writes),
            loads=list(self._notes.loads),
            parameters={name: _hash(parameter) for name, parameter in self.model.named_parameters()},
            buffers=buffers,
            of_batchnorm=tuple(name for name in buffers if name in statistics),
        )


@dataclass
class _Tap:
    """Stands in a sampler's place: gives what the sampler gives, and notes it."""

    sampler: Any
    number: Callable[[int], int]
    passes: deque[list[int]] = field(repr=False)

    def __iter__(self) -> Iterator[int]:
        rows: list[int] = []
        self.passes.append(rows)
        for index in self.sampler:
            if len(rows) < ROWS_KEPT:
                rows.append(self.number(int(index)))
            yield index

    def __len__(self) -> int:
        return len(self.sampler)


def _tap(loader: DataLoader, passes: deque[list[int]]) -> None:
    # A DataLoader refuses another sampler once it is made. Its batch sampler asks its own one afresh in every epoch,
    # in this process also where workers fetch the rows.
    batches = loader.batch_sampler
    if not hasattr(loader.dataset, "__len__") or not hasattr(batches, "sampler"):
        raise TypeError(
            f"the rows of {type(loader.dataset).__name__} cannot be noted: expected a dataset with a length, and a "
            "DataLoader with a batch_size, whose batches are made from a sampler"
        )
    batches.sampler = _Tap(batches.sampler, _numbering(loader.dataset), passes)


def _numbering(dataset: Any) -> Callable[[int], int]:
    """Return the function from an index to the row's number in the set below all subsets."""
    if not isinstance(dataset, Subset):
        return lambda index: index
    below = _numbering(dataset.dataset)
    return lambda index: below(int(dataset.indices[index]))


def _rate(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0]
    return float(group.get("initial_lr", group["lr"]))  # what a schedule began with, not where it is just now


def _hash(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
