"""What can be set about a set of ranks, and what is refused before any process starts?

`RankPool` and `launch` take the fields of `Settings` as keyword arguments, and each rank is given all of them. So a
name, its default and what is wrong with a value stand here and nowhere else.

Read next: `pool.py`, which says what each setting means.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TypeVar

from ddp_course import groups

F = TypeVar("F", bound=Callable)
RANK_BYTES = 100_000_000  # a rank that has imported torch, without what it shares with the others


class _OneSentence(Exception):
    """IPython shows the sentence alone: the mistake is in the call, not in the frames below it."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__bases__[1].__name__}: {self}"]


class WrongValue(_OneSentence, ValueError):
    """An argument has a value that cannot be."""


class WrongType(_OneSentence, TypeError):
    """An argument is of a kind that cannot be."""


@dataclass
class Settings:
    """What one set of ranks has in common.

    Raises:
        ValueError, TypeError: no set of ranks can have these; says which is wrong and what would be right.
    """

    world_size: int
    _: KW_ONLY
    backend: str | None = None
    start_method: str | None = None
    init: bool = True
    rendezvous: str = "file"
    timeout_s: float = 60.0
    quiet: bool | None = None
    header: bool = field(init=False)  # say how many ranks start, and on what
    threads: int = field(init=False)  # of each rank

    def __post_init__(self) -> None:
        _check_world_size(self.world_size)
        notebook = in_notebook()
        self.header = not (notebook if self.quiet is None else self.quiet)
        if self.start_method is None:
            # A script starts ranks once. Its variables may be set after a fork server has started, and copies of one
            # process share its hash seed, which ranks on several machines do not.
            self.start_method = "forkserver" if notebook else "spawn"
        if self.start_method not in ("spawn", "forkserver"):
            raise WrongValue(
                f"start_method={self.start_method!r}: use 'spawn' or 'forkserver'; CUDA and threads do not survive a "
                "fork"
            )
        if self.rendezvous not in ("file", "env"):
            raise WrongValue(
                f"rendezvous={self.rendezvous!r}: use 'file' or 'env'; for 'tcp' call groups.join_group with init=False"
            )
        _check_seconds("timeout_s", self.timeout_s, "the time that a rank may wait in a collective")
        self.backend = groups.choose_backend(self.world_size, self.backend)
        self.threads = max(1, groups.usable_cores() // self.world_size)

    @classmethod
    def of(cls, world_size: int, given: dict) -> Settings:
        """Return the settings that a caller gave as keyword arguments."""
        names = [each.name for each in fields(cls) if each.init][1:]
        if unknown := given.keys() - set(names):
            raise WrongType(f"unexpected keyword argument {min(unknown)!r}; ranks have the settings {', '.join(names)}")
        return cls(world_size, **given)


def takes_settings(function: F) -> F:
    """Show the settings, which `function` takes as `**settings`, where `help` and Shift-Tab look for its arguments."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    settings = [each for each in inspect.signature(Settings).parameters.values() if each.kind is each.KEYWORD_ONLY]
    function.__signature__ = signature.replace(parameters=[*own, *settings])
    return function


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


def check_limit(limit_s: float | None) -> None:
    """Raise TypeError or ValueError for a limit that no call can have."""
    if limit_s is not None:
        _check_seconds("limit_s", limit_s, "the time that a call may take, or None")


def _check_seconds(name: str, value: float, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongType(f"{name} must be a number of seconds, not {value!r}: {what}")
    if not value > 0:
        raise WrongValue(f"{name}={value}: {what} must be more than 0 s")


def _check_world_size(world_size: int) -> None:
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise WrongType(f"world_size must be a whole number of ranks, not {world_size!r}")
    if world_size < 1:
        raise WrongValue(f"world_size={world_size}: a job has at least one rank")
    most = max(64, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // RANK_BYTES)
    if world_size > most:
        raise WrongValue(
            f"world_size={world_size}: a rank is a process of about {RANK_BYTES / 1e6:.0f} MB, so this machine holds "
            f"{most} at most; for more ranks, use more machines and torchrun"
        )
