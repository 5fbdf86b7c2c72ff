"""What the ranks do in the tests of recovery: train, write down every row and every save, and die where they are told.

A journal is one file for each rank. Each line is written by a single system call, so what it says has happened, also
if the rank is killed a moment later.
"""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_course.checkpoint import file as checkpoint_file
from ddp_course.checkpoint import state as training_state
from ddp_course.checkpoint.folder import Checkpointer
from ddp_course.data import Images
from ddp_course.data.sampler import ShardSampler
from ddp_course.train import images as training
from ddp_course.train import run as run_module

IN_A_STEP = ("reading", "trained", "counted")  # before the forward pass; before and after the step is agreed on
IN_A_SAVE = ("write", "fsync", "replace", "replaced", "unlink")  # of rank 0
WHILE_RANK_0_SAVES = ("waiting",)  # on another rank


@dataclass(frozen=True)
class Death:
    """Where a rank ends itself with a signal: at the `nth` call of `place`, counted from `step` on."""

    rank: int
    step: int
    place: str
    nth: int = 1
    signal: int = signal.SIGKILL


@dataclass(frozen=True)
class Case:
    """One run: how it saves, and how it dies, once or several times."""

    number: int
    world_size: int
    model: str  # "mlp", "mlp_bn", or "dropout"
    save_every: int
    background: bool
    keep: int
    deaths: tuple[Death, ...]

    @property
    def name(self) -> str:
        kind = "background" if self.background else "waiting"
        deaths = "+".join(f"rank{d.rank}.step{d.step}.{d.place}{d.nth if d.nth > 1 else ''}" for d in self.deaths)
        return f"{self.number:02d}-W{self.world_size}-{self.model}-{kind}-every{self.save_every}-{deaths}"


def draw_cases(number: int, seed: int, steps: dict[int, int]) -> list[Case]:
    """Draw cases at random; every third dies in the middle of a save. The same seed draws the same.

    Args:
        steps: of a whole run, by world size.
    """
    rng, cases = random.Random(seed), []
    for i in range(number):
        world_size = rng.choices([2, 3, 4], [5, 4, 1])[0]
        model = rng.choices(["mlp", "mlp_bn", "dropout"], [6, 1, 1])[0]
        deaths, first = [], 1
        for _ in range(rng.choices([1, 2, 3], [7, 2, 1])[0]):
            if first > steps[world_size]:
                break
            deaths.append(draw_death(rng, world_size, first, steps[world_size], in_a_save=not deaths and i % 3 == 0))
            first = deaths[-1].step + 1
        keep = 1 if deaths[0].place == "unlink" else rng.randint(1, 3)  # or nothing might ever be removed
        cases.append(Case(i, world_size, model, rng.randint(1, 5), bool(i % 2), keep, tuple(deaths)))
    return cases


def draw_death(rng: random.Random, world_size: int, first: int, last: int, *, in_a_save: bool) -> Death:
    step = rng.randint(first, last)
    if not in_a_save:
        rank = rng.randrange(world_size)
        return Death(rank, step, rng.choice(IN_A_STEP[:2] if step == last else IN_A_STEP))
    place = rng.choice(IN_A_SAVE + WHILE_RANK_0_SAVES)
    if place in WHILE_RANK_0_SAVES:
        return Death(rng.randrange(1, world_size), step, place)
    return Death(0, step, place, rng.randint(1, 40) if place == "write" else 1)


# --- In the rank -----------------------------------------------------------------------------------


class Journal:
    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, what: str, step: int, **more: object) -> None:
        os.write(self.file, (json.dumps({"what": what, "step": step} | more) + "\n").encode())


def read_journal(folder: Path, rank: int) -> list[dict]:
    path = folder / f"rank{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Fate:
    """Counts how often a rank comes by the place of its death."""

    def __init__(self, rank: int, death: Death | None) -> None:
        self.death = death if death and death.rank == rank else None
        self.seen = 0

    def comes(self, place: str, step: int) -> bool:
        if not self.death or self.death.place != place or step < self.death.step:
            return False
        self.seen += 1
        return self.seen == self.death.nth

    def at(self, place: str, step: int) -> None:
        if self.comes(place, step):
            os.kill(os.getpid(), self.death.signal)


