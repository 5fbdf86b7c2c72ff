"""A rank runs a learner's program, as torchrun would, and notes what comes out of it; then it is looked at.

The ranks stay: their process group is hidden, and becomes the program's when that calls init_process_group.
Left out on purpose: the exit. torchrun's ranks are processes that end; these go on, to tell what they saw.
Read next: `convert.py`.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary.play import Note, Seen

NAME = "train.py"


def act(function: Callable, case: tuple, rank: int, world_size: int) -> Note:
    """Run the program that the function returns, in a folder where an earlier run may have left files."""
    text, (folder, epochs, seed) = function(), case
    if not isinstance(text, str):
        raise FaultFound(Fault("the text of a program", type(text).__name__, cause="return the program as one text"))
    os.makedirs(folder, exist_ok=True)
    linecache.cache[NAME] = (len(text), None, text.splitlines(True), NAME)
    saves: list[Any] = []
    save, said = torch.save, io.StringIO()

    def noted(what: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(what, torch.UntypedStorage | torch.TypedStorage):  # pickle sends a tensor's memory so
            saves.append(_numbers(what))
        save(what, *args, **kwargs)

    with (
        mock.patch.dict(os.environ, LOCAL_RANK=str(rank % (world_size - 1))),  # as on two nodes, the second of one rank
        mock.patch.object(sys, "argv", [NAME, str(epochs), str(seed)]),
        mock.patch.object(torch, "save", noted),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        _group_hidden() as opened,
    ):
        try:
            exec(compile(text, NAME, "exec"), {"__name__": "__main__", "__file__": NAME})
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"the program ended with exit status {end.code}") from end
        ended = not dist.is_initialized()
    if not opened:
        cause = "call dist.init_process_group() before anything of torch.distributed"
        raise FaultFound(Fault("a program for several ranks", "one that opens no process group", cause=cause))
    return Note(lines=said.getvalue().splitlines(), saves=saves, files=sorted(os.listdir(folder)), ended=ended)


@contextlib.contextmanager
def _group_hidden() -> Iterator[list[str | None]]:
    """Within the block there is no group until the program opens one; yields the backends that it has asked for."""
    group, opened = c10d._get_default_group(), []

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        if "gloo" not in (backend or "gloo"):
            raise ValueError(f"these ranks have CPUs, for which the backend is gloo, not {backend}")
        c10d._update_default_pg(group)
        opened.append(backend)

    def destroy(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, c10d.GroupMember.WORLD):
            c10d._update_default_pg(None)

    fakes = {"init_process_group": init, "destroy_process_group": destroy}
    with mock.patch.multiple(dist, **fakes), mock.patch.multiple(c10d, **fakes):
        c10d._update_default_pg(None)
        try:
            yield opened
        finally:
            c10d._update_default_pg(group)


def _numbers(what: Any) -> Any:
    """The tensors in what is saved, also in the dictionary "model" in it: name -> numbers. Others have none."""
    if not isinstance(what, dict):
        return type(what).__name__
    inside = what.get("model") if isinstance(what.get("model"), dict) else {}
    named = {**what, **{f"model.{name}": each for name, each in inside.items()}}
    return {
        str(name): each.detach().flatten().tolist() if isinstance(each, torch.Tensor) else []
        for name, each in named.items()
    }


# --- Views, the same on all ranks ------------------------------------------------------------------------


def saved(inside: str = "") -> Callable[[Seen], Any]:
    """The weights that were saved last, with their names, which begin with `inside`."""

    def view(seen: Seen) -> Any:
        last = next((note["saves"][-1] for note in seen.everyone if note["saves"]), "no torch.save")
        if isinstance(last, str):
            return last
        return [[name, numbers] for name, numbers in sorted(last.items()) if name.startswith(inside)]

    return view


def printed(word: str) -> Callable[[Seen], Any]:
    """The numbers after a word in the lines of the first rank that prints some."""

    def view(seen: Seen) -> Any:
        lines = next((note["lines"] for note in seen.everyone if note["lines"]), [])
        lines = [line for line in lines if line.startswith("epoch ")]
        found = [re.search(rf"\b{word} ([-+.\de]+)(,|$)", line) for line in lines]
        return [float(each[1]) for each in found] if all(found) else f"lines without {word!r} and a number"

    return view


def voices(seen: Seen) -> dict[str, int]:
    lines = [len([line for line in note["lines"] if line]) for note in seen.everyone]
    return {"ranks that print:": len([n for n in lines if n]), "lines:": sum(lines)}


def writers(name: str, *keys: str) -> Callable[[Seen], Any]:
    """How many ranks save, how often, and whether the file has its name and these keys."""

    def view(seen: Seen) -> dict[str, Any]:
        saves = [note["saves"] for note in seen.everyone if note["saves"]]
        last = saves[0][-1] if saves and isinstance(saves[0][-1], dict) else {}
        files = sorted(set().union(*(note["files"] for note in seen.everyone)))
        return {
            "ranks that save:": len(saves),
            "saves:": sum(map(len, saves)),
            "files:": name if name in files else files,
            "keys:": [key for key in keys if key in last],
        }

    return view
