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
Read next: `cell.py`, what a rank does with it.
"""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ddp_course.launcher.cell import run_cell
from ddp_course.launcher.pool import RankPool

TIMEOUT = "how long a rank may wait for the others in one collective (default: 60)"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("'\"").split(",") if name.strip()]


class RanksMagic:
    """The `%ranks` and `%%ranks` magics, with the one pool they share."""

    def __init__(self, shell: Any):
        self.shell = shell
        self.pool: RankPool | None = None
        self.cells = 0

    @magic_arguments()
    @argument("what", nargs="?", help="how many ranks (default: those that are up), or 'stop', in a line of its own")
    @argument(
        "--backend", choices=("nccl", "gloo"), default=SUPPRESS, help="default: NCCL if each has a GPU, else gloo"
    )
    @argument("--timeout", type=float, default=SUPPRESS, dest="timeout_s", metavar="SECONDS", help=TIMEOUT)
    @argument("--push", type=_names, default=[], metavar="NAMES", help="first copy these variables to every rank")
    @argument("--pull", type=_names, default=[], metavar="NAMES", help="afterwards, list the ranks' variables by rank")
    def ranks(self, line: str, cell: str | None = None) -> None:
        """Run the cell on every rank; `%%ranks N` starts N of them, which stay alive and keep their variables.

        On each rank there are `rank`, `world_size`, `device`, `torch` and `dist`. NAMES are separated by commas. An
        example: two ranks add up, and the notebook then has total = [3.0, 3.0].

            %%ranks 2 --pull total
            mine = torch.tensor([rank + 1.0])
            dist.all_reduce(mine)
            total = mine.item()

        In a line of its own, `%ranks` says what is running, and `%ranks stop` ends it.
        """
        options = parse_argstring(self.ranks, line.partition("#")[0])
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
            raise UsageError(f"%ranks {what}: use `%ranks` or `%ranks stop`; `%%ranks {what}` starts ranks for a cell")
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
            raise UsageError("no ranks are up: say how many, such as %%ranks 2")
        self.pool = None
        given = {name: value for name, value in vars(options).items() if name in ("backend", "timeout_s")}
        self.pool = RankPool(wanted, **given)

    @staticmethod
    def world_size(what: str | None) -> int | None:
        if what is None:
            return None
        if not what.isdigit():
            raise UsageError(f"%%ranks {what}: expected a number of ranks, such as %%ranks 2")
        return int(what)

    def of_notebook(self, name: str) -> Any:
        if name not in self.shell.user_ns:
            raise UsageError(f"%%ranks --push {name}: the notebook has no variable {name}")
        return self.shell.user_ns[name]
