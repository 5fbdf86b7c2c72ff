"""How does a notebook come by `%%ranks`?

`%load_ext ddp_course` calls the function below. Only then is IPython imported: ranks do without it.

Read next: `magic.py`.
"""

from __future__ import annotations

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext ddp_course`."""
    from ddp_course.launcher.magic import RanksMagic

    shell.register_magic_function(RanksMagic(shell).ranks, "line_cell", "ranks")
