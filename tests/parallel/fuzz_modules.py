"""Which module does a description of the fuzz stand for?

One small class for each kind of block that torch has no layer for, and `Net`, which puts blocks and heads together.
Read first: `fuzz_nets.py`, the description.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.fuzz_nets import Block, NetSpec

WIDTH, OUT = 4, 2

Pair = namedtuple("Pair", "outputs extra")


@dataclass
class Outcome:
    """Outputs in a class of the user's own."""

    outputs: list
    extra: Any


class Permuted(nn.Module):
    """A weight whose memory is dense, but not in the order of its dimensions."""

    def __init__(self):
        super().__init__()
        self.weight_OKI = nn.Parameter(torch.empty(2, WIDTH, WIDTH).permute(2, 0, 1))

    def forward(self, x):
        return torch.einsum("ni,oki->no", x, self.weight_OKI)


class Strided(nn.Module):
    """A weight with gaps in its memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 2 * WIDTH)[:, ::2])

    def forward(self, x):
        return x @ self.weight


class Scalars(nn.Module):
    """Two parameters without dimensions, in a list."""

    def __init__(self):
        super().__init__()
        self.both = nn.ParameterList([nn.Parameter(torch.empty(())) for _ in range(2)])

    def forward(self, x):
        return x * self.both[0] + self.both[1]


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.register_parameter("missing", None)

    def forward(self, x):
        return x + self.nothing.sum()


class Counter(nn.Module):
    """Buffers: an integer one, one that is written in place, one that is replaced, one that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.zeros(WIDTH))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0).to(self.mean.dtype))
            self.replaced = 0.9 * self.replaced + 0.1 * self.mean
        return x * (1 + self.replaced) + self.unsaved


class Rows(nn.Module):
    """A table from which every pass takes a few rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x):
        return x + self.table(torch.arange(len(x)) % 3)


def build_block(block: Block) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH, bias=block.tied_to is None)
    return {
        "linear": linear,
        "mlp": nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, WIDTH))),
        "permuted": Permuted(),
        "strided": Strided(),
        "scalars": Scalars(),
        "empty": Empty(),
        "norm": nn.LayerNorm(WIDTH),
        "batchnorm": nn.BatchNorm1d(WIDTH),
        "dropout": nn.Dropout(0.3),
        "counter": Counter(),
        "rows": Rows(),
    }[block.kind].to(getattr(torch, block.dtype))


class Net(nn.Module):
    """The module that a `NetSpec` describes, with values of its own on every rank."""

    def __init__(self, spec: NetSpec, rank: int):
        super().__init__()
        self.spec, self.rank = spec, rank
        self.blocks = nn.ModuleList(map(build_block, spec.blocks))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, OUT) for _ in range(spec.heads)).to(getattr(torch, spec.dtype))
        for block, module in zip(spec.blocks, self.blocks, strict=True):
            if block.tied_to is not None:
                module.weight = self.blocks[block.tied_to].weight
        for block, module in zip(spec.blocks, self.blocks, strict=True):
            if block.frozen:
                module.requires_grad_(False)
        fill(self, seed=rank)

    @staticmethod
    def rows_of(inputs: Any) -> torch.Tensor:
        """The batch, which comes as a tensor or nested in a dict."""
        return inputs["batch"][0] if isinstance(inputs, dict) else inputs

    def forward(self, x, step=0, *, fails=False, **ignored):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.autocast):
            x = self.rows_of(x)
            for block, module in zip(self.spec.blocks, self.blocks, strict=True):
                if self.uses(block, step):
                    x = self.through(block, module, x.to(getattr(torch, block.dtype)))
            if fails:
                raise ArithmeticError("on purpose, on every rank")
            x = x.to(getattr(torch, self.spec.dtype))
            return contained(self.spec.container, [head(x) for head in self.heads], x.detach().sum())

    def uses(self, block: Block, step: int) -> bool:
        at = {"always": True, "never": False, "even": step % 2 == 0}
        return {**at, "rank 0": self.rank == 0, "not rank 0": self.rank != 0}[block.used]

    @staticmethod
    def through(block: Block, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + block.twice):
            if block.checkpoint and torch.is_grad_enabled():
                x = checkpoint(module, x, use_reentrant=block.checkpoint == "reentrant")
            else:
                x = module(x)
            x = torch.tanh(x)
        return x


def fill(module: nn.Module, seed: int) -> None:
    """Give every parameter and buffer values that follow from `seed`; strides and identity stay."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
        for buffer in module.buffers():
            values = torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.5  # a variance is positive
            buffer.copy_(values if buffer.is_floating_point() else (values * 10).long())


def contained(container: str, outputs: list[torch.Tensor], extra: torch.Tensor) -> Any:
    """Put the outputs in a container, most with a tensor that needs no gradient."""
    return {
        "tensor": outputs[0],
        "tuple": tuple(outputs),
        "dict": {"extra": extra, **{f"head {i}": output for i, output in enumerate(outputs)}},
        "named tuple": Pair(outputs, extra),
        "dataclass": Outcome(outputs, extra),
        "nested": {"first": (outputs[0], [extra, None, "text"]), "rest": [{"head": output} for output in outputs[1:]]},
    }[container]


def outputs_in(result: Any) -> list[torch.Tensor]:
    """The heads' outputs, in order, whatever container they came in."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Pair | Outcome):
        return list(result.outputs)
    if isinstance(result, tuple):
        return list(result)
    if "first" in result:
        return [result["first"][0], *(one["head"] for one in result["rest"])]
    return [output for name, output in result.items() if name != "extra"]
