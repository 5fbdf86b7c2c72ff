"""What must be saved so that a run can go on, by whom, and onto which device is it loaded?

One rank writes: the replicas are equal, and two writers of one file would spoil it. The file appears under its
name only when it is whole and on the disk, so a run that is killed while it saves keeps the checkpoint before.
Every rank reads, each onto its own device.

Left out on purpose: the place within an epoch, and the state of the random number generators. A run resumes at
the start of an epoch.
Read next: `train.py`, which says what goes into the file.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used. The message names the file, what is wrong, and the way out."""


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write `state` so that `path` is at every moment either the old checkpoint or the new one.

    Args:
        path: its folder is made if need be.
        state: tensors, numbers, texts, and lists and dicts of them: what loads without running any code.
    Collective: none. Call it on one rank.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")  # beside it: a rename must not cross file systems
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    # A rename is an entry in the folder; without this, a power cut may lose it.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: str | Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint onto this rank's own device.

    Without `device`, each rank would put its tensors onto the device of the rank that saved them, GPU 0.

    Raises:
        CheckpointError: there is no such file, or it is not a whole checkpoint.
    Collective: none. Every rank reads, so every host must see the file.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint at {path} to resume from; leave resume out for the first run, and on several "
            "hosts use a folder that all of them see"
        ) from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read ({type(error).__name__}); remove it and train anew"
        ) from error
