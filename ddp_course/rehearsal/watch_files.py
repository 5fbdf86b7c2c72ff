"""What does a rank's program save, load, write, look for and print?

Rank 0's save takes a moment here, so that a rank which does not wait for it is seen.
Read next: `rehearse_files.py`, which reads these notes of all ranks.
"""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_course.rehearsal.notes import Writer, around

SAVE_TAKES_S = 0.4
# Files of libraries, which are not the program's results.
NOT_RESULTS = ("/dev/", "/proc/", "/sys/", sys.prefix, str(Path.home() / ".cache"), str(Path.home() / ".config"))


class FilesWatch:
    """The eyes of one rank for files and prints.

    Args:
        saved: called after each save.
    """

    def __init__(self, writer: Writer, rank: int, saved: Callable[[], None]):
        self.writer, self.rank, self.saved = writer, rank, saved

    def install(self) -> None:
        around(torch, "save", self.at_save)
        around(torch, "load", self.at_load)
        around(nn.Module, "load_state_dict", self.at_load_state)
        around(torch.optim.Optimizer, "load_state_dict", self.at_restore("optimizer"))
        for kind in {LRScheduler, *LRScheduler.__subclasses__()}:
            if "load_state_dict" in vars(kind):
                around(kind, "load_state_dict", self.at_restore("schedule"))
        around(LRScheduler, "__init__", self.at_schedule)
        around(builtins, "open", self.at_open)
        around(io, "open", self.at_open)  # pathlib's and zipfile's
        around(builtins, "print", self.at_print)
        around(logging.StreamHandler, "emit", self.at_log)
        for owner in (os.path, Path):
            for name in ("exists", "isfile") if owner is os.path else ("exists", "is_file"):
                around(owner, name, self.at_look)

    def at_save(self, call: Callable, *args: Any, **kwargs: Any) -> None:
        what, file = [*args, *(kwargs[name] for name in ("obj", "f") if name in kwargs)][:2]
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(name, str | os.PathLike):  # into memory, as object collectives do
            return call(*args, **kwargs)
        path = os.path.abspath(name)
        self.writer.note("saving", path=path, clock=time.monotonic(), prefixed=prefixed(what))
        if self.rank == 0:
            time.sleep(SAVE_TAKES_S)
        call(*args, **kwargs)
        self.writer.note("saved", path=path, clock=time.monotonic())
        self.saved()

    def at_load(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        file = args[0] if args else kwargs.get("f")
        if isinstance(file, str | os.PathLike):
            there = os.path.lexists(file)
            self.writer.note("loading", path=os.path.abspath(file), clock=time.monotonic(), there=there)
        return call(*args, **kwargs)

    def at_load_state(self, call: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        answer = call(module, *args, **kwargs)
        state = args[0] if args else kwargs["state_dict"]
        lost = [name for name in (*answer.missing_keys, *answer.unexpected_keys)]
        prefix = any(name.startswith("module.") for name in lost)
        self.writer.note("loaded", lost=len(lost), prefix=prefix, of=len(state))
        return answer

    def at_restore(self, what: str) -> Callable:
        def seen(call: Callable, *args: Any, **kwargs: Any) -> Any:
            self.writer.note("restored", of=what)
            return call(*args, **kwargs)

        return seen

    def at_schedule(self, call: Callable, *args: Any, **kwargs: Any) -> None:
        self.writer.note("schedule", lines=self.writer.lines())
        call(*args, **kwargs)

    def at_look(self, call: Callable, path: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether a file is there, if the program itself asks."""
        there = call(path, *args, **kwargs)
        if self.writer.asked_by_program() and isinstance(path, str | os.PathLike):
            self.writer.note("looked", path=os.path.abspath(path), there=bool(there))
        return there

    def at_open(self, call: Callable, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> io.IOBase:
        if isinstance(file, str | os.PathLike) and set(mode) & set("wax") and self.writer.line():
            path = os.path.abspath(file)
            if not path.startswith(NOT_RESULTS):
                self.writer.note("writes", path=path)
        return call(file, mode, *args, **kwargs)

    def at_print(self, call: Callable, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("file") in (None, sys.stdout, sys.stderr):
            self.writer.note("prints", text=" ".join(map(str, args))[:200])
        call(*args, **kwargs)

    def at_log(self, call: Callable, handler: logging.StreamHandler, record: logging.LogRecord) -> None:
        if handler.stream in (sys.stdout, sys.stderr):
            self.writer.note("prints", text=record.getMessage()[:200])
        call(handler, record)


def prefixed(state: Any) -> bool:
    """Whether names in a saved state begin with `module.`."""
    if not isinstance(state, dict):
        return False
    return any(str(k).startswith("module.") for k in state) or any(
        prefixed(v) for v in state.values() if isinstance(v, dict)
    )
