"""What runs on the ranks in exercise 11.3, and what one process would get, right and with each slip that is known?

Hooks on the first and the last layer note each forward pass, how many wait for their backward, and BatchNorm's
statistics while the weights are still those of the beginning.

Read next: `step.py`, which judges by these notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.isolated import plain

FEATURES, HIDDEN, CLASSES = 12, 40, 5
LR = 0.1

Batches = list[tuple[torch.Tensor, torch.Tensor]]  # rows and labels, by step


class Noting(nn.Module):
    """A linear layer that notes the format of its results."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, narrow)
        self.formats: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.formats.add(str(y.dtype))
        return y


class Watch:
    """Notes the rows of each forward pass, how many wait for their backward, and statistics after the first step."""

    def __init__(self, model: nn.Sequential, pieces: int) -> None:
        self.model, self.pieces = model, pieces
        self.rows: list[int] = []
        self.waiting = self.most_waiting = 0
        self.first_statistics: dict[str, list[float]] = {}
        model[0].register_forward_pre_hook(self._begins)
        model[3].register_forward_hook(self._ends)

    def _begins(self, layer: nn.Module, args: tuple) -> None:
        self.rows.append(len(args[0]))

    def _ends(self, layer: nn.Module, args: tuple, y: torch.Tensor) -> None:
        if len(self.rows) == self.pieces:  # the weights are still those of the beginning
            self.first_statistics = running(self.model)
        if y.requires_grad:
            self.waiting += 1
            self.most_waiting = max(self.most_waiting, self.waiting)
            y.register_hook(self._goes_back)

    def _goes_back(self, gradient: torch.Tensor) -> None:
        self.waiting -= 1


def running(model: nn.Module) -> dict[str, list[float]]:
    return {name: plain(value.double()) for name, value in model.state_dict().items() if "running" in name}


def network(seed: int, number: torch.dtype) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [Noting(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), Noting(HIDDEN, CLASSES)]
    return nn.Sequential(*layers).to(number)


def batches_of(seed: int, rows: int, steps: int, number: torch.dtype) -> Batches:
    """The rows of one rank; each seed has a mean of its own, so that the ranks' statistics differ."""
    generator = torch.Generator().manual_seed(seed)
    spread, mean = 1 + seed % 3, torch.randn(FEATURES, generator=generator)
    return [
        (
            (mean + spread * torch.randn(rows, FEATURES, generator=generator)).to(number),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def driver(rank: int, world_size: int, function: Callable, seeds: list[int], plan: tuple, amp: bool, wide: bool) -> Any:
    """Let the learner's function train; return losses, weights, statistics, formats and bytes sent."""
    number = torch.float64 if wide else torch.float32
    steps, rows, pieces = plan
    model = network(seeds[0], number)
    layers = [model[0], model[3]]  # the learner may replace modules, not these
    batches, watch = batches_of(seeds[1 + rank], rows, steps, number), Watch(model, pieces)
    with observe.Collectives() as seen:
        losses = function(rank, world_size, model, batches, LR, pieces, amp)
    state = {name: plain(value.double()) for name, value in model.state_dict().items() if "num_" not in name}
    return {
        "losses": plain(losses),
        "state": state,
        "first_statistics": watch.first_statistics,
        "rows": watch.rows,
        "most_waiting": watch.most_waiting,
        "numbers": sorted({str(p.dtype) for p in model.parameters()}),
        "formats": sorted(set.union(*(layer.formats for layer in layers))),
        "bytes": sum(call.n_bytes for call in seen.calls if call.op != "broadcast"),
    }


def one_process(seeds: list[int], plan: tuple, slip: str = "") -> dict:
    """Train in this process, in float64, on piece k of all ranks together; with a slip, if one is named."""
    steps, rows, pieces = plan
    model = network(seeds[0], torch.float64)
    by_rank = [batches_of(seed, rows, steps, torch.float64) for seed in seeds[1:]]
    losses = []
    for step in range(steps):
        if slip != "kept":
            model.zero_grad()
        parts = [[_cut(t, pieces, slip) for t in batches[step]] for batches in by_rank]
        total = 0.0
        for k in range(pieces):
            x, labels = (torch.cat([part[which][k] for part in parts]) for which in (0, 1))
            loss = F.cross_entropy(model(x), labels) / (1 if slip == "undivided" else pieces)
            if slip == "zeroed":
                model.zero_grad()
            loss.backward()
            total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    state = {name: value.tolist() for name, value in model.state_dict().items() if "num_" not in name}
    return {"losses": losses, "state": state}


def _cut(rows: torch.Tensor, pieces: int, slip: str) -> tuple[torch.Tensor, ...]:
    return tuple(rows[k::pieces] for k in range(pieces)) if slip == "dealt" else rows.chunk(pieces)


def first_statistics(seeds: list[int], plan: tuple) -> dict[str, list[float]]:
    """Return the running statistics after the pieces of the first batch, of the ranks whose seeds are given."""
    state = one_process(seeds, (1, *plan[1:]))["state"]
    return {name: value for name, value in state.items() if "running" in name}
