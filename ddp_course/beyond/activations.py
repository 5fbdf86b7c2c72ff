"""What does one rank keep between forward and backward?

Backward needs what forward computed. For a small model this is counted: autograd says which tensors it saves. For
a large transformer it is worked out from its shape, layer by layer. Both give a tuple of `Unit`, parts of the model
in the order of forward, and `memory.py` lets a strategy divide them.

Left out on purpose: dropout, whose masks add 2 bytes in 34 to a block, and sequence parallelism, which divides the
rest of a block's activations as well.
Read next: `memory.py`.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1 and equations 1 to 3. The paper's 34 s b h are with
dropout and 2-byte numbers; the terms below are its terms without the masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Unit", "checkpointed", "counted", "shape_of", "transformer"]

REST = "rest"  # the unit of what stands in no other


@dataclass(frozen=True)
class Unit:
    """A part of the model that is gathered, recomputed or placed as one: the embedding, a block, the head.

    All bytes are for the rows of one rank, before any strategy divides them.
    """

    name: str
    tensors: tuple[int, ...]  # elements of each parameter
    kept: float  # bytes saved for backward that tensor parallelism leaves whole
    split: float  # bytes saved for backward that tensor parallelism divides
    working: float  # bytes that live only while this unit's backward runs
    output: float  # bytes of what it hands to the next unit
    reduced: float = 0.0  # bytes that one forward pass gives to all-reduces under tensor parallelism
    scratch: float = 0.0  # bytes that forward needs at its widest place and does not save
    shared: int = 0  # elements of weights that an earlier unit owns (tied): their gradient begins here

    @property
    def parameters(self) -> int:
        """Elements of all its parameters."""
        return sum(self.tensors)

    @property
    def saved(self) -> float:
        """Bytes saved for backward on one rank, if nothing divides them."""
        return self.kept + self.split


def transformer(
    layers: int,
    hidden: int,
    sequence: int,
    rows: int,
    vocabulary: int,
    *,
    heads: int | None = None,
    element: int = 2,
    stream: int | None = None,
    flash: bool = True,
) -> tuple[Unit, ...]:
    """Return the units of a GPT-2-shaped model: embedding, `layers` blocks, head (tied to the embedding).

    Args:
        layers, hidden, vocabulary: its shape; the inner layer of a block is 4 times `hidden` wide.
        sequence, rows: tokens in a row, rows of one rank.
        heads: attention heads; `hidden` / 128 without it. They matter only without `flash`.
        element: bytes of one activation.
        stream: bytes of one number between the blocks, if not `element`: autocast adds up in float32.
        flash: attention does not keep its matrix of sequence x sequence (scaled_dot_product_attention).
    """
    tokens = sequence * rows
    sizes = _Sizes(tokens, hidden, vocabulary, element, tokens * hidden * (stream or element))
    embedding = Unit("embedding", (vocabulary * hidden, sequence * hidden), 8.0 * tokens, 0, 0, sizes.between)
    block = _block(sizes, heads or max(1, hidden // 128), 0 if flash else sequence)
    return (embedding, *(replace(block, name=f"block {i}") for i in range(layers)), _head(sizes))


@dataclass(frozen=True)
class _Sizes:
    tokens: int
    hidden: int
    vocabulary: int
    element: int  # bytes of one activation
    between: int  # bytes of what one block hands to the next

    @property
    def plain(self) -> int:
        """Bytes of `hidden` activations for each token."""
        return self.tokens * self.hidden * self.element


def _block(sizes: _Sizes, heads: int, matrix_width: int) -> Unit:
    h, tokens, plain, between = sizes.hidden, sizes.tokens, sizes.plain, sizes.between
    matrix = 2 * heads * matrix_width * tokens * sizes.element  # the scores' softmax, and its copy
    norms = 16.0 * tokens  # mean and deviation of each token in float32, for two norms
    logsumexp = 0.0 if matrix_width else 4.0 * tokens * heads  # what flash attention keeps in place of the matrix
    # Kept whole: the inputs of both norms, and of the two layers that follow them. Divided: queries, keys, values and
    # the attention's result (4), and twice 4 h around the activation function.
    return Unit(
        "block",
        (3 * h * h, 3 * h, h * h, h, 4 * h * h, 4 * h, 4 * h * h, h, h, h, h, h),
        kept=2 * between + 2 * plain + norms,
        split=12 * plain + matrix + logsumexp,
        working=9 * plain + matrix,
        output=between,
        reduced=2 * plain,
    )


def _head(sizes: _Sizes) -> Unit:
    scores = sizes.tokens * sizes.vocabulary
    # The loss is computed in float32: the log-softmax is saved, and backward makes a gradient of the same size, which
    # goes back in the compute type. The weights are the embedding's: they are not counted twice.
    return Unit(
        "head",
        (sizes.hidden, sizes.hidden),
        kept=sizes.between + sizes.plain + 8.0 * sizes.tokens,
        split=4.0 * scores,
        working=(4.0 + (sizes.element if sizes.element < 4 else 0)) * scores,
        output=0,
        scratch=4.0 * scores,
        shared=sizes.vocabulary * sizes.hidden,
    )


def shape_of(parameters: float, vocabulary: int = 50257) -> tuple[int, int]:
    """Guess layers and width of a transformer with so many parameters: a block holds 12 h^2, and h is 128 times
    the layers, as in GPT-3 13B and LLaMA 7B, rounded to whole heads of 128."""
    low, high = 1.0, 1e6
    while high - low > 0.5:  # 12 h^2 h/128 + vocabulary h grows with h
        h = (low + high) / 2
        low, high = (h, high) if 12 * h**3 / 128 + vocabulary * h < parameters else (low, h)
    hidden = max(128, round(low / 128) * 128)
    layers = max(1, round((parameters - vocabulary * hidden) / (12 * hidden * hidden)))
    return layers, hidden


def checkpointed(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """The same with recomputation: a block keeps its input only, and computes the rest again in its backward."""
    return tuple(
        replace(unit, kept=unit.output, split=0.0, working=unit.working + unit.saved - unit.output, scratch=unit.saved)
        if unit.name.startswith("block")
        else unit
        for unit in units
    )


def counted(
    model: nn.Module, parts: Sequence[tuple[str, nn.Module]], inputs: torch.Tensor, loss_of: Callable
) -> tuple[Unit, ...]:
    """Count what autograd saves in one forward pass, unit by unit.

    A tensor counts once, with the bytes of its storage, for the first unit that saves it. Parameters do not count.
    Parameters of `model` outside `parts` become a unit of their own at the end, with all that is saved outside.

    Args:
        parts: name and module of each unit, in the order of forward.
        inputs: one rank's rows.
        loss_of: loss from the model's output.
    """
    saved = _Saved({p.untyped_storage().data_ptr() for p in model.parameters()})
    hooks = [hook for name, module in parts for hook in saved.watch(name, module)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            loss_of(model(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    taken: set[int] = set()
    units = []
    for name, module in [*parts, (REST, model)]:
        own = [p for p in module.parameters() if id(p) not in taken]
        taken |= {id(p) for p in own}
        bytes_saved, output = saved.by_unit[name], saved.outputs.get(name, 0)
        largest = max([*bytes_saved, output])
        units.append(Unit(name, tuple(p.numel() for p in own), sum(bytes_saved), 0, 2 * largest, output))
    return tuple(unit for unit in units if unit.tensors or unit.kept)


class _Saved:
    """What autograd saves while forward runs, by the unit in which it is saved."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters = parameters  # the places of their storages
        self.seen: dict[int, torch.UntypedStorage] = {}  # held, so that no other tensor takes the same place
        self.by_unit: dict[str, list[int]] = defaultdict(list)  # bytes
        self.outputs: dict[str, int] = {}  # bytes
        self.inside = [REST]

    def watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Note when forward is inside `module`, and what it returns."""

        def leave(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            self.inside.pop()
            self.outputs[name] = output.nbytes

        enter = module.register_forward_pre_hook(lambda *_: self.inside.append(name))
        return [enter, module.register_forward_hook(leave)]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in self.parameters and place not in self.seen:
            self.seen[place] = storage
            self.by_unit[self.inside[-1]].append(storage.nbytes())
        return tensor
