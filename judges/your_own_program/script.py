"""11.2 `train_repaired(...)`: which of five faults of a training script are gone?

Each fault is found by what the script does, whatever the others do: the model notes the rows of each step, and the
judge repeats the steps on these rows, in one process.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch.utils.data import TensorDataset

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import all_of, equals, exercise, first_mistake, once
from ddp_course.grading.vocabulary.means import mean_slips
from ddp_course.grading.vocabulary.noted import Noted, numbered
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.checkpointing.files import file_events, fresh_folder, other_writer, read

BATCH, STEPS, EPOCHS, RATE = 4, 3, 3, 0.1  # rows of a batch, steps of an epoch
SLOW_S = 0.05


@dataclass(frozen=True)
class Case:
    """Where the script writes, its seed, and how many rows it is given."""

    path: str
    seed: int
    n_rows: int
    n_held_out: int

    def model(self) -> Noted:
        """Return the linear model that is trained."""
        return Noted(tasks.net(self.seed, 3, 1).float())

    def rows(self, held_out: bool = False) -> TensorDataset:
        """Return numbered rows, and their targets."""
        n_rows, generator = self.n_held_out if held_out else self.n_rows, torch.Generator()
        x = torch.rand(n_rows, 3, generator=generator.manual_seed(self.seed + held_out))
        return TensorDataset(numbered(x), 3 * torch.randn(n_rows, 1, generator=generator))


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Run the script; note its rows, its weights, its loss and what it did to files."""
    model = case.model()
    with file_events(function, case.path, 0 if rank else SLOW_S) as events:
        loss = function(rank, world_size, model, case.rows(), case.rows(held_out=True), EPOCHS, Path(case.path))
    file = read(case.path, lambda state: {name: value.flatten().tolist() for name, value in state.items()})
    steps = [rows for learns, training, rows in model.passes if learns and training]
    return Note(steps=steps, weights=tasks.weights(model), loss=plain(loss), events=events, file=file)


def rounds(rng: Random, folder: Path) -> list[Round]:
    """Run the script with uneven shares of the held-out rows, then with fewer rows than ranks."""
    world_size, seed = rng.choice((2, 3)), rng.randint(1, 1000)
    held_out = world_size * rng.randint(1, 2) + 1
    cases = [("run", held_out), ("few", world_size - 1)]
    case = partial(Case, str(folder / "model.pt"), seed, world_size * BATCH * STEPS)
    return [Round(world_size, [(name, case(n_held_out)) for name, n_held_out in cases])]


def epochs(seen: Seen, rank: int) -> list[list[int]]:
    """Return a rank's rows of each epoch, in their order."""
    rows = sum(seen.of(rank)["steps"], [])
    return [rows[i : i + BATCH * STEPS] for i in range(0, len(rows), BATCH * STEPS)]


def counted(seen: Seen) -> Fault | None:
    """Each rank takes the steps that it should."""
    counts = [[len(step) for step in note["steps"]] for note in seen.everyone]
    rank = next((rank for rank, found in enumerate(counts) if found != [BATCH] * (STEPS * EPOCHS)), None)
    return first_mistake(f"{EPOCHS} epochs of {STEPS} steps, each on {BATCH} rows", {
        "the script's steps, batch size and epochs were right; leave them":
            rank is not None and f"{len(counts[rank])} steps, on {short(counts[rank])} rows",
    }, rank)  # fmt: skip


def shares(seen: Seen) -> Fault | None:
    """In each epoch, the ranks have all rows."""
    by_epoch = zip(*(epochs(seen, rank) for rank in range(seen.world_size)), strict=True)
    missing = [seen.case.n_rows - len(set().union(*parts)) for parts in by_epoch]
    epoch = next((epoch for epoch, count in enumerate(missing) if count), None)
    return first_mistake("each row once in an epoch, on one rank", {
        "each rank cuts its part out of another shuffle; the sampler's seed must be the same on all ranks":
            epoch is not None and f"{missing[epoch]} rows come to no rank in epoch {epoch}, others twice",
    })  # fmt: skip


def order(seen: Seen) -> Fault | None:
    """No two epochs are alike."""
    found = epochs(seen, seen.rank)
    first = next((one for one in found if found.count(one) > 1), None)
    found = first and f"the same {len(first)} rows in the same order"
    return first_mistake("another order in each epoch", {
        "nothing is shuffled": found and first == sorted(first) and found,
        "the sampler knows its epoch only if told: set_epoch(epoch)": found,
    }, seen.rank)  # fmt: skip


