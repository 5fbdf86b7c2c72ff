"""How does a seed become everything that one comparison needs?

A case is a net, the options of its wrapper, and a program: a list of operations, the same on every rank, drawn as two
to five patterns between wrapping and one last forward pass.
Read next: `fuzz_patterns.py`, the operations; `fuzz_nets.py`, the net.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.parallel import fuzz_patterns as patterns
from tests.parallel.fuzz_nets import NetSpec, random_net
from tests.parallel.fuzz_patterns import Op


@dataclass(frozen=True)
class Case:
    """All that a comparison needs: the net, how it is wrapped and trained, and the program.

    With `second`, another wrapped module takes the net's first output on its way to the loss.
    """

    seed: int
    world_size: int
    net: NetSpec
    wrapping: dict[str, Any]
    hook: str
    optimizer: str
    second: bool
    program: tuple[Op, ...]

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.wrapping.items())
        lines = [
            f"seed {self.seed}, W = {self.world_size}",
            f"module: {self.net}",
            f"wrapper: {options}; hook {self.hook}; optimizer {self.optimizer}{'; a second wrapper' * self.second}",
            *(f"  {index:2d} {op}" for index, op in enumerate(self.program)),
        ]
        return "\n".join(lines)


def random_case(seed: int) -> Case:
    """Return what `seed` stands for."""
    rng = random.Random(seed)
    world_size = rng.choice([1, 2, 2, 3, 3])
    find_unused = rng.random() < 0.4
    net = random_net(rng, find_unused)
    wrapping: dict[str, Any] = {
        "find_unused_parameters": find_unused,
        "gradient_as_bucket_view": rng.random() < 0.5,
        "bucket_cap_mb": rng.choice([25, 0.0001, 0.00003]),  # one bucket, buckets of several weights, of about one
    }
    if rng.random() < 0.6:
        wrapping[rng.choice(["broadcast_buffers", "forward_sync_buffers"])] = rng.random() < 0.5
    if rng.random() < 0.1:
        wrapping["process_group"] = "world"
    hook = rng.choice(["none"] * 8 + ["allreduce", "fp16"])
    optimizer = rng.choice(["SGD", "SGD with momentum", "Adam"])
    second = rng.random() < 0.1
    return Case(seed, world_size, net, wrapping, hook, optimizer, second, random_program(rng, net, wrapping))


def random_program(rng: random.Random, net: NetSpec, wrapping: dict[str, Any]) -> tuple[Op, ...]:
    """Draw two to five patterns, in an order of their own, between wrapping and one last forward pass."""
    allowed = patterns.patterns_for(rng, net, wrapping["find_unused_parameters"])
    ops = [patterns.user_hook(rng)] if rng.random() < 0.08 else []
    ops += [Op("wrap")]
    for pattern in rng.choices(list(allowed), list(allowed.values()), k=rng.randint(2, 5)):
        if rng.random() < 0.7:
            ops.append(Op("zero", {"to_none": rng.random() < 0.6}))
        ops += pattern(rng, net)
    return (*ops, patterns.forward(rng))  # which raises if the last reduction has not ended
