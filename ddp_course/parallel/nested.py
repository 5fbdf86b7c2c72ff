"""How is a batch handled that is a tuple of dicts of tensors?

A model's inputs and outputs may nest. These two functions walk through tuples, lists and dicts, named tuples
included, so that the code that cuts and joins sees tensors only.

Left out on purpose: containers of other types, which count as leaves.
Read next: `data_parallel.py`, which cuts inputs and joins outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what is in `tree` and is no tuple, list or dict, from left to right."""
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
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


def _shape(tree: Any) -> str:
    if not isinstance(tree, (tuple, list, dict)):
        return f"a {type(tree).__name__}"
    return f"a {type(tree).__name__} with {list(tree) if isinstance(tree, dict) else len(tree)}"