def apart(seen: Seen) -> Fault | None:
    """All ranks have the weights of rank 0."""
    far = [rank for rank, n in enumerate(seen.everyone) if not close(n["weights"], seen["weights"], 1e-5)]
    cause = "the ranks drift apart: this forward does not pass through DDP, which then does not average"
    found = far and f"rank {far[0]} has others than rank {seen.rank}"
    return first_mistake("the same weights on all ranks, after every step", {cause: found})


def one_process(seen: Seen, times: float = 1) -> list[float]:
    """Repeat the steps on the rows that the ranks saw; `times`: a factor too much in the gradients."""
    model, (x, y) = seen.case.model().double(), seen.case.rows().tensors
    for parts in zip(*(note["steps"] for note in seen.everyone), strict=True):
        rows = sum(parts, [])
        tasks.descend(model, times * tasks.gradient(model, (x[rows].double(), y[rows].double())), RATE)
    return tasks.weights(model)


averaged = equals(
    "with the mean gradient in each step, the weights",
    one_process,
    lambda s: [("gradients are summed over the ranks; DDP averages them by itself", one_process(s, s.world_size))],
    "all ranks have the same weights, but wrong ones; the loss, the rate and the steps were right",
    of="weights",
    tolerance=1e-4,
)


def errors(seen: Seen) -> list[torch.Tensor]:
    """Return the squared error of each rank's model on each held-out row."""
    x, y = (tensor.double() for tensor in seen.case.rows(held_out=True).tensors)
    weights = [torch.tensor(note["weights"], dtype=torch.float64) for note in seen.everyone]
    return [(x[:, :3] @ w[:3] + w[3] - y[:, 0]).square() for w in weights]


def own_errors(seen: Seen) -> list[torch.Tensor]:
    """Return the same on the rows that a rank should look at."""
    return [part[rank :: seen.world_size] for rank, part in enumerate(errors(seen))]


def held_out_loss(seen: Seen) -> torch.Tensor:
    """Return the loss of each rank's model on its own rows, or of this rank's on all rows, which will do."""
    alone = errors(seen)[seen.rank].mean()
    return alone if close(seen["loss"], alone, 1e-4) else torch.cat(own_errors(seen)).mean()


loss = equals(
    lambda seen, right: f"{right:.5g}, the mean over all {seen.case.n_held_out} held-out rows",
    held_out_loss,
    lambda seen: mean_slips(own_errors(seen), seen.rank),
    "sum of all squared errors, over the number of all rows; on every rank",
    of="loss",
    tolerance=1e-4,
)


def file(seen: Seen) -> Fault | None:
    """The bare model's weights are there when a rank goes on."""
    file, why = (seen["file"], "") if isinstance(seen["file"], dict) else ({}, seen["file"])
    wrapped = next((name for name in file if name.startswith("module.")), "")
    return first_mistake("the bare model's weights, written by rank 0 alone, there when the function returns", {
        "all ranks write to one path at the same time; if rank == 0": other_writer(seen),
        "rank 0 writes, then all ranks meet: dist.barrier()": why,
        "the names must be the bare model's, as they were: replica.module.state_dict()":
            wrapped and f"a file with {wrapped}",
        "save after the last step, rank 0's weights":
            sum(file.values(), []) != seen.of(0)["weights"] and "other weights",
    }, seen.rank)  # fmt: skip


SCRIPT = exercise(
    "11.2",
    "Repair a training script",
    "train_repaired",
    30,
    act=act,
    rounds=rounds,
    within=fresh_folder,
    checks={
        "shares": ("in each epoch, each row is on one rank once", 1, once(all_of(counted, shares)), "run"),
        "order": ("each epoch has an order of its own", 1, all_of(counted, order), "run"),
        "gradients": ("all ranks step with the mean gradient", 2, once(all_of(counted, apart, averaged)), "run"),
        "loss": ("the held-out loss is that of all rows", 1, loss, "run few"),
        "file": ("rank 0 alone writes the weights", 1, file, "run"),
    },
    hints={
        "absent|limit|cut-off": "a collective that not every rank calls; a barrier within `if rank == 0`, perhaps",
        r"has no attribute 'set_epoch'": "set_epoch is the sampler's: sampler.set_epoch(epoch)",
    },
)