class Watched(Images):
    """Images that know which of their rows were read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.on_read(index)
        return super().__getitem__(index)


def watched(images: Images, on_read) -> Watched:
    copy = Watched(**{each.name: getattr(images, each.name) for each in fields(images)})
    object.__setattr__(copy, "on_read", on_read)
    return copy


def train_and_die(
    rank: int,
    world_size: int,
    config: training.Config,
    journal_folder: Path,
    images: tuple[Images, Images],
    death: Death | None = None,
    model: str = "",
    without: str = "",
) -> training.Result:
    """Train as `train` does, with a journal, until the end or until death comes.

    Args:
        images: training and test rows; read by the parent once, for scikit-learn needs seconds to import.
        model: "dropout" for a network that draws random numbers.
        without: what to leave out, to see that it is missed.
    """
    torch.set_num_threads(1)
    journal, fate = Journal(journal_folder / f"rank{rank}"), Fate(rank, death)
    with ExitStack() as patches:
        for each in (
            *watch_steps(journal, fate, images),
            *watch_saves(journal, fate),
            *leave_out(without),
        ):
            patches.enter_context(each)
        if model == "dropout":
            patches.enter_context(patch.object(training, "build_model", with_dropout))
        return training.train(rank, world_size, config)


def with_dropout(config: training.Config, images: Images) -> nn.Module:
    hidden = [nn.Linear(64, config.hidden), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(config.hidden, 10))


def watch_steps(journal: Journal, fate: Fate, images: tuple[Images, Images]) -> list:
    rows: list[int] = []
    done = 0

    def on_read(index: int) -> None:
        if not rows:
            fate.at("reading", done + 1)
        rows.append(index)

    def after_step(self: run_module.Run, *args: object) -> bool:
        nonlocal done
        done = self.step + 1
        journal.note("step", done, rows=rows, loss=args[0].item())
        rows.clear()
        fate.at("trained", done)
        outcome = original(self, *args)
        fate.at("counted", done)
        return outcome

    def resume(self: run_module.Run) -> None:
        nonlocal done
        original_resume(self)
        done = self.step

    original, original_resume = run_module.Run.after_step, run_module.Run.resume
    train_set, test_set = watched(images[0], on_read), images[1]
    return [
        patch.object(training, "load", lambda name, split, root: train_set if split == "train" else test_set),
        patch.object(run_module.Run, "after_step", after_step),
        patch.object(run_module.Run, "resume", resume),
    ]


def watch_saves(journal: Journal, fate: Fate) -> list:
    step = 0  # of the save under way

    def write(self: Checkpointer, state: dict, number: int) -> None:
        nonlocal step
        step = number
        journal.note("begun", step)
        originals["_write"](self, state, number)
        journal.note("saved", step)

    def write_all(file, data) -> None:
        if fate.comes("write", step):  # half of it reaches the file
            file.write(memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        originals["write_all"](file, data)

    def fsync(descriptor: int) -> None:
        fate.at("fsync", step)
        originals["fsync"](descriptor)

    def replace(source, target) -> None:
        fate.at("replace", step)
        originals["replace"](source, target)
        journal.note("named", step)
        fate.at("replaced", step)

    def unlink(path: Path, **options: bool) -> None:
        fate.at("unlink", step)
        originals["unlink"](path, **options)

    def save(self: Checkpointer, state: dict, number: int) -> Path:
        fate.at("waiting", number)
        return originals["save"](self, state, number)

    def save_later(self: Checkpointer, state: dict, number: int) -> None:
        fate.at("waiting", number)
        return originals["save_later"](self, state, number)

    originals = {name: getattr(Checkpointer, name) for name in ("_write", "save", "save_later")}
    originals |= {"write_all": checkpoint_file._write_all, "fsync": os.fsync, "replace": os.replace}
    originals |= {"unlink": Path.unlink}
    return [
        patch.object(Checkpointer, "_write", write),
        patch.object(Checkpointer, "save", save),
        patch.object(Checkpointer, "save_later", save_later),
        patch.object(checkpoint_file, "_write_all", write_all),
        patch.object(os, "fsync", fsync),
        patch.object(os, "replace", replace),
        patch.object(Path, "unlink", unlink),
    ]


def leave_out(what: str) -> list:
    """Break the recovery in one place."""
    if what == "settled buckets":
        return [patch.object(training, "settle_buckets", lambda *_: None)]
    if what == "position":
        return [patch.object(ShardSampler, "advance", lambda self, rows: None)]
    if what == "random state":
        return [patch.object(training_state, "set_rng_state", lambda state: None)]
    if what == "own generator":

        def loader(*args, generator=None, **options) -> DataLoader:
            return DataLoader(*args, **options)

        return [patch.object(training, "DataLoader", loader)]
    return []
