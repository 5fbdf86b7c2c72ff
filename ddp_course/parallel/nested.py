"""Which parameters are behind an output that is a tuple of dicts of tensors?

A model's outputs may nest. These functions walk through tuples, lists, dicts and dataclasses, and from an output's
tensors back to the parameters behind them.

Left out on purpose: containers of other types, which count as leaves.
Read next: `ddp.py`, which asks for the parameters that a forward pass did not use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in `tree` and is no tuple, list, dict or dataclass, from left to right."""
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    elif is_dataclass(tree):
        yield from leaves(vars(tree))
    else:
        yield tree


def parameters_behind(outputs: Any) -> set[nn.Parameter]:
    """Return the parameters that autograd would reach from what has computed the tensors in `outputs`."""
    found, seen = set(), set()
    nodes = [leaf.grad_fn for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:  # with residual connections there are 2^L paths through L blocks; each node is walked once
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad, where a path ends, and where `grad_bucket.py` hangs its hook
            found.add(node.variable)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return found
