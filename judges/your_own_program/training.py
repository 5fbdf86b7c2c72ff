"""What runs on the ranks in exercise 11.5, and what one process would get, right and with each slip that is known?

Hooks on the first and the last layer note the rows of each forward pass, its backward, and BatchNorm's statistics while
the weights are still those of the beginning.

Read next: `whole_step.py`, which judges by these notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.play import Note

FEATURES, HIDDEN, CLASSES = 12, 40, 5
LR, STEPS = 0.12, 3

Batches = list[tuple[torch.Tensor, torch.Tensor]]  # rows and labels, by step


@dataclass(frozen=True)
class Case:
    """So many batches of so many rows on each rank, in so many pieces."""

    seeds: tuple[int, ...]  # of the model, then of each rank's rows
    pieces: int
    rows: int
    amp: bool = False
    number: torch.dtype = torch.float64

    def model(self) -> nn.Sequential:
        """Return the same model on every rank."""
        torch.manual_seed(self.seeds[0])
        layers = [Noting(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), Noting(HIDDEN, CLASSES)]
        return nn.Sequential(*layers).to(self.number)

    def batches(self, rank: int) -> Batches:
        """Return the rows of one rank; each has a mean of its own, so that the ranks' statistics differ."""
        seed = self.seeds[1 + rank]
        chance = torch.Generator().manual_seed(seed)
        spread, mean, found = 1 + seed % 3, torch.randn(FEATURES, generator=chance), []
        for _ in range(STEPS):
            x = mean + spread * torch.randn(self.rows, FEATURES, generator=chance)
            found.append((x.to(self.number), torch.randint(0, CLASSES, (self.rows,), generator=chance)))
        return found


class Noting(nn.Module):
    """A linear layer that notes the format of its results and of its weights."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, narrow)
        self.formats: set[str] = set()
        self.numbers: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.formats.add(str(y.dtype))
        self.numbers.add(str(self.linear.weight.dtype))
        return y


class LossLog(Log):
    """A `Log` that also notes the format in which logarithms and exponentials are taken."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.formats: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.partition(".")[0] in ("_log_softmax", "_softmax", "logsumexp", "exp", "log"):
            self.formats.add(str(args[0].dtype))
        return super().__torch_dispatch__(func, types, args, kwargs)


def statistics(model: nn.Module) -> list:
    """Return BatchNorm's running mean and variance."""
    return [plain(value.double()) for name, value in model.state_dict().items() if "running" in name]


def weights(model: nn.Module) -> list:
    """Return the parameters, whatever the learner wrapped around them."""
    return [plain(value.double()) for name, value in model.state_dict().items() if "weight" in name or "bias" in name]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let the learner's function train; note losses, weights, statistics, formats and bytes sent."""
    model, batches = case.model(), case.batches(rank)
    layers, rows, first = (model[0], model[3]), [], []  # the learner may replace modules, not these
    layers[0].register_forward_pre_hook(lambda layer, args: rows.append(len(args[0])))
    # When all pieces of the first batch have come, the weights are still those of the beginning.
    layers[1].register_forward_hook(lambda *_: first.extend(statistics(model) * (len(rows) == case.pieces)))
    with LossLog(layers[1]) as log:
        losses = function(rank, world_size, model, batches, LR, case.pieces, case.amp)
    return Note(
        losses=plain(losses),
        weights=weights(model),
        first=first,
        last=statistics(model),
        rows=rows,
        logs=[log.text],
        numbers=sorted(set.union(*(layer.numbers for layer in layers), {str(p.dtype) for p in model.parameters()})),
        formats=sorted(set.union(*(layer.formats for layer in layers))),
        loss_formats=sorted(log.formats),
        bytes=sum(call.n_bytes for call in log.calls if call.op != "broadcast"),
    )


@cache
def one_process(
    case: Case, steps: int = STEPS, ranks: tuple[int, ...] = (), slip: str = "", lr: float = LR
) -> dict[str, Any]:
    """Train in this process on piece k of all ranks together; with a slip, if one is named."""
    model, losses, first = case.model(), [], []
    by_rank = [case.batches(rank) for rank in ranks or range(len(case.seeds) - 1)]
    for step in range(steps):
        if slip != "kept":
            model.zero_grad()
        parts = [[_cut(t, case.pieces, slip) for t in batches[step]] for batches in by_rank]
        total = 0.0
        for k in range(case.pieces):
            x, labels = (torch.cat([part[which][k] for part in parts]) for which in (0, 1))
            loss = F.cross_entropy(model(x), labels) / (1 if slip == "undivided" else case.pieces)
            if slip == "zeroed":
                model.zero_grad()
            loss.backward()
            total += loss.item()
        losses.append(total)
        first = first if step else statistics(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    return {"losses": losses, "weights": weights(model), "first": first, "last": statistics(model)}


def _cut(rows: torch.Tensor, pieces: int, slip: str) -> tuple[torch.Tensor, ...]:
    return tuple(rows[k::pieces] for k in range(pieces)) if slip == "dealt" else rows.chunk(pieces)
