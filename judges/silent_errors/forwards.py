"""13.1 `train_critic(...)`: do two forward passes of a replica have the gradient of one process?

The critic keeps its last gate in a buffer. DDP's second forward pass writes rank 0's gate over it, and autograd needs
the old one. Read next: `comparing.py`.
"""

from __future__ import annotations

from random import Random

import torch
from torch import nn

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

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


def cases(rng: Random) -> list[Round]:
    """One process, then several ranks: not two, where half of a gradient has two causes. A seed, and how many steps."""
    alone, several = ((rng.randint(1, 1000), rng.randint(2, 4)) for _ in range(2))
    return [Round(1, [("alone", alone)]), Round(rng.choice((3, 4)), [("several", several)])]


def samples(seed: int, steps: int, rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a rank's batches of real samples, and of generated ones; those of the ranks differ in size."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    real, generated = (1 + rank) * torch.randn((2, steps, SAMPLES, 3), generator=generator, dtype=torch.float64)
    return list(real + 1), list(generated)


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    torch.manual_seed(case[0])
    critic = Critic()
    function(rank, world_size, critic, *samples(*case, rank), RATE)
    return Note(weights=tasks.weights(critic))


def weights(seen: Seen) -> dict[str, list[float]]:
    return {"weight": seen["weights"]}


OVERWRITTEN = (
    "the second forward pass writes rank 0's gate over the one that the first one's backward pass needs; let a "
    "backward pass follow each forward pass, or score both batches in one forward pass"
)

MISTAKES = """
two forward passes, one backward pass | several
| the second forward pass writes rank 0's gate over the one that the first one's backward pass needs
    replica(torch.cat([x, z])).split(len(x)) => replica(x), replica(z)
the bare model | several
| the ranks' weights differ: a backward pass through the replica must average what the step uses
    replica(torch.cat => critic(torch.cat
divided again | several | the gradient is divided by the world size again; DDP has done so
    loss.backward() => (loss / world_size).backward()
summed | several | the gradients are summed over the ranks; DDP averages
    loss.backward() => (loss * world_size).backward()
one mean over both batches | alone several
| the gradient is half of the right one: add the two means, do not average over both batches
    softplus(-on_real).mean() + softplus(on_generated).mean() => softplus(torch.cat([-on_real, on_generated])).mean()
cleared between two backward passes | alone several
| the gradients of the real samples are missing: do not clear them between the two backward passes
    loss = softplus(-on_real).mean() + => loss =
the generated samples do not count | alone several | the gradients of the generated samples are missing
    + softplus(on_generated).mean() =>
the same on rank 0's samples only | several | the loss of this rank's samples must count on every rank
    loss.backward() => (loss * (rank == 0)).backward()
two backward passes, no average at all | several | must average what the step uses | tests
    def train_critic(rank, world_size, critic, real, generated, rate):
        replica = DistributedDataParallel(critic)
        optimizer = torch.optim.SGD(critic.parameters(), lr=rate)
        for x, z in zip(real, generated):
            optimizer.zero_grad()
            with replica.no_sync():
                softplus(-replica(x)).mean().backward()
                softplus(replica(z)).mean().backward()
            optimizer.step()
a step for each batch | alone several | the gradient of a step is that of both losses | tests
    def train_critic(rank, world_size, critic, real, generated, rate):
        replica = DistributedDataParallel(critic)
        optimizer = torch.optim.SGD(critic.parameters(), lr=rate)
        for x, z in zip(real, generated):
            for signed, sign in ((x, -1), (z, 1)):
                optimizer.zero_grad()
                softplus(sign * replica(signed)).mean().backward()
                optimizer.step()
"""

RIGHT = """
two backward passes, one average
    def train_critic(rank, world_size, critic, real, generated, rate):
        replica = DistributedDataParallel(critic)
        optimizer = torch.optim.SGD(critic.parameters(), lr=rate)
        for x, z in zip(real, generated):
            optimizer.zero_grad()
            with replica.no_sync():
                softplus(-replica(x)).mean().backward()
            softplus(replica(z)).mean().backward()
            optimizer.step()
buffers are not broadcast
    DistributedDataParallel(critic) => DistributedDataParallel(critic, broadcast_buffers=False)
    replica(torch.cat([x, z])).split(len(x)) => replica(x), replica(z)
"""

BOTH = "the gradient of a step is that of both losses, each a mean over the samples of all ranks"

FORWARDS = exercise(
    *("13.1", "Find the silent error", "train_critic", 25),
    cases=cases,
    act=act,
    said=lambda seen: f"one process on the samples of {seen.world_size} ranks has",
    tolerance=1e-9,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "alone": ("one rank has the weights of one process", 1, "alone", weights, BOTH),
        "several": ("several ranks have them, too", 4, "several", weights, BOTH),
    },
    hints={"modified by an inplace operation": OVERWRITTEN},
)
