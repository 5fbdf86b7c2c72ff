"""How does a seed become the description of a module?

A net is a chain of small blocks, four features wide, then one to three heads. What may trouble a wrapper for data
parallelism sits in the blocks and around them: weights that are tied, frozen, unused, empty or laid out unusually,
buffers that are written or replaced, several dtypes, recomputed activations, outputs in containers. A net is described
by data alone, so it can be printed, made smaller and built again, on every rank and for both wrappers.
Read next: `fuzz_modules.py`, the module; `fuzz_patterns.py`, what is done with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

WITH_BUFFERS = ("batchnorm", "counter")
KINDS = ("linear", "linear", "mlp", "permuted", "strided", "scalars", "empty", "norm", "dropout", "rows", *WITH_BUFFERS)
CONTAINERS = ("tensor", "tuple", "dict", "named tuple", "dataclass", "nested")


@dataclass(frozen=True)
class Block:
    """One step of the chain.

    Args:
        used: "always", "never", "even" (in even steps), "rank 0" or "not rank 0".
        twice: called two times in one forward pass.
        checkpoint: "", "reentrant" or "not reentrant".
        tied_to: the index of an earlier linear block whose weight it shares.
    """

    kind: str
    dtype: str = "float64"
    frozen: bool = False
    used: str = "always"
    twice: bool = False
    checkpoint: str = ""
    tied_to: int | None = None

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[2:] if getattr(self, f.name) != f.default]
        return f"{self.kind}({', '.join([self.dtype, *said])})"


@dataclass(frozen=True)
class NetSpec:
    """A whole net: `heads` outputs of which the loss leaves out `outside_loss`; `apart`: heads that share no trunk."""

    blocks: tuple[Block, ...]
    heads: int = 1
    apart: bool = False
    container: str = "tensor"
    outside_loss: tuple[int, ...] = ()
    dtype: str = "float64"
    autocast: bool = False

    def __str__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return f"{' -> '.join(map(str, self.blocks))}; {', '.join(said) or 'one head'}"

    @property
    def by_rank(self) -> bool:
        return any("rank" in block.used for block in self.blocks)

    @property
    def all_take_part(self) -> bool:
        """Whether every pass over all outputs gives every trainable parameter a gradient, on every rank."""
        return all(block.used == "always" for block in self.blocks) and not self.outside_loss


def random_net(rng: random.Random, find_unused: bool) -> NetSpec:
    """Draw a net; parts that take no part in the loss are frequent only where unused parameters are looked for."""
    dtype = rng.choice(["float64", "float64", "float32"])
    heads = rng.choice([1, 1, 2, 3])
    some_unused = rng.random() < (0.7 if find_unused else 0.06)
    blocks: list[Block] = []
    for _ in range(rng.randint(1, 5)):
        blocks.append(random_block(rng, blocks, dtype, find_unused, some_unused))
    container = rng.choice(CONTAINERS if heads == 1 else CONTAINERS[1:])
    outside = tuple(head for head in range(1, heads) if some_unused and rng.random() < 0.4)
    autocast = dtype == "float32" and rng.random() < 0.3
    # Without a trunk, backward passes over single outputs share no parameter.
    apart = heads > 1 and not find_unused and not some_unused and rng.random() < 0.3
    return NetSpec(() if apart else tuple(blocks), heads, apart, container, outside, dtype, autocast)


def random_block(rng: random.Random, before: list[Block], dtype: str, find_unused: bool, some_unused: bool) -> Block:
    kind = rng.choice(KINDS if rng.random() < 0.9 else WITH_BUFFERS)
    if rng.random() < 0.15:
        dtype = rng.choice(["float64", "float32", "bfloat16"])
    used = "always"
    if some_unused and rng.random() < 0.5:
        used = rng.choice(["never", "even", "rank 0", "not rank 0"] if find_unused else ["never", "even"])
    twice = rng.random() < 0.15
    # torch supports reentrant checkpoints of parts that are used once and lie behind something that is trained.
    way = rng.choice(["not reentrant", "not reentrant", "reentrant"]) if rng.random() < 0.2 else ""
    behind_trained = any(b.kind == "linear" and not b.frozen and b.used == "always" for b in before)
    if way == "reentrant" and (find_unused or twice or some_unused or not behind_trained):
        way = ""
    linears = [i for i, b in enumerate(before) if (b.kind, b.dtype, b.tied_to) == ("linear", dtype, None)]
    tied_to = (
        rng.choice(linears) if kind == "linear" and linears and way != "reentrant" and rng.random() < 0.5 else None
    )
    if tied_to is not None and before[tied_to].checkpoint == "reentrant":
        tied_to = None
    return Block(kind, dtype, rng.random() < 0.15, used, twice, way, tied_to)
