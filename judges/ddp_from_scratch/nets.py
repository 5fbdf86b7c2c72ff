"""What do the exercises of lesson 06 train, and what travels meanwhile?

A network with what makes replicas hard: a weight in two places, a frozen one, adapters that only some rows need. The
optimizer is written here, because every rank would have to load torch.optim first.
Read next: `average.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.vocabulary.observe import Call
from ddp_course.grading.vocabulary.rounds import Seen

ADAPTERS, OUTPUTS, RATE = 3, 3, 0.1
TOLERANCE = 1e-9
WORLDS = ((2, 3), (3, 2), (2, 4))  # numbers of ranks for the two runs of a check
ROOM = 1.7  # times the bytes of the gradients; a tied weight that is sent twice needs more
WHOLE = ("all_reduce", "all_gather", "all_to_all")  # bring values together, and give them to all
HALVES = (("reduce", "reduce_scatter", "gather"), ("broadcast", "scatter"))  # bring them together; give them out
WAITS = {
    "limit: waited in": "some ranks wait in a collective that another one skips, or calls at another place; look for a "
    "branch on the rank, or on what only this rank has",
    r"leaf Variable that requires grad|view of a leaf": "autograd is not to record this: use parameter.detach(), or "
    "torch.no_grad()",
    "sizes; disagree: different sizes; (?i)enforce fail|Connection closed": "the ranks sent tensors of different "
    "sizes, or in another order; all must call the same collectives",
}
READY = (
    *("torch.nn.parallel.DistributedDataParallel", "torch.distributed.utils._sync_module_states"),
    *("torch.distributed.utils._sync_params_and_buffers", "ddp_course.parallel.naive.NaiveDDP"),
    *("ddp_course.parallel.ddp.BucketedDDP", "ddp_course.parallel.replicas.broadcast_module"),
    *("ddp_course.parallel.replicas.broadcast_buffers", "ddp_course.parallel.naive.average_gradients"),
    "ddp_course.parallel.naive.average_gradients_flat",
)


class Net(nn.Module):
    """Two layers and scores; some rows go through adapters first. If tied, a bias is frozen, too."""

    def __init__(self, width: int, adapters: int, tied: bool):
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(width, width) for _ in range(adapters))
        self.scores = nn.Linear(width, OUTPUTS)  # used last, so backward does not go through them in reverse order
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        if tied:
            self.second.weight = self.first.weight
            self.second.bias.requires_grad_(False)
        self.register_buffer("offset", torch.randn(OUTPUTS))
        self.register_buffer("seen", torch.randn(2), persistent=False)  # in no state_dict

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (), *, named: bool = False) -> Any:
        for index in use:
            x = x + self.adapters[index](x)
        scores = self.scores(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return {"scores": scores + self.offset} if named else scores


@dataclass(frozen=True)
class Task:
    """A network, its data and its steps, all made from numbers."""

    width: int
    rows: int  # of each rank, in each step
    seed: int
    uses: tuple[tuple[tuple[int, ...], ...], ...]  # of each step, for each rank: the adapters that its rows need
    tied: bool = False
    adam: bool = False
    blank: tuple[tuple[int, int], ...] = ()  # step and rank where rows are 0, and so are the first weights' gradients
    thrice: int = -1  # a step of three passes, each for a third of the loss, where each rank also has others' adapters

    def model(self, rank: int = 0) -> Net:
        """Return the network as this rank would begin with it, in float64."""
        torch.manual_seed(self.seed + rank)
        return Net(self.width, ADAPTERS if any(map(any, self.uses)) else 0, self.tied).double()

    @property
    def n_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.nbytes for p in self.model().parameters() if p.requires_grad)

    def losses(self, model: nn.Module, rank: int, step: int) -> Iterator[torch.Tensor]:
        """Yield the loss of each pass; their sum is the mean over one rank's rows."""
        passes = 3 if step == self.thrice else 1
        for number in range(passes):
            yield self.loss(model, rank, step, number) / passes

    def loss(self, model: nn.Module, rank: int, step: int, number: int = 0) -> torch.Tensor:
        """Return the mean loss over one rank's rows, in this pass of the step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        x, y = (torch.randn(self.rows, n, generator=generator, dtype=torch.float64) for n in (self.width, OUTPUTS))
        uses = self.uses[step]
        use, x = uses[(rank + number) % len(uses)], x * ((step, rank) not in self.blank)
        return ((model(x, use=use) if use else model(x)) - y - rank).square().mean()

    def train(self, model: nn.Module, backward: Callable[[int], None]) -> dict[str, dict[str, list | None]]:
        """Take each step after `backward(step)`, by SGD with momentum or Adam; return the gradients of all, by name.

        A parameter without gradient is left alone.
        """
        found, memory = {}, {}
        for step in range(len(self.uses)):
            model.zero_grad()
            backward(step)
            gradients = {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in model.named_parameters()}
            found[f"step {step + 1}"] = gradients
            for p in (p for p in model.parameters() if p.grad is not None):
                mean, square = memory.get(p, (0, 0))
                mean, square = 0.9 * mean + (0.1 if self.adam else 1.0) * p.grad, 0.99 * square + 0.01 * p.grad**2
                memory[p] = mean.detach(), square.detach()
                p.data -= RATE * (mean / (square.sqrt() + 1e-3) if self.adam else mean).detach()
        return found


def uneven(world_size: int, rng: Random) -> tuple[tuple, int]:
    """One adapter for one rank only, one for all but one rank, one for none; then others, and one for everybody.

    Returns:
        Two steps, and the rank that alone has an adapter in the second one.
    """
    one, other = rng.sample(range(world_size), 2)
    a, b, c = rng.sample(range(ADAPTERS), 3)
    first = tuple((a,) * (rank == one) + (b,) * (rank != other) for rank in range(world_size))
    second = tuple((b,) * (rank == other) + (c,) for rank in range(world_size))
    return (first, second), other


def gradients(seen: Seen, *steps: int, missing: bool | None = None) -> dict[str, dict[str, list | None]]:
    """View the gradients of these steps, counted from 1.

    Args:
        missing: True looks only at gradients that no rank has, False only at those that some rank has.
    """

    def looked_at(name: str, step: int) -> bool:
        used = {f"adapters.{index}" for of_rank in seen.case.uses[step - 1] for index in of_rank}
        return missing is None or missing == (name.startswith("adapters") and name.rpartition(".")[0] not in used)

    of = {step: seen["gradients"][f"step {step}"] for step in steps}
    return {f"step {n}": {name: g for name, g in of[n].items() if looked_at(name, n)} for n in steps}


def travels(seen: Seen, room: float = ROOM) -> dict[str, str]:
    """View what a rank gives to collectives in each step or backward pass; sums may be given out once more."""
    n_bytes, words = seen.case.n_bytes, {}
    for number, calls in enumerate(seen["sent"]):
        most = max(bytes_of(note["sent"][number]) for note in seen.everyone)
        sent = bytes_of(calls, WHOLE) + max(bytes_of(calls, half) for half in HALVES)
        words[f"pass {number + 1}:"] = "gradients stay here" if most < n_bytes // 2 else "each gradient once"
        words[f"pass {number + 1}:"] = "some gradient twice" if sent > room * n_bytes else words[f"pass {number + 1}:"]
    return words


def sent_in(seen: Seen) -> dict[str, str]:
    """View in which passes a rank gives gradients to collectives, however often."""
    return travels(seen, math.inf)


def bytes_of(calls: list[Call], ops: tuple[str, ...] = ()) -> int:
    """Return the bytes that a rank gave to these collectives, or to all."""
    return sum(call.n_bytes for call in calls if not ops or call.op in ops)
