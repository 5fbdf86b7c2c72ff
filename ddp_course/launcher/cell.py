"""How does a whole cell run on a rank?

A rank runs the cell's text in its own `__main__`, so that what one cell assigns is there in the next.

Read next: `magic.py`, which sends the cells.
"""

from __future__ import annotations

import ast
import linecache
import sys
from typing import Any

import torch
import torch.distributed as dist

from ddp_course import groups


def run_cell(
    rank: int, world_size: int, source: str, number: int, pushed: dict[str, Any], pull: list[str]
) -> tuple[str | None, dict[str, Any]]:
    """Run a cell in this rank's `__main__`, and return its last value as text and the variables asked for.

    Collective: whatever the cell calls.
    """
    space = vars(sys.modules["__main__"])
    space.update(rank=rank, world_size=world_size, device=groups.my_device(), torch=torch, dist=dist, **pushed)
    filename = f"<ranks cell {number}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), space)
    value = eval(compile(ast.Expression(last.value), filename, "eval"), space) if last else None
    return None if value is None else repr(value), {name: space[name] for name in pull}
