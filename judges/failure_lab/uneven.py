"""12.3 `train_uneven(...)`: with unequal numbers of batches, is every row trained on once, and nothing hangs?

Read next: `grading/checking.py`, what becomes of all this.
"""

from __future__ import annotations

from random import Random

import torch

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from ddp_course.grading.vocabulary.seen_samples import Noted, numbered

BATCH, RATE = 3, 0.08


def cases(rng: Random) -> list[Round]:
    """Train with unequal numbers of batches, rank 0 not with the most, then with a rank that has none."""
    seed = rng.randint(1, 1000)
    first, second = rng.sample((2, 3, 4), 2)
    uneven = rng.sample(range(1, 6), first)
    uneven.insert(rng.randrange(1, first), uneven.pop(uneven.index(max(uneven))))
    empty = [*rng.sample(range(2, 5), second - 1), 0]
    rng.shuffle(empty)
    return [Round(first, [("uneven", (seed, uneven))]), Round(second, [("empty", (seed + 1, empty))])]


def act(function, case: tuple[int, list[int]], rank: int, world_size: int) -> Note:
    """Note the result, the rows and the weights after training on this rank's batches, given one by one."""
    seed, counts = case
    model, generator = Noted(tasks.net(seed, 3, 1).float()), torch.Generator().manual_seed(seed)

    def batch(number: int) -> tasks.Batch:  # all rows are numbered
        x = numbered(torch.randn(BATCH, 3, generator=generator), number)
        return x, 3 * torch.randn(BATCH, 1, generator=generator)

    batches = [batch(number) for number in range(0, BATCH * sum(counts), BATCH)]
    before = sum(counts[:rank])
    own = iter(batches[before : before + counts[rank]])  # a stream does not know its end
    result = function(rank, world_size, model, own, RATE)
    seen = sum((numbers for learns, _, numbers in model.passes if learns), [])
    return Note(value=plain(result), rows=sorted(seen), weights=tasks.weights(model))


def own_rows(seen: Seen) -> int:
    return BATCH * seen.case[1][seen.rank]


def rows(seen: Seen) -> dict:
    return {"rows that this rank trains on": seen["rows"]}


def weights(seen: Seen) -> dict:
    return {"weights": seen["weights"]}


def count(seen: Seen) -> dict:
    return {"number of rows": flat(seen["value"])}


def why_rows(seen: Seen) -> str:
    if len(set(seen["rows"])) < len(seen["rows"]):
        return "train on each batch once"
    if len(seen["rows"]) < own_rows(seen):
        return "rows are lost: the ranks stop when the first of them has no more batches"
    return "batches are used again to fill up; a rank without a batch takes part, but with nothing"


def why_weights(seen: Seen) -> str:
    if not all(close(seen.of(rank)["weights"], seen["weights"], 1e-5) for rank in range(seen.world_size)):
        return "a rank without a batch must take the step, too, with the others' gradient; the ranks differ"
    return (
        "a wrong mean: add up the gradients of all ranks, and divide by how many had a batch in this step; or the "
        "gradients of the step before are still in .grad"
    )


MISTAKES = """
plain DDP | all | must take part in the collectives until no rank has one, and no longer | hangs
    with Join([replica], divide_by_initial_world_size=False): => if True:
an all_reduce of its own within Join | all | move your own after the `with` | hangs
    rows += len(inputs) => now = torch.tensor([len(inputs)])
    dist.all_reduce(now)
    rows += now
    dist.all_reduce(rows) => pass
Join as it comes | whole none
| divided by the world size; divide by how many had a batch in this step (Join: divide_by_initial_world_size=False)
    , divide_by_initial_world_size=False =>
no zero_grad | whole none
| the gradients of the steps before are still in .grad; call zero_grad() before each backward
    optimizer.zero_grad() => pass
its own rows only are counted | count none | these are the rank's own rows; add them up over the ranks
    dist.all_reduce(rows) => pass
batches are counted | count none | these are batches; count rows
    rows += len(inputs) => rows += 1
all stop with the first | rows whole count none
| rows are lost: the ranks stop when the first of them has no more batches
    replica = => batches, counts = list(batches), [None] * world_size
    dist.all_gather_object(counts, len(batches))
    batches = batches[: min(counts)]
    replica =
the first batches again, to fill up | rows whole count none
| batches are used again to fill up; a rank without a batch takes part, but with nothing
    replica = => batches, counts = list(batches), [None] * world_size
    dist.all_gather_object(counts, len(batches))
    batches = [batches[step % len(batches)] for step in range(max(counts))] if batches else []
    replica =
the length of an iterator | all | take them one by one
    replica = => n_batches = len(batches)
    replica =
a rank that has no batch leaves its process | all | remove exit(), sys.exit() or os._exit()
    dist.all_reduce(rows) => dist.all_reduce(rows)
    raise SystemExit
a rank without a batch takes no step | whole none
| a rank without a batch must take the step, too, with the others' gradient; the ranks differ | tests
    def train_uneven(rank, world_size, model, batches, rate):
        total = torch.tensor(0)
        while True:
            inputs, targets = next(batches, (torch.zeros(0, 4), torch.zeros(0, 1)))
            n = torch.tensor(len(inputs))
            dist.all_reduce(n)
            if n == 0:
                return total
            total += n
            model.zero_grad()
            (F.mse_loss(model(inputs), targets, reduction="sum") / n).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.data -= rate * p.grad * (len(inputs) > 0)
trains alone | whole count none | a rank without a batch must take the step, too | tests
    def train_uneven(rank, world_size, model, batches, rate):
        optimizer, rows = torch.optim.SGD(model.parameters(), lr=rate), 0
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            rows += len(inputs)
        return rows
"""

RIGHT = """
all counts first, one flat all_reduce
    def train_uneven(rank, world_size, model, batches, rate):
        batches, counts = list(batches), [None] * world_size
        dist.all_gather_object(counts, [len(x) for x, _ in batches])
        for step in range(max(map(len, counts))):
            model.zero_grad()
            if step < len(batches):
                F.mse_loss(model(batches[step][0]), batches[step][1]).backward()
            flat = torch.cat([(p * 0 if p.grad is None else p.grad).detach().flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            flat /= sum(step < len(of_rank) for of_rank in counts)
            for p, mean in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                p.data -= rate * mean.view_as(p)
        return sum(map(sum, counts))
"""

UNEVEN = exercise(
    *("12.3", "Uneven inputs", "train_uneven", 25),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case[1]} batches of {BATCH} rows on the ranks:",
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=5e-5,
    checks={
        "rows": ("each row is trained on once", 1, "uneven", rows, why_rows),
        "whole": ("the weights are those of one process", 2, "uneven", weights, why_weights),
        "count": ("every rank returns the number of all rows", 1, "uneven", count,
                  "the number of rows trained on by all ranks together, the same on every rank"),
        "none": ("all of this with a rank that has no batch", 1, "empty",
                 lambda seen: {**rows(seen), **weights(seen), **count(seen)},
                 lambda seen: why_weights(seen) if len(seen["rows"]) == own_rows(seen) else why_rows(seen)),
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
)  # fmt: skip
