"""13.1 `train_critic(...)`: do two forward passes of a replica have the gradient of one process?

The critic keeps its last gate in a buffer. DDP's second forward pass writes rank 0's gate over it, and autograd needs
the old one. The judge takes the same steps in one process, on the samples of all ranks.

Read next: `comparing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import equals, exercise, turned
from ddp_course.grading.vocabulary.play import Note, Round, Seen

SAMPLES, WIDTH, RATE = 6, 4, 0.3  # samples of a rank's batch


class Critic(nn.Module):
    """Scores samples; the last gate stays in a buffer, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, WIDTH).double(), nn.Linear(WIDTH, 1).double()
        self.register_buffer("gate", torch.zeros(SAMPLES, WIDTH).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        self.gate = torch.sigmoid(3 * hidden.detach())
        return self.head(hidden * self.gate)


@dataclass(frozen=True)
class Case:
    """The seed of weights and samples, and how many steps there are."""

    seed: int
    steps: int

    def critic(self) -> Critic:
        torch.manual_seed(self.seed)
        return Critic()

    def samples(self, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's batches of real samples, and of generated ones; those of the ranks differ in size."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        shape = (2, self.steps, SAMPLES, 3)
        real, generated = (1 + rank) * torch.randn(shape, generator=generator, dtype=torch.float64)
        return list(real + 1), list(generated)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    critic = case.critic()
    function(rank, world_size, critic, *case.samples(rank), RATE)
    return Note(weights=tasks.weights(critic))


def rounds(rng: Random) -> list[Round]:
    """One process, then several ranks: not two, where half of a gradient has two causes."""
    alone, several = (Case(rng.randint(1, 1000), rng.randint(2, 4)) for _ in range(2))
    return [Round(1, [("alone", alone)]), Round(rng.choice((3, 4)), [("several", several)])]


def scores(critic: Critic, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Score samples; backward takes `gate` in place of the one that forward had."""
    hidden = critic.body(x)
    right = torch.sigmoid(3 * hidden.detach())
    gate = right if gate is None else gate
    return critic.head(hidden * gate + (hidden * (right - gate)).detach())


def trained(seen: Seen, overwritten: bool = False, scale: float = 1.0, kinds: str = "both") -> list[float]:
    """Return the weights after the same steps in one process.

    Args:
        overwritten: whether the backward pass of real samples has rank 0's gate on every rank.
        scale: of the gradient.
        kinds: of samples that count.
    """
    critic, ranks = seen.case.critic(), [seen.case.samples(rank) for rank in range(seen.world_size)]
    for step in range(seen.case.steps):
        first = torch.sigmoid(3 * critic.body(ranks[0][0][step]).detach())
        losses = []
        for real, generated in ranks:
            on_real = softplus(-scores(critic, real[step], first if overwritten else None)).mean()
            on_generated = softplus(scores(critic, generated[step], None)).mean()
            losses.append({"both": on_real + on_generated, "real": on_real, "generated": on_generated}[kinds])
        gradient = torch.autograd.grad(sum(losses) / seen.world_size, list(critic.parameters()))
        tasks.descend(critic, scale * torch.cat([part.flatten() for part in gradient]), RATE)
    return tasks.weights(critic)


OVERWRITTEN = (
    "the second forward pass writes rank 0's gate over the one that the first one's backward pass needs; let a "
    "backward pass follow each forward pass, or score both batches in one forward pass"
)


def slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    """Wrong weights; when the ranks have different ones, no process has done the same."""
    found = seen["weights"]
    if not all(close(seen.of(rank)["weights"], found, 1e-9) for rank in range(seen.world_size)):
        yield "the ranks' weights differ: a backward pass through the replica must average what the step uses", found
    mistakes = {
        OVERWRITTEN: {"overwritten": True},
        "the gradients of the real samples are missing: do not clear them between the two backward passes":
            {"kinds": "generated"},
        "the gradients of the generated samples are missing": {"kinds": "real"},
        "the gradient is half of the right one: add the two means, do not average over both batches": {"scale": 0.5},
        "the gradient is divided by the world size again; DDP has done so": {"scale": 1 / seen.world_size},
        "the gradients are summed over the ranks; DDP averages": {"scale": float(seen.world_size)},
    }  # fmt: skip
    yield from turned(trained, mistakes)(seen)


weights = equals(
    lambda seen, right: f"weights {short(right)}: those of one process on the samples of all ranks",
    trained,
    slips,
    "the gradient of a step is that of both losses, each a mean over the samples of all ranks",
    of="weights",
    tolerance=1e-9,
)


FORWARDS = exercise(
    "13.1",
    "Find the two forwards",
    "train_critic",
    25,
    act=act,
    rounds=rounds,
    checks={
        "alone": ("one rank has the weights of one process", 1, weights, "alone"),
        "several": ("several ranks have them, too", 4, weights, "several"),
    },
    hints={"modified by an inplace operation": OVERWRITTEN},
)
