"""What the ranks do in the tests of recovery: train, write down every row and every save, and die where they are told.

A journal is one file for each rank. Each line is written by a single system call, so what it says has happened, also
if the rank is killed a moment later.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
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


def read_journal(folder: Path, rank: int, what: str) -> list[dict]:
    """Return a rank's notes of one kind."""
    path = folder / f"rank{rank}"
    notes = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [note for note in notes if note["what"] == what]


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
    witness = Witness(Journal(journal_folder / f"rank{rank}"), Fate(rank, death))
    with ExitStack() as patches:
        for each in witness.patches(images):
            patches.enter_context(each)
        if without:
            patches.enter_context(LEFT_OUT[without]())
        if model == "dropout":
            patches.enter_context(patch.object(training, "build_model", with_dropout))
        return training.train(rank, world_size, config)


def with_dropout(config: training.Config, images: Images) -> nn.Module:
    hidden = [nn.Linear(64, config.hidden), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(config.hidden, 10))


class Witness:
    """Sees each step and each save from inside, writes it down, and lets death come."""

    def __init__(self, journal: Journal, fate: Fate) -> None:
        self.journal, self.fate = journal, fate
        self.rows: list[int] = []  # read since the last step
        self.done = 0  # steps
        self.saving = 0  # the step whose save is under way

    def patches(self, images: tuple[Images, Images]) -> list:
        def at(place: str) -> Callable:
            return lambda *_: self.fate.at(place, self.saving)

        train_set, test_set = watched(images[0], self.read), images[1]
        return [
            patch.object(training, "load", lambda name, split, root: train_set if split == "train" else test_set),
            around(run_module.Run, "resume", after=self.resumed),
            around(run_module.Run, "after_step", self.trained, lambda *_: self.fate.at("counted", self.done)),
            around(Checkpointer, "_write", self.begun, lambda *_: self.journal.note("saved", self.saving)),
            around(Checkpointer, "save", self.asked),
            around(Checkpointer, "save_later", self.asked),
            around(checkpoint_file, "_write_all", self.written),
            around(os, "fsync", at("fsync")),
            around(os, "replace", at("replace"), self.replaced),
            around(Path, "unlink", at("unlink")),
        ]

    def read(self, index: int) -> None:
        if not self.rows:
            self.fate.at("reading", self.done + 1)
        self.rows.append(index)

    def resumed(self, run: run_module.Run) -> None:
        self.done = run.step

    def trained(self, run: run_module.Run, loss: torch.Tensor, *_: object) -> None:
        self.done = run.step + 1
        self.journal.note("step", self.done, rows=self.rows, loss=loss.item())
        self.rows.clear()
        self.fate.at("trained", self.done)

    def asked(self, checkpoints: Checkpointer, state: dict, step: int) -> None:
        self.fate.at("waiting", step)

    def begun(self, checkpoints: Checkpointer, state: dict, step: int) -> None:
        self.saving = step
        self.journal.note("begun", step)

    def written(self, file, data) -> None:
        if self.fate.comes("write", self.saving):  # half of it reaches the file
            file.write(memoryview(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def replaced(self, source, target) -> None:
        self.journal.note("named", self.saving)
        self.fate.at("replaced", self.saving)


def around(owner: object, name: str, before: Callable = lambda *_: None, after: Callable = lambda *_: None):
    """Patch a function, so that each call is told of, with its arguments, before and after."""
    original = getattr(owner, name)

    def call(*args, **options):
        before(*args)
        outcome = original(*args, **options)
        after(*args)
        return outcome

    return patch.object(owner, name, call)


# Each breaks the recovery in one place.
LEFT_OUT = {
    "settled buckets": lambda: patch.object(training, "settle_buckets", lambda *_: None),
    "position": lambda: patch.object(ShardSampler, "advance", lambda self, rows: None),
    "random state": lambda: patch.object(training_state, "set_rng_state", lambda state: None),
    "own generator": lambda: patch.object(
        training, "DataLoader", lambda *args, generator=None, **options: DataLoader(*args, **options)
    ),
}
