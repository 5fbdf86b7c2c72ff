"""11.2 `train_repaired(...)`: which of five faults of a training script are gone?

Each fault is found by what the script does, whatever the others do and in whatever order it takes its rows: the model
notes the rows of each step, and the judge repeats the steps on these rows, in one process. So views are words.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch.utils.data import TensorDataset

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from ddp_course.grading.vocabulary.seen_samples import Noted, numbered
from judges.checkpointing.files import file_events, fresh_folder, other_writer, read

BATCH, STEPS, EPOCHS, RATE = 4, 3, 3, 0.1  # rows of a batch, steps of an epoch
SLOW_S = 0.05


def cases(rng: Random, folder: Path) -> list[Round]:
    """Run the script with uneven shares of the held-out rows, then with fewer rows than ranks."""
    world_size, seed = rng.choice((2, 3)), rng.randint(1, 1000)
    held_out = world_size * rng.randint(1, 2) + 1
    counts = {"run": held_out, "few": world_size - 1}
    return [Round(world_size, [(name, (str(folder / "model.pt"), seed, n)) for name, n in counts.items()])]


def model_of(seed: int) -> Noted:
    """Return the linear model that is trained."""
    return Noted(tasks.net(seed, 3, 1).float())


def rows_of(seed: int, n_rows: int) -> TensorDataset:
    """Return numbered rows, and their targets."""
    chance = torch.Generator().manual_seed(seed)
    return TensorDataset(
        numbered(torch.rand(n_rows, 3, generator=chance)), 3 * torch.randn(n_rows, 1, generator=chance)
    )


def act(function: Callable, case: tuple, rank: int, world_size: int) -> Note:
    """Run the script; note its rows, its weights, its loss and what it did to files."""
    path, seed, n_held_out = case
    model, train_set = model_of(seed), rows_of(seed, world_size * BATCH * STEPS)
    with file_events(function, path, 0 if rank else SLOW_S) as events:
        loss = function(rank, world_size, model, train_set, rows_of(seed + 1, n_held_out), EPOCHS, Path(path))
    file = read(path, lambda state: {name: value.flatten().tolist() for name, value in state.items()})
    steps = [rows for learns, training, rows in model.passes if learns and training]
    return Note(steps=steps, weights=tasks.weights(model), loss=plain(loss), events=events, file=file)


def epochs(seen: Seen) -> list[list[int]]:
    """The rows of each epoch on this rank, in their order."""
    rows = sum(seen["steps"], [])
    return [rows[i : i + BATCH * STEPS] for i in range(0, len(rows), BATCH * STEPS)]


def counted(view: Callable[[Seen], str]) -> Callable[[Seen], str]:
    """The view, where all ranks have taken the steps that they should."""

    def of(seen: Seen) -> str:
        sizes = [list(map(len, note["steps"])) for note in seen.everyone]
        wrong = next((found for found in sizes if found != [BATCH] * (STEPS * EPOCHS)), None)
        return view(seen) if wrong is None else f"{len(wrong)} steps, on {sorted(set(wrong))} rows"

    return of


@counted
def shares(seen: Seen) -> str:
    by_epoch = zip(*(epochs(seen.of(rank)) for rank in range(seen.world_size)), strict=True)
    once = all(len(set().union(*parts)) == seen.world_size * BATCH * STEPS for parts in by_epoch)
    return "each row once in an epoch" if once else "rows on no rank, and others twice"


@counted
def order(seen: Seen) -> str:
    found = epochs(seen)
    if all(found.count(one) == 1 for one in found):
        return "another order in each epoch"
    return "nothing is shuffled" if any(one == sorted(one) for one in found) else "the same rows in the same order"


@counted
def gradients(seen: Seen) -> str:
    """The steps are repeated in one process, on the rows that the ranks saw."""
    if not all(close(note["weights"], seen["weights"], 1e-5) for note in seen.everyone):
        return "other weights on other ranks"
    seed = seen.case[1]
    model, (x, y) = model_of(seed).double(), rows_of(seed, seen.world_size * BATCH * STEPS).tensors
    for parts in zip(*(note["steps"] for note in seen.everyone), strict=True):
        rows = sum(parts, [])
        tasks.descend(model, tasks.gradient(model, (x[rows].double(), y[rows].double())), RATE)
    return f"the weights of one process{'' if close(seen['weights'], tasks.weights(model), 1e-4) else ' are others'}"


def loss(seen: Seen) -> str:
    """The mean over all rows, of this rank's weights or of each rank's on its own rows, which may still be others."""
    _, seed, n_held_out = seen.case
    x, y = (tensor.double() for tensor in rows_of(seed + 1, n_held_out).tensors)
    weights = [torch.tensor(note["weights"], dtype=torch.float64) for note in seen.everyone]
    by_rank = [(x[:, :3] @ w[:3] + w[3] - y[:, 0]).square() for w in weights]
    alone, parts = by_rank[seen.rank], [part[rank :: seen.world_size] for rank, part in enumerate(by_rank)]
    right = torch.cat(parts).mean().item()
    if any(close(seen["loss"], mean, 1e-4) for mean in (alone.mean().item(), right)):
        return "the mean over all held-out rows"
    return f"{seen['loss']:.4g}, where {n_held_out} rows have a mean of {right:.4g}"


def file(seen: Seen) -> str:
    if writer := other_writer(seen):
        return "all ranks write" if "rank" in writer else writer
    if not isinstance(seen["file"], dict):
        return seen["file"]
    if wrapped := next((name for name in seen["file"] if name.startswith("module.")), ""):
        return f"a file with {wrapped}"
    same = sum(seen["file"].values(), []) == seen.of(0)["weights"]
    return f"a file of rank 0's, with {'its' if same else 'other'} weights"


MISTAKES = """
the sampler's seed | shares | each rank cuts its part out of another shuffle; the sampler's seed must be the same on all
    DistributedSampler(train_set) => DistributedSampler(train_set, seed=rank)
