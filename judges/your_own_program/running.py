"""A rank runs a learner's program, as torchrun would, and notes what comes out of it.

Left out on purpose: the exit. torchrun's ranks are processes that end; these go on, to tell what they saw.
Read next: `reference.py`, what one process gets.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.grading.vocabulary.play import Note, Seen

NAME = "train.py"


@dataclass(frozen=True)
class Case:
    """A run of a program: up to which epoch, from which one its files let it go on, and the seed of its data."""

    folder: str
    epochs: int
    seed: int
    first: int = 0


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Run the program that the function returns, in the case's folder, where an earlier run may have left files."""
    text = function()
    if not isinstance(text, str):
        return Note(kind=type(text).__name__)
    os.environ["LOCAL_RANK"] = str(rank % (world_size - 1))  # as on two nodes, of which the second has one rank
    os.makedirs(case.folder, exist_ok=True)
    os.chdir(case.folder)
    linecache.cache[NAME] = (len(text), None, text.splitlines(True), NAME)
    said, saved = _run(text, [str(case.epochs), str(case.seed)])
    still_open = dist.is_initialized() and "a group that goes on"
    return Note(said=said, saved=saved, files=sorted(os.listdir(case.folder)), open=still_open)


def _run(text: str, arguments: list[str]) -> tuple[str, list]:
    sys.argv = [NAME, *arguments]
    saved: list[Any] = []
    save, out = torch.save, io.StringIO()

    def noted(what: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(what, torch.UntypedStorage | torch.TypedStorage):  # pickle sends a tensor's memory so
            saved.append(_numbers(what))
        save(what, *args, **kwargs)

    torch.save = noted
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(text, NAME, "exec"), {"__name__": "__main__", "__file__": NAME})
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"the program ended with exit status {end.code}") from end
    finally:
        torch.save = save
    return out.getvalue(), saved


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


# --- What is read out of the notes -----------------------------------------------------------------------


def printed(seen: Seen, word: str) -> list[float] | None:
    """The numbers after a word in what rank 0 and the others printed, or nothing if one line lacks it."""
    text = "".join(note.get("said") or "" for note in seen.everyone)
    lines = [line for line in text.splitlines() if line.startswith("epoch ")]
    found = [re.search(rf"\b{word} (\S+?)(,|$)", line) for line in lines]
    try:
        return [float(each[1]) for each in found if each] if all(found) else None
    except ValueError:
        return None


def last_saved(seen: Seen, inside: str = "") -> list[float] | str | None:
    """The weights that were saved last, in the order of their names, which begin with `inside`; or what is wrong."""
    saves = [each for note in seen.everyone for each in (note.get("saved") or [])[-1:]]
    if not saves or not isinstance(saves[0], dict):
        return saves[0] if saves else None
    names = sorted(name for name in saves[0] if name.startswith(inside))
    if wrapped := next((name for name in names if re.match(rf"{inside}(model|module)\.", name)), ""):
        return f"names such as {wrapped}"
    return [number for name in names for number in saves[0][name]]
