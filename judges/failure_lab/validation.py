"""12.2 `train_and_validate(...)`: do all ranks validate together, and stop together?

The model notes the rows of each forward. The judge repeats the whole run in one process: the steps with the mean
gradient of all ranks, rank 0's running statistics, the validations, the stop. It takes only runs in which some rank
would stop at another step, if it looked at the loss of its own rows alone.

Read next: `uneven.py`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ddp_course.grading.compare import close, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

BATCH, RATE, MARGIN = 8, 0.05, 1.05  # a validation is better or worse by 5 % at least
STEPS = 12

Note = dict[str, Any]


class Noted(nn.Module):
    """A small network with running statistics; notes which validation rows it sees, and its mode in each step."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.linear = nn.BatchNorm1d(3, momentum=0.3), nn.Linear(3, 1)
        self.seen: list[list[int]] = []  # of each forward without gradients: the rows' numbers
        self.modes: list[bool] = []  # of each forward with gradients

    def forward(self, x):
        if torch.is_grad_enabled():
            self.modes.append(self.training)
        else:
            self.seen.append([round(number) for number in x[:, 3].tolist()])
        return self.linear(self.norm(x[:, :3]))


@dataclass(frozen=True)
class Task:
    """One run: all ranks' batches, the held-out rows, and how often to validate."""

    seed: int
    world_size: int
    n_held_out: int
    every: int

    def data(self) -> tuple[list[list[tuple]], tuple[torch.Tensor, torch.Tensor]]:
        """Make the batches of each rank, and the held-out rows; from the middle on, the batches teach nonsense."""
        generator = torch.Generator().manual_seed(self.seed)
        answer = torch.randn(3, 1, generator=generator)

        def rows(n: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.randn(n, 4, generator=generator) + shift  # another shift, other running statistics
            x[:, 3] = torch.arange(n)
            return x, x[:, :3] @ answer

        good = STEPS // 2
        batches = [[rows(BATCH, rank / 2) for _ in range(STEPS)] for rank in range(self.world_size)]
        batches = [[(x, y if i < good else -4 * y) for i, (x, y) in enumerate(of_rank)] for of_rank in batches]
        x, y = rows(self.n_held_out, 0.5)
        # Some rows contradict the others, so the ranks' shares get better and worse at different steps.
        factors = torch.rand(self.n_held_out, 1, generator=generator) * 4 - 1.2
        return batches, (x, y * factors)


@dataclass(frozen=True)
class Expected:
    """What a right answer returns, and what wrong ones may."""

    best: float
    step: int
    validations: int
    own: list[float]  # the best step's mean over each rank's share
    clear: bool  # no two validations are close to each other, and not all ranks' own rows tell the same stop


def repeated(task: Task) -> Expected:
    """Train in one process, validate on all rows, and stop where the ranks should."""
    batches, (x, y) = task.data()
    model, losses = Noted(task.seed).double(), []
    for step in range(1, STEPS + 1):
        _step(model, [of_rank[step - 1] for of_rank in batches])
        if step % task.every == 0:
            model.eval()
            with torch.no_grad():
                squares = (model(x.double()) - y.double()).square().flatten()
            model.train()
            losses.append(squares)
            if len(losses) > 1 and squares.mean() > losses[-2].mean():
                break
    means = [squares.mean().item() for squares in losses]
    strided = [
        torch.stack([part[rank :: task.world_size].mean() for part in losses]) for rank in range(task.world_size)
    ]
    blocks = [torch.stack(of_rank) for of_rank in zip(*[_block_means(part, task) for part in losses], strict=True)]
    clear = _turn(means) == _turn(torch.stack(strided).mean(0).tolist()) == len(means) - 1
    n_even = task.n_held_out // task.world_size * task.world_size  # to leave out the rest is a mistake of its own
    clear &= _turn([part[:n_even].mean().item() for part in losses]) == len(means) - 1
    for shares in (strided, blocks):
        clear &= any(_turn(own.tolist()) not in (None, len(means) - 1) for own in shares)
    best = means.index(min(means))
    return Expected(min(means), step, len(means), [own[best].item() for own in strided], clear and step < STEPS)


def _block_means(squares: torch.Tensor, task: Task) -> list[torch.Tensor]:
    return [block.mean() for block in squares.tensor_split(task.world_size)]


def _turn(losses: list[float]) -> int | None:
    """Return which validation is the first worse one, the number of all if none is; None if it is a close call."""
    for number in range(1, len(losses)):
        before, now = losses[number - 1 : number + 1]
        if max(before, now) < MARGIN * min(before, now):
            return None
        if now > before:
            return number
    return len(losses)


def _step(model: Noted, batches: list[tuple]) -> None:
    """One step on all ranks' batches: the mean gradient, and the running statistics of rank 0."""
    others = [copy.deepcopy(model) for _ in batches[1:]]
    gradients = []
    for replica, (x, y) in zip([model, *others], batches, strict=True):
        replica.zero_grad()
        F.mse_loss(replica(x.double()), y.double()).backward()
        gradients.append([p.grad for p in replica.parameters()])
    with torch.no_grad():
        for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter -= RATE * torch.stack(of_ranks).mean(0)


def chosen_task(rng: Random, world_size: int) -> tuple[Task, Expected]:
    """Choose a run whose validations get better, then clearly worse, before the last batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small steps would mostly wait for the other threads
    try:
        while True:
            n_held_out = world_size * rng.randint(2, 4) + rng.randint(1, world_size - 1)
            task = Task(rng.randint(1, 10_000), world_size, n_held_out, rng.choice((2, 3)))
            expected = repeated(task)
            if expected.clear and expected.validations >= 3:
                return task, expected
    finally:
        torch.set_num_threads(threads)


def validation_driver(rank: int, world_size: int, function: Callable, task: Task) -> Note:
    """Run the answer; note what it returns, the rows it predicts and the modes it trains in."""
    batches, held_out = task.data()
    model = Noted(task.seed)
    result = function(rank, world_size, model, batches[rank], held_out, task.every)
    parts = [plain(part) for part in result] if isinstance(result, tuple | list) else [plain(result)]
    return {"result": parts, "seen": model.seen, "modes": model.modes}


def validation_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Run twice, with two world sizes, and compare with one process."""
    notes: list[tuple[Task, Expected, list[Note]]] = []
    for world_size in rng.sample((2, 3, 4), 2):
        task, expected = chosen_task(rng, world_size)
        notes.append((task, expected, answer.run(validation_driver, world_size, task, init=True)))
    for key, fault_of in (
        ("stop", _stop_fault),
        ("loss", _loss_fault),
        ("once", _once_fault),
        ("mode", _mode_fault),
    ):
        yield key, next(filter(None, (fault_of(*note) for note in notes)), None)


def _stop_fault(task: Task, expected: Expected, notes: list[Note]) -> Fault | None:
    said = f"{expected.step} steps on every rank: the validation after step {expected.step} is worse than the best"
    for rank, note in enumerate(notes):
        steps = len(note["modes"])
        if steps != expected.step:
            cause = "all ranks must stop by the same number: that of all rows, not that of their own"
            if steps == STEPS:
                cause = "this rank does not stop; all ranks must know the loss, and stop by it"
            return Fault(said, f"{steps} steps", rank, cause)
        if len(note["result"]) != 2 or note["result"][1] != expected.step:
            cause = "return the best loss and the number of steps done, on every rank"
            return Fault(said, f"returned {short(note['result'])}", rank, cause)
    return None


def _loss_fault(task: Task, expected: Expected, notes: list[Note]) -> Fault | None:
    said = f"{expected.best:.5g}, the best mean over all {task.n_held_out} rows"
    for rank, note in enumerate(notes):
        found = note["result"][0]
        if close(found, expected.best, 1e-3):
            continue
        return Fault(said, short(found), rank, _loss_cause(task, expected, found, rank))
    return None


def _loss_cause(task: Task, expected: Expected, found: Any, rank: int) -> str:
    own = expected.own
    if not isinstance(found, int | float) or isinstance(found, bool):
        return "return a number on every rank: the best loss, as a float"
    if close(found, own[rank], 1e-3) or close(found, own[0], 1e-3):
        return "this is the mean of one rank's rows; add up sums and counts over the ranks"
    if close(found, sum(own) / len(own), 1e-3):
        return "this is the mean of the ranks' means, but their shares are unequal; add up sums and counts"
    if close(found, expected.best * task.n_held_out, 1e-3) or close(found, sum(own), 1e-3):
        return "this is a sum over the ranks; divide by the number of all rows"
    if close(found, expected.best / task.world_size, 1e-3):
        return "every rank has the loss of all rows already, so do not divide by the ranks"
    if abs(found - expected.best) < 0.5 * expected.best:
        return (
            "close, but not it: either another validation's loss, or each rank predicted with its own running "
            "statistics; the forward of `replica` hands out rank 0's, that of `replica.module` does not"
        )
    return "the sum of squared errors of all rows, over their number; the least of all validations"


def _once_fault(task: Task, expected: Expected, notes: list[Note]) -> Fault | None:
    counts = Counter(row for note in notes for part in note["seen"] for row in part)
    said = f"each of {task.n_held_out} rows predicted once in each of {expected.validations} validations"
    per_rank = [sum(map(len, note["seen"])) for note in notes]
    whole = task.n_held_out * expected.validations
    if all(count == whole for count in per_rank):
        return Fault(said, "all rows on every rank", cause="every rank does all of the work; take x[rank::world_size]")
    if per_rank[0] == whole and not any(per_rank[1:]):
        return Fault(said, "all rows on rank 0, none elsewhere", cause="the others wait; give each rank its share")
    for row in range(task.n_held_out):
        if counts[row] != expected.validations:
            cause = "the shares overlap, or leave rows out; x[rank::world_size] does neither"
            return Fault(said, f"row {row} {counts[row]} times in all", cause=cause)
    return None


def _mode_fault(task: Task, expected: Expected, notes: list[Note]) -> Fault | None:
    for rank, note in enumerate(notes):
        if not all(note["modes"]):
            step = note["modes"].index(False) + 1
            cause = "the validation calls eval(); call train() before the next step, on every rank"
            return Fault("every step in training mode", f"step {step} in eval mode", rank, cause)
    return None


VALIDATION = Exercise(
    "12.2",
    "Mend a validation that hangs",
    "train_and_validate",
    25,
    (
        Check("stop", "all ranks stop after the same step", 2),
        Check("loss", "the loss is that of all rows, on every rank", 2),
        Check("once", "the ranks share the rows", 1),
        Check("mode", "every step is in training mode", 1),
    ),
    validation_judge,
    hints=(
        (
            r"never entered|no result after|lost the connection|disagree about collective|different sizes",
            "rank 0 does something that the others do not: a collective, a forward of `replica`, which broadcasts the "
            "running statistics also in a validation, or a `break`; or each rank stops by the loss of its own rows",
        ),
    ),
)
