"""How do I run a whole cell on N ranks?

`%%ranks 4` runs its cell on four ranks that stay alive. What one such cell assigns is there in the next, on
each rank its own. The value of the last line is shown by rank.

    %load_ext ddp_course
    %%ranks 4               start four ranks, run the cell on each
    %%ranks                 run the cell on the same ranks
    %%ranks --push lr       copy the notebook's `lr` to every rank first
    %%ranks --pull loss     afterwards make `loss` the list of the ranks' own
    %ranks                  say what is running; `%ranks stop` ends it

Left out on purpose: `await` at the top of a cell.
Read next: `call.py`, what happens while the cell runs.
"""

from __future__ import annotations

import ast
import linecache
import shlex
import sys
from argparse import ArgumentParser, Namespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddp_course import groups
from ddp_course.launcher.pool import RankPool


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext ddp_course`."""
    shell.register_magic_function(RanksMagic(shell).ranks, "line_cell", "ranks")


def _refuse(message: str) -> NoReturn:
    from IPython.core.error import UsageError  # here, since ranks do without IPython

    raise UsageError(message)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would end the kernel
        _refuse(f"%%ranks: {message}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class RanksMagic:
    """The `%ranks` and `%%ranks` magics, with the one pool they share."""

    start_method = "spawn"

    def __init__(self, shell: Any):
        self.shell = shell
        self.pool: RankPool | None = None
        self.cells = 0
        parser = _Parser(prog="%%ranks", add_help=False)
        parser.add_argument("what", nargs="?", help="how many ranks, or 'stop'")
        parser.add_argument("--backend", choices=("nccl", "gloo"))
        parser.add_argument("--timeout", type=float, default=60.0, help="seconds a rank may wait in a collective")
        parser.add_argument("--push", type=_names, default=[], metavar="NAMES")
        parser.add_argument("--pull", type=_names, default=[], metavar="NAMES")
        self.parser = parser

    def ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on every rank; `%%ranks N` starts N of them."""
        options = self.parser.parse_args(shlex.split(line.partition("#")[0]))
        if cell is None:
            return self.manage(options.what)
        self.start_if_needed(options)
        pushed = {name: self.of_notebook(name) for name in options.push}
        self.cells += 1
        shown, pulled = zip(*self.pool.run(run_cell, (cell, self.cells, pushed, options.pull)), strict=True)
        self.shell.user_ns.update({name: [values[name] for values in pulled] for name in options.pull})
        for rank, text in enumerate(shown):
            if text is not None:
                # Later lines of a value, such as a matrix's rows, stand below its first.
                print(f"rank {rank} → " + text.replace("\n", f"\n{' ' * len(f'rank {rank} → ')}"))

    def manage(self, what: str | None) -> None:
        if what == "stop":
            if self.pool:
                self.pool.close()
            self.pool = None
        elif what is not None:
            _refuse(f"%ranks {what}: use `%ranks` or `%ranks stop`; `%%ranks {what}` starts ranks for a cell")
        up = self.pool is not None and self.pool.alive
        print(f"{self.pool.world_size} ranks are up" if up else "the ranks have ended" if what else "no ranks are up")

    def start_if_needed(self, options: Namespace) -> None:
        """Start ranks when there are none, or when another number of them is asked for."""
        wanted = self.world_size(options.what)
        if self.pool and self.pool.alive and wanted in (None, self.pool.world_size):
            return
        if self.pool and not self.pool.alive:
            print("the ranks had ended: new ones start, without the old ones' variables")
        if self.pool:
            wanted = wanted or self.pool.world_size
            self.pool.close()
        if wanted is None:
            _refuse("no ranks are up: say how many, such as %%ranks 2")
        self.pool = None
        self.pool = RankPool(wanted, backend=options.backend, timeout_s=options.timeout, start_method=self.start_method)

    @staticmethod
    def world_size(what: str | None) -> int | None:
        if what is None:
            return None
        if not what.isdigit():
            _refuse(f"%%ranks {what}: expected a number of ranks, such as %%ranks 2")
        return int(what)

    def of_notebook(self, name: str) -> Any:
        if name not in self.shell.user_ns:
            _refuse(f"%%ranks --push {name}: the notebook has no variable {name}")
        return self.shell.user_ns[name]


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
