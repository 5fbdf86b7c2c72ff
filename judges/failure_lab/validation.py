"""12.2 `train_and_validate(...)`: do all ranks validate together, and stop together?

The model notes the rows of each forward. The judge repeats the whole run in one process: the steps with the mean
gradient of all ranks, rank 0's running statistics, the validations, the stop. It takes only runs in which some rank
would stop at another step, if it looked at the loss of its own rows alone.

Read next: `uneven.py`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import equals, exercise, first_mistake, once
from ddp_course.grading.vocabulary.means import mean_slips
from ddp_course.grading.vocabulary.noted import Noted, numbered
from ddp_course.grading.vocabulary.play import Note, Round, Seen

BATCH, RATE, STEPS = 8, 0.05, 12
MARGIN, LITTLE = 1.05, 1.0005  # a validation is better or worse by 5 % at least; or by little, but clear of rounding
AWAY, FAR = 500.0, 2.0**60  # of targets: so losses differ by little; in float64, too, `FAR` less a prediction is `FAR`


@dataclass(frozen=True)
class Case:
    """One run: all ranks' batches, the held-out rows, and how often to validate."""

    seed: int
    world_size: int
    n_held_out: int
    every: int
    away: float = 0.0  # how far the targets are moved: by `FAR`, all validations have the same loss, bit for bit

    def model(self) -> Noted:
        """Return the small network, with running statistics."""
        return Noted(nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), *tasks.net(self.seed, 3, 1)).float())

    def data(self) -> tuple[list[list[tasks.Batch]], tasks.Batch]:
        """Make the batches of each rank, and the held-out rows; from the middle on, the batches teach nonsense."""
        generator = torch.Generator().manual_seed(self.seed)
        answer = torch.randn(3, 1, generator=generator)

        def rows(n: int, shift: float) -> tasks.Batch:
            x = torch.randn(n, 3, generator=generator) + shift  # another shift, other running statistics
            return numbered(x), x @ answer

        good = STEPS // 2
        batches = [[rows(BATCH, rank / 2) for _ in range(STEPS)] for rank in range(self.world_size)]
        batches = [[(x, y if i < good else -4 * y) for i, (x, y) in enumerate(of_rank)] for of_rank in batches]
        x, y = rows(self.n_held_out, 0.5)
        # Some rows contradict the others, so the ranks' shares get better and worse at different steps.
        factors = torch.rand(self.n_held_out, 1, generator=generator) * 4 - 1.2
        return batches, (x, y * factors + self.away)


class Course(NamedTuple):
    """What one process does, which a right answer does, too."""

    losses: list[float]  # of each validation
    step: int
    squares: list[torch.Tensor]  # of each rank's share, in the best validation
    clear: bool  # no two validations are close to each other, and not all ranks' own rows tell the same stop


@cache
def one_process(case: Case) -> Course:
    """Train in one process, validate on all rows, and stop where the ranks should."""
    batches, (x, y) = case.data()
    model, found = case.model().double(), []
    for step in range(1, STEPS + 1):
        _step(model, [of_rank[step - 1] for of_rank in batches])
        if step % case.every == 0:
            model.eval()
            with torch.no_grad():
                found.append((model(x.double()) - y.double()).square().flatten())
            model.train()
            if len(found) > 1 and found[-1].mean() > found[-2].mean():
                break
    if not found:
        return Course([math.inf], step, [], False)
    squares_VR = torch.stack(found)  # validations, rows
    losses, last = squares_VR.mean(1).tolist(), len(found) - 1
    strided = [squares_VR[:, rank :: case.world_size].mean(1).tolist() for rank in range(case.world_size)]
    blocks = [part.mean(1).tolist() for part in squares_VR.tensor_split(case.world_size, dim=1)]
    n_even = case.n_held_out // case.world_size * case.world_size  # to leave out the rest is a mistake of its own
    together = losses, torch.tensor(strided).mean(0).tolist(), squares_VR[:, :n_even].mean(1).tolist()
    clear = step < STEPS and {_turn(part) for part in together} == {last}
    for shares in (strided, blocks):
        clear &= any(_turn(own) not in (None, last) for own in shares)
    best_R = squares_VR[losses.index(min(losses))]
    return Course(losses, step, [best_R[rank :: case.world_size] for rank in range(case.world_size)], clear)


def _turn(losses: list[float], margin: float = MARGIN) -> int | None:
    """Return which validation is the first worse one, the number of all if none is; None if it is a close call."""
    for number in range(1, len(losses)):
        before, now = losses[number - 1 : number + 1]
        if max(before, now) < margin * min(before, now):
            return None
        if now > before:
            return number
    return len(losses)


def _step(model: Noted, batches: list[tasks.Batch]) -> None:
    """One step on all ranks' batches: the mean gradient, and the running statistics of rank 0."""
    replicas = [model, *(copy.deepcopy(model) for _ in batches[1:])]
    gradients = [tasks.gradient(one, (x.double(), y.double())) for one, (x, y) in zip(replicas, batches, strict=True)]
    tasks.descend(model, torch.stack(gradients).mean(0), RATE)


