"""12.3 `train_uneven(...)`: with unequal numbers of batches, is every row trained on once, and nothing hangs?

The judge takes the same steps in one process: step t on the batches number t of the ranks that have one.

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import all_of, equals, exercise, first_mistake, once, turned
from ddp_course.grading.vocabulary.noted import Noted, numbered
from ddp_course.grading.vocabulary.play import Note, Round, Seen

BATCH, RATE = 3, 0.08


@dataclass(frozen=True)
class Case:
    """How many batches each rank has, and from which seed they are."""

    seed: int
    counts: tuple[int, ...]

    def model(self) -> Noted:
        """Return the linear model that is trained."""
        return Noted(tasks.net(self.seed, 3, 1).float())

    def batches(self) -> list[list[tasks.Batch]]:
        """Make the batches of each rank; all rows are numbered."""
        generator = torch.Generator().manual_seed(self.seed)

        def batch(number: int) -> tasks.Batch:
            x = numbered(torch.randn(BATCH, 3, generator=generator), number)
            return x, 3 * torch.randn(BATCH, 1, generator=generator)

        made = iter([batch(number) for number in range(0, BATCH * sum(self.counts), BATCH)])
        return [[next(made) for _ in range(count)] for count in self.counts]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Note the result, the rows and the weights after training on this rank's batches, given one by one."""
    model = case.model()
    result = function(rank, world_size, model, iter(case.batches()[rank]), RATE)  # a stream does not know its end
    rows = sum((rows for learns, _, rows in model.passes if learns), [])
    return Note(value=plain(result), rows=rows, weights=tasks.weights(model))


def rounds(rng: Random) -> list[Round]:
    """Train with unequal numbers of batches, rank 0 not with the most, then with a rank that has none."""
    seed = rng.randint(1, 1000)
    first, second = rng.sample((2, 3, 4), 2)
    uneven = rng.sample(range(1, 6), first)
    uneven.insert(rng.randrange(1, first), uneven.pop(uneven.index(max(uneven))))
    empty = [*rng.sample(range(2, 5), second - 1), 0]
    rng.shuffle(empty)
    cases = [("uneven", Case(seed, tuple(uneven))), ("empty", Case(seed + 1, tuple(empty)))]
    return [Round(len(case.counts), [(name, case)]) for name, case in cases]


def trained(seen: Seen, end=max, divisor=len, keep: bool = False) -> list[float]:
    """Return the weights after the same steps in one process.

    Args:
        end: of the ranks' numbers of batches, how many steps there are.
        divisor: of the batches of a step, by what the sum of their gradients is divided.
        keep: whether the gradients of the steps before are still in each step's.
    """
    model, batches, kept_P = seen.case.model().double(), seen.case.batches(), 0.0
    for step in range(end(seen.case.counts)):
        present = [of_rank[step] for of_rank in batches if step < len(of_rank)]
        sum_P = sum(tasks.gradient(model, (x.double(), y.double())) for x, y in present)
        mean_P = sum_P / divisor(present) + kept_P
        kept_P = mean_P if keep else 0.0
        tasks.descend(model, mean_P, RATE)
    return tasks.weights(model)


def slips(seen: Seen) -> Iterator[tuple[str, Any]]:
    """Wrong weights; when the ranks have different ones, no process has done the same."""
    found = seen["weights"]
    if not all(close(seen.of(rank)["weights"], found, 1e-5) for rank in range(seen.world_size)):
        yield "a rank without a batch must take the step, too, with the others' gradient; the ranks differ", found
    mistakes = {
        "gradients are divided by the world size in each step; divide by the number of ranks that had a batch "
        "(Join: divide_by_initial_world_size=False)": {"divisor": lambda present: seen.world_size},
        "gradients are summed over the ranks; divide by the number of ranks that had a batch":
            {"divisor": lambda present: 1},
        "the gradients of the steps before are still in .grad; call zero_grad() before each backward": {"keep": True},
        "the steps end when the first rank has no more batches": {"end": min},
    }  # fmt: skip
    yield from turned(trained, mistakes)(seen)


weights = equals(
    lambda seen, right: f"weights {short(right)}: each step with the mean over the rows there are",
    trained,
    slips,
    "a wrong mean: add up the gradients of all ranks, and divide by how many had a batch in this step; or the "
    "gradients of the step before are still in .grad",
    of="weights",
    tolerance=5e-5,
)
count = equals(
    lambda seen, right: f"{right} rows",
    lambda seen: BATCH * sum(seen.case.counts),
    lambda seen: [
        ("these are the rank's own rows; add them up over the ranks", BATCH * seen.case.counts[seen.rank]),
        ("these are batches; count rows", sum(seen.case.counts)),
    ],
    "the number of rows trained on by all ranks together, the same on every rank",
    tolerance=0,
)


lost = "rows are lost: the ranks stop when the first of them has no more batches"
n_batches = equals(
    "each batch of this rank once, so their number is",
    lambda seen: seen.case.counts[seen.rank],
    lambda seen: [(lost, fewer) for fewer in range(seen.case.counts[seen.rank])],
    "batches are used again to fill up; a rank without a batch takes part, but with nothing",
    of=lambda seen: len(seen["rows"]) // BATCH,
    tolerance=0,
)


def no_row_twice(seen: Seen) -> Fault | None:
    """No row is trained on again."""
    row, times = Counter(sum((note["rows"] for note in seen.everyone), [])).most_common(1)[0]
    return first_mistake("each row once", {"train on each batch once": times > 1 and f"row {row} {times} times"})


rows = all_of(n_batches, once(no_row_twice))

UNEVEN = exercise(
    "12.3",
    "Uneven inputs",
    "train_uneven",
    25,
    act=act,
    rounds=rounds,
    checks={
        "rows": ("each row is trained on once", 1, rows, "uneven"),
        "whole": ("the weights are those of one process", 2, weights, "uneven"),
        "count": ("every rank returns the number of all rows", 1, count, "uneven"),
        "none": ("all of this with a rank that has no batch", 1, all_of(rows, weights, count), "empty"),
    },
    hints={
        r"has no len|object of type 'list_iterator'": "`batches` is an iterator: take them one by one, next(...)",
        r"StopIteration": "next(batches, None) gives None at the end",
        r"with Join\(": "within Join, a rank that is done answers only DDP's collectives: move your own after the "
        "`with`; and all batches are to be used up within it",
        "absent|limit|cut-off|disagree|sizes": "a rank "
        "without a batch must take part in the collectives until no rank has one, and no longer; ask before each step "
        "who has one, or use Join",
    },
)
