"""What does a learner's training program leave behind on each rank: lines, saves and files? And how is it looked at?

Read `ddp_course/grading/vocabulary/programs.py` first, which runs it. Read next: `convert.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from ddp_course.grading.vocabulary import programs
from ddp_course.grading.vocabulary.rounds import Note, Seen


def act(function: Callable, case: tuple, rank: int, world_size: int) -> Note:
    """Run the program that the function returns, in a folder where an earlier run may have left files."""
    text, (folder, epochs, seed) = function(), case
    os.makedirs(folder, exist_ok=True)
    saves: list[Any] = []
    save = torch.save

    def noted(what: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(what, torch.UntypedStorage | torch.TypedStorage):  # pickle sends a tensor's memory so
            saves.append(_numbers(what))
        save(what, *args, **kwargs)

    with mock.patch.object(torch, "save", noted), contextlib.chdir(folder):
        note = programs.run(text, ["train.py", str(epochs), str(seed)], rank, world_size)
    return Note(note, saves=saves, files=sorted(os.listdir(folder)))


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
