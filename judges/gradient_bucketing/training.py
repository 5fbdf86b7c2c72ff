"""Train the answer to 07.2 for some steps, on every rank: what is sent when, and who waits for whom?

Overlap is a statement about order, so no clock is read. In the first step the last rank begins its backward pass only
when all others are through with theirs, and a little later than they could have needed its gradients. A rank that talks
in a blocking way never gets through; one that does not wait at the end is done too early.
Read next: `overlap.py`, which judges by these notes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading import observe

STEPS, ROWS, RATE = 3, 4, 0.5
REACH_WAIT_S, FINISH_WAIT_S, LATE_S = 3.0, 0.2, 0.02
# Of an exercise's hints: the limit of the run came before that of the collective.
STUCK = (
    r"(?s)no result after.*waited in (all_reduce|barrier|broadcast|reduce|all_gather)",
    "some ranks wait in a collective that another one skips, or calls at another place; look for a branch on the rank",
)


@dataclass(frozen=True)
class Task:
    """A model, its data and a cap, all made from numbers."""

    layers: int
    width: int
    seed: int
    cap: int
    gated: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of all gradients."""
        return self.layers * (self.parameter_bytes(0) + self.parameter_bytes(1))

    def parameter_bytes(self, index: int) -> int:
        """Weights have even indices, biases odd ones."""
        return 8 * self.width * (self.width if index % 2 == 0 else 1)

    def model(self) -> nn.Sequential:
        """Return the same model on every rank, in float64."""
        torch.manual_seed(self.seed)
        blocks = (m for _ in range(self.layers) for m in (nn.Linear(self.width, self.width), nn.Tanh()))
        return nn.Sequential(*blocks).double()

    def rows(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one rank's rows and targets for one step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 100 * step + rank)
        x = torch.randn(ROWS, self.width, generator=generator, dtype=torch.float64)
        return x, x.flip(1) + rank


class Gates:
    """Marks that ranks leave for each other, beside the answer's own group."""

    def __init__(self, rank: int, world_size: int, path: str):
        self.rank, self.others = rank, range(world_size - 1)  # the last rank is the one that waits
        self.store, self.late = dist.FileStore(path, world_size), rank == world_size - 1
        self.closed = False
        self.seen: dict[str, bool] = {}

    def mark(self, name: str) -> None:
        self.store.set(f"{name}/{self.rank}", "yes")

    def wait_for(self, name: str, seconds: float, some: bool) -> None:
        keys = [f"{name}/{rank}" for rank in self.others]
        deadline, ready = time.monotonic() + seconds, any if some else all
        while not (met := ready(self.store.check([key]) for key in keys)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.seen[name] = met

    def hold(self, gradient: torch.Tensor) -> None:
        """Called at the begin of backward: on the last rank, be late."""
        if self.late and self.closed:
            self.wait_for("through", REACH_WAIT_S, some=False)
            self.wait_for("finished", FINISH_WAIT_S, some=True)
        elif self.late:
            time.sleep(LATE_S)


def train_driver(rank: int, world_size: int, cls: type, path: str, task: Task) -> dict:
    """Train some steps; note the gradients, the weights, and how far backward was at each collective."""
    model, gates, arrived = task.model(), Gates(rank, world_size, path), []
    for index, parameter in enumerate(model.parameters()):  # before the answer's own hooks
        parameter.register_hook(lambda gradient, index=index: arrived.append(index))
    next(model.parameters()).register_hook(lambda gradient: gates.mark("through"))
    replica = cls(model, task.cap)
    steps = []
    for step in range(STEPS):
        gates.closed = task.gated and step == 0
        steps.append(_one_step(replica, model, task.rows(rank, step), gates, arrived))
        _descend(model)
    return {"steps": steps, "weights": [p.detach().tolist() for p in model.parameters()], "gates": gates.seen}


def _one_step(replica: Any, model: nn.Module, rows: tuple, gates: Gates, arrived: list[int]) -> dict:
    x, y = rows
    model.zero_grad()
    arrived.clear()
    ready: list[list[int]] = []
    with observe.Collectives() as seen:
        seen.on_call = lambda: ready.append(list(arrived))
        outputs = replica(x)
        outputs.register_hook(gates.hold)
        (outputs - y).square().mean().backward()
        replica.finish_gradient_sync()
        if gates.closed:
            gates.mark("finished")
        gradients = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    calls = [
        {"op": call.op, "bytes": call.n_bytes, "ready": there, "backward": call.in_backward}
        for call, there in zip(seen.calls, ready, strict=True)
        if call.op != "barrier"
    ]
    return {"gradients": [g.tolist() for g in gradients], "calls": calls}


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    """Take a step down the gradient; torch.optim would have to be loaded by every rank."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= RATE * parameter.grad


def whole_batch(task: Task, ranks: range) -> tuple[list, list]:
    """Return each step's gradients and the last weights, of one process on the rows of these ranks."""
    model, gradients = task.model(), []
    for step in range(STEPS):
        xs, ys = zip(*(task.rows(rank, step) for rank in ranks), strict=True)
        model.zero_grad()
        (model(torch.cat(xs)) - torch.cat(ys)).square().mean().backward()
        gradients.append([p.grad.tolist() for p in model.parameters()])
        _descend(model)
    return gradients, [p.detach().tolist() for p in model.parameters()]
