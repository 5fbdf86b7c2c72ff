"""What the tests of the strategies run on ranks, and the model they train. Ranks import this file."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from ddp_course.beyond import one_process
from ddp_course.grading.vocabulary.observe import Collectives

ROWS, STEPS = 24, 5
TOLERANCE = 1e-12  # in float64; not zero, since sums over rows are taken in another order


def network(seed: int = 0) -> nn.Sequential:
    """Four layers: hidden widths that 2, 3 and 4 divide, 5 inputs and 3 classes that they do not."""
    torch.manual_seed(seed)
    sizes = [5, 12, 24, 12, 3]
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def rows(number: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their classes, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (number,), generator=generator)


def alone() -> one_process.Trained:
    """What one process comes out at."""
    return one_process.train_steps(network(), *rows(), steps=STEPS)


def trained(rank: int, world_size: int, strategy: str, options: dict) -> one_process.Trained:
    """Train by one of the strategies."""
    module = import_module(f"ddp_course.beyond.{strategy}")
    return module.train_steps(rank, world_size, network(), *rows(), steps=STEPS, **options)


def collectives(rank: int, world_size: int, strategy: str, options: dict) -> list[tuple[str, int]]:
    """Return what a single step runs, and its bytes, in order; with what comes before and after."""
    module = import_module(f"ddp_course.beyond.{strategy}")
    with Collectives() as seen:
        module.train_steps(rank, world_size, network(), *rows(), steps=1, **options)
    return [(call.op, call.n_bytes) for call in seen.calls]


def off_by(found: one_process.Trained, expected: one_process.Trained) -> float:
    """Return the largest difference in a parameter or a loss."""
    assert list(found.parameters) == list(expected.parameters)
    differences = [(found.parameters[name] - value).abs().max().item() for name, value in expected.parameters.items()]
    return max(*differences, *(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)))