def rounds(rng: Random) -> list[Round]:
    """Run twice, with two world sizes; the validations get better, then clearly worse, before the last batch.

    Then with fewer rows than ranks and validations that stay the same, without a validation, and with one that is a
    little worse.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small steps would mostly wait for the other threads
    try:
        chosen = [_chosen(rng, world_size) for world_size in rng.sample((2, 3, 4), 2)]
        slight = _slight(rng)
    finally:
        torch.set_num_threads(threads)
    edges = [Case(rng.randint(1, 10_000), 3, 2, every, FAR) for every in (5, STEPS + 1)]
    return [
        *(Round(case.world_size, [(name, case)]) for name, case in zip(("one", "two"), chosen, strict=True)),
        Round(3, list(zip(("still", "never", "slight"), (*edges, slight), strict=True))),
    ]


def _chosen(rng: Random, world_size: int) -> Case:
    while True:
        n_held_out = world_size * rng.randint(2, 4) + rng.randint(1, world_size - 1)
        case = Case(rng.randint(1, 10_000), world_size, n_held_out, rng.choice((2, 3)))
        if one_process(case).clear and len(one_process(case).losses) >= 3:
            return case


def _slight(rng: Random) -> Case:
    while True:
        case = Case(rng.randint(1, 10_000), 3, rng.randint(7, 8), 3, AWAY)
        losses = one_process(case).losses
        if _turn(losses, LITTLE) == len(losses) - 1 and losses[-1] < 1.01 * losses[-2]:
            return case


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note what comes back, the rows that are predicted and the modes of the steps."""
    (batches, held_out), model = case.data(), case.model()
    result = plain(function(rank, world_size, model, batches[rank], held_out, case.every))
    return Note(
        result=result if isinstance(result, list) and result else [result],
        predicted=sum((rows for learns, _, rows in model.passes if not learns), []),
        modes=[training for learns, training, _ in model.passes if learns],
    )


def stop(seen: Seen) -> Fault | None:
    """The rank stops after the same step as one process, and says so."""
    steps, result, right = len(seen["modes"]), seen["result"], one_process(seen.case).step
    mistakes = {
        "this rank does not stop; all ranks must know the loss, and stop by it":
            steps == STEPS != right and not seen.case.away and f"{steps} steps",
        "a validation that is as good as the best is not worse":
            seen.case.away == FAR and steps != right and f"{steps} steps",
        "a validation that is worse by less than 1 % is worse, too":
            seen.case.away == AWAY and steps > right and f"{steps} steps",
        "all ranks must stop by the same number: that of all rows, not that of their own":
            steps != right and f"{steps} steps",
        "return the best loss and the number of steps done, on every rank":
            (len(result) != 2 or result[1] != right) and f"returned {short(result)}",
    }  # fmt: skip
    last = f"the validation after step {right} is" if right < STEPS else "no validation is"
    return first_mistake(f"{right} steps on every rank: {last} worse than the best", mistakes, seen.rank)


def slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    """Wrong losses."""
    best = min(one_process(seen.case).losses)
    yield from mean_slips(one_process(seen.case).squares, seen.rank)
    yield "every rank has the loss of all rows already, so do not divide by the ranks", best / seen.world_size
    close = (
        "close, but not it: either another validation's loss, or each rank predicted with its own running statistics; "
        "the forward of `replica` hands out rank 0's, that of `replica.module` does not"
    )
    if abs(seen["result"][0] - best) < 0.5 * best:
        yield close, seen["result"][0]


def form(found: Any) -> str:
    """Say why this is no loss."""
    if not isinstance(found, int | float):
        return "return a number on every rank: the best loss"
    return "nan: a rank without rows divides 0 by 0; add up sums, and divide once" if found != found else ""


best = equals(
    lambda seen, right: f"{right:.5g}, the best mean over all {seen.case.n_held_out} rows",
    lambda seen: min(one_process(seen.case).losses),
    slips,
    "the sum of squared errors of all rows, over their number; the least of all validations",
    of=lambda seen: seen["result"][0],
    tolerance=1e-3,
    form=form,
)


def loss(seen: Seen) -> Fault | None:
    """The best loss, or infinity."""
    if seen.case.every <= STEPS:
        return best(seen)
    cause = "return what `best` was at the beginning, math.inf"
    return first_mistake("inf, as no validation took place", {cause: seen["result"][0] != math.inf and seen["result"]})


def shared(seen: Seen) -> Fault | None:
    """Each row is predicted once in each validation, by one rank."""
    n_rows, times = seen.case.n_held_out, len(one_process(seen.case).losses)
    predicted = [note["predicted"] for note in seen.everyone]
    sizes, counts = [len(rows) for rows in predicted], Counter(sum(predicted, []))
    wrong = next((row for row in range(n_rows) if counts[row] != times), None)
    mistakes = {
        "every rank does all of the work; take x[rank::world_size]":
            min(sizes) == max(sizes) == n_rows * times and "all rows on every rank",
        "the others wait; give each rank its share":
            sizes[0] == n_rows * times == sum(sizes) and "all rows on rank 0, none elsewhere",
        "the shares overlap, or leave rows out; x[rank::world_size] does neither":
            wrong is not None and f"row {wrong} {counts[wrong]} times in all",
    }  # fmt: skip
    return first_mistake(f"each of {n_rows} rows predicted once in each of {times} validations", mistakes)


def mode(seen: Seen) -> Fault | None:
    """Every step is in training mode."""
    cause = "the validation calls eval(); call train() before the next step, on every rank"
    found = not all(seen["modes"]) and f"step {seen['modes'].index(False) + 1} in eval mode"
    return first_mistake("every step in training mode", {cause: found}, seen.rank)


VALIDATION = exercise(
    "12.2",
    "Fix a validation that hangs",
    "train_and_validate",
    25,
    act=act,
    rounds=rounds,
    checks={
        "stop": ("all ranks stop after the same step", 2, stop, "one two still never slight"),
        "loss": ("the loss is that of all rows, on every rank", 2, loss, "one two still never"),
        "once": ("the ranks share the rows", 1, once(shared), "one two"),
        "mode": ("every step is in training mode", 1, mode, "one two"),
    },
    hints={
        "absent|limit|cut-off|disagree|sizes": "rank 0 does "
        "something that the others do not: a collective, a forward of `replica`, which broadcasts the running "
        "statistics also in a validation, or a `break`; or each rank stops by the loss of its own rows",
    },
)
