"""How is a batch handled that is a tuple of dicts of tensors?

A model's inputs and outputs may nest. These functions walk through tuples, lists and dicts, named tuples included, so
that the code that cuts and joins sees tensors only; and from an output's tensors back to the parameters behind them.

Left out on purpose: containers of other types, which count as leaves.
Read next: `data_parallel.py`, which cuts inputs and joins outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def map_leaves(fn: Callable, *trees: Any) -> Any:
    """Apply `fn` to the leaves that stand at the same place in all `trees`, and keep the structure of the first.

    Raises:
        ValueError: two trees differ in type, length or keys; names the tree as a replica's output.
    """
    first = trees[0]
    if isinstance(first, (tuple, list, dict)):
        for number, tree in enumerate(trees):
            same_keys = not isinstance(first, dict) or (isinstance(tree, dict) and tree.keys() == first.keys())
            if type(tree) is not type(first) or len(tree) != len(first) or not same_keys:
                raise ValueError(f"replica {number} returned {_shape(tree)}, replica 0 {_shape(first)}: return alike")
    if isinstance(first, dict):
        return type(first)((key, map_leaves(fn, *(tree[key] for tree in trees))) for key in first)
    if isinstance(first, (tuple, list)):
        parts = [map_leaves(fn, *at_place) for at_place in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)  # _fields: a named tuple
    return fn(*trees)


def parameters_behind(outputs: Any) -> set[nn.Parameter]:
    """Return the leaves that autograd would reach from the tensors in `outputs`, which may be nested."""
    found, seen = set(), set()
    nodes = [leaf.grad_fn for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad, where a path ends
            found.add(node.variable)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return found


def _shape(tree: Any) -> str:
    if not isinstance(tree, (tuple, list, dict)):
        return f"a {type(tree).__name__}"
    return f"a {type(tree).__name__} with {list(tree) if isinstance(tree, dict) else len(tree)}"