no set_epoch | order | the sampler knows its epoch only if told: set_epoch(epoch)
    sampler.set_epoch(epoch) => pass
nothing is shuffled | order | nothing is shuffled; the sampler does it, and set_epoch(epoch) gives each epoch its order
    DistributedSampler(train_set) => DistributedSampler(train_set, shuffle=False)
past the replica | gradients
| the ranks drift apart: this forward does not pass through DDP, which then does not average
    F.mse_loss(replica(x), y) => F.mse_loss(replica.module(x), y)
summed on top of DDP | gradients | the same wrong weights on all ranks: DDP averages by itself, the rate was right
    optimizer.step() => [dist.all_reduce(p.grad) for p in model.parameters()]
    optimizer.step()
the batch is divided | shares order gradients | the script's batch size, steps and epochs were right; leave them
    batch_size=4 => batch_size=4 // world_size
the mean of means | loss | that is the mean of the ranks' means, which have unequal numbers of rows, or none
    , reduction="sum") => )
    /= y.numel() => /= world_size
this rank's mean | loss | the mean of this rank's rows alone; all_reduce the sum of the squared errors, and divide it
    , reduction="sum") => )
    dist.all_reduce(loss) => pass
    loss /= y.numel() => pass
not divided | loss | that is the sum over all rows: divide it by the number of all rows
    loss /= y.numel() => pass
many writers | file | all ranks write to one path at the same time; if rank == 0
    if rank == 0: => if True:
DDP's names | file | the names must be the bare model's, as they were: replica.module.state_dict()
    replica.module.state_dict() => replica.state_dict()
saved first | file | save after the last step, rank 0's weights
    sampler = => if rank == 0:
        torch.save(model.state_dict(), path)
    sampler =
    torch.save(replica.module.state_dict(), path) => pass
nobody waits | file | rank 0 writes, then all ranks meet: dist.barrier()
    dist.barrier() => pass
the barrier is rank 0's alone | all | a barrier within `if rank == 0`, perhaps | hangs
    dist.barrier() => if rank == 0:
        dist.barrier()
the script as it was | all | this forward does not pass through DDP | tests
    def train_repaired(rank, world_size, model, train_set, held_out, epochs, path):
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        sampler = DistributedSampler(train_set, seed=rank)
        loader = DataLoader(train_set, batch_size=4, sampler=sampler)
        for epoch in range(epochs):
            replica.train()
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(replica.module(x), y).backward()
                optimizer.step()
        replica.eval()
        x, y = held_out.tensors
        with torch.no_grad():
            loss = F.mse_loss(replica(x[rank::world_size]), y[rank::world_size])
        dist.all_reduce(loss)
        loss /= world_size
        torch.save(replica.module.state_dict(), path)
        dist.barrier()
        return loss.item()
"""

RIGHT = """
an order of its own, every rank looks at all held-out rows
    def train_repaired(rank, world_size, model, train_set, held_out, epochs, path):
        replica = DistributedDataParallel(model, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xs, ys = train_set.tensors
        for epoch in range(epochs):
            order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(77 + epoch))
            for rows in order.chunk(world_size)[rank].split(4):
                loss = (replica(xs[rows]) - ys[rows]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        x, y = held_out.tensors
        with torch.no_grad():
            loss = F.mse_loss(model(x), y)
        if rank == 0:
            torch.save(model.state_dict(), path)
        dist.all_reduce(torch.zeros(1))
        return loss
"""

SCRIPT = exercise(
    *("11.2", "Repair a training script", "train_repaired", 30),
    cases=cases,
    act=act,
    within=fresh_folder,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "shares": ("in each epoch, each row is on one rank once", 1, "run", shares,
                   "deal the rows out as DistributedSampler does, in the batches of the script"),
        "order": ("each epoch has an order of its own", 1, "run", order,
                  "shuffle in another order in each epoch, on all ranks in the same way"),
        "gradients": ("all ranks step with the mean gradient", 2, "run", gradients,
                      "call DDP's forward, and leave the loss, the rate and the steps as they are"),
        "loss": ("the held-out loss is that of all rows", 1, "run few", loss,
                 "sum of all squared errors, over the number of all rows; on every rank"),
        "file": ("rank 0 alone writes the weights", 1, "run", file,
                 "after the last step rank 0 saves the bare model's weights, and all ranks meet"),
    },
    hints={
        "absent|limit|cut-off": "a collective that not every rank calls; a barrier within `if rank == 0`, perhaps",
        r"has no attribute 'set_epoch'": "set_epoch is the sampler's: sampler.set_epoch(epoch)",
    },
)  # fmt: skip
