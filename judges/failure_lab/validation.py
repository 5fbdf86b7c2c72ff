"""12.2 `train_and_validate(...)`: do all ranks validate together, and stop together?

The model notes the rows of each forward, and its mode.

Read next: `uneven.py`.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from ddp_course.grading.vocabulary.seen_samples import Noted, numbered

BATCH, STEPS = 8, 12
AWAY, FAR = 500.0, 2.0**60  # of targets: so losses differ by little; in float64, too, `FAR` less a prediction is `FAR`

# Runs by the number of ranks: a seed, the number of held-out rows, and after how many steps to validate. They are
# chosen: no two validations are nearer than 5 %, and by its own rows alone some rank would stop at another step; but in
# SLIGHT the last is worse by less than 1 %.
RUNS = {
    2: ((9247, 9, 2), (1935, 7, 3), (5686, 7, 2), (6865, 5, 3),
        (1153, 7, 2), (1392, 7, 2), (4961, 5, 2), (686, 5, 2)),
    3: ((55, 11, 3), (9886, 10, 3), (5910, 10, 3), (8372, 11, 3),
        (5542, 11, 2), (7755, 8, 3), (1787, 10, 2), (8593, 8, 2)),
    4: ((4941, 11, 3), (8963, 17, 2), (8165, 9, 3), (3733, 10, 3),
        (3246, 18, 2), (7621, 9, 2), (1786, 14, 3), (3659, 17, 3)),
}  # fmt: skip
SLIGHT = ((6833, 7, 3), (9746, 7, 3), (6447, 7, 3), (9767, 7, 3), (986, 7, 3), (6445, 8, 3))


def cases(rng: Random) -> list[Round]:
    """Run twice, with two world sizes; the validations get better, then clearly worse, before the last batch.

    Then with fewer rows than ranks and validations that stay the same, without a validation, and with one that is a
    little worse. A case ends with how far targets are away: by `FAR`, all validations have the same loss, bit for bit.
    """
    one, two = rng.sample((2, 3, 4), 2)
    edges = [("still", (rng.randint(1, 10_000), 2, 5, FAR)), ("never", (rng.randint(1, 10_000), 2, STEPS + 1, FAR))]
    return [
        Round(one, [("one", (*rng.choice(RUNS[one]), 0.0))]),
        Round(two, [("two", (*rng.choice(RUNS[two]), 0.0))]),
        Round(3, [*edges, ("slight", (*rng.choice(SLIGHT), AWAY))]),
    ]


def act(function, case: tuple[int, int, int, float], rank: int, world_size: int) -> Note:
    """Note what comes back, the rows that are predicted and the modes of the steps."""
    seed, n_held_out, every, away = case
    model = Noted(nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), *tasks.net(seed, 3, 1)).float())
    generator = torch.Generator().manual_seed(seed)
    answer = torch.randn(3, 1, generator=generator)

    def rows(n: int, shift: float) -> tasks.Batch:
        x = torch.randn(n, 3, generator=generator) + shift  # another shift, other running statistics
        return numbered(x), x @ answer

    batches = [[rows(BATCH, one / 2) for _ in range(STEPS)] for one in range(world_size)][rank]
    batches = [(x, y if i < STEPS // 2 else -4 * y) for i, (x, y) in enumerate(batches)]  # then they teach nonsense
    x, y = rows(n_held_out, 0.5)
    # Some rows contradict the others, so the ranks' shares get better and worse at different steps.
    y = y * (torch.rand(n_held_out, 1, generator=generator) * 4 - 1.2) + away
    result = plain(function(rank, world_size, model, batches, (x, y), every))
    return Note(
        result=result if isinstance(result, list) else [result],
        predicted=sum((rows for learns, _, rows in model.passes if not learns), []),
        modes=[training for learns, training, _ in model.passes if learns],
    )


def stop(seen: Seen) -> dict:
    return {"steps:": len(seen["modes"]), "steps that are returned:": seen["result"][1]}


def best(seen: Seen) -> dict:
    return {"best loss:": seen["result"][0]}


def shares(seen: Seen) -> dict:
    predicted = [of["predicted"] for of in seen.everyone]
    times = Counter(sum(predicted, []))
    alone = len(predicted[0]) == sum(map(len, predicted))
    return {"how often each row is predicted:": [times[row] for row in range(seen.case[1])], "by rank 0 alone:": alone}


def eval_steps(seen: Seen) -> dict:
    of_eval = [step for step, training in enumerate(seen["modes"], 1) if not training]
    return {"steps in eval mode:": of_eval if seen["modes"] else "there is no step"}


def why_loss(seen: Seen) -> str:
    if not isinstance(seen["result"][0], int | float):
        return "return a number on every rank: the best loss"
    return (
        "the sum of squared errors of all rows, over their number, predicted with rank 0's running statistics; the "
        "least of all validations"
    )


MISTAKES = """
the script as it was | all | rank 0 alone leaves the loop by its `break`; the others wait in the next step | hangs
    if step % every == 0: => if step % every == 0 and rank == 0:
    [rank::world_size] =>
    dist.all_reduce(total) => pass
each rank stops by the loss of its own rows | all | each rank stops by the loss of its own rows | hangs
    dist.all_reduce(total) => pass
    / len(x) => / len(x[rank::world_size])
rank 0 validates alone, and tells the others | once | the others wait; give each rank its share
    replica(x[rank::world_size]), y[rank::world_size], => replica.module(x), y,
    reduction="sum") => reduction="sum") if rank == 0 else torch.zeros(())
every rank validates all rows | once | every rank does all of the work; take x[rank::world_size]
    [rank::world_size] =>
    / len(x) => / len(x) / world_size
stops at a loss that is 1 % worse | stop | a validation that is worse by less than 1 % is worse, too
    loss > best => loss > best * 1.01
stops at an equal loss | stop | a validation that is as good as the best is not worse
    loss > best => loss >= best
nobody stops | stop once | this rank does not stop; all ranks must know the loss, and stop by it
    break => continue
its own running statistics | loss
| each rank predicted with its own running statistics; the forward of `replica` hands out rank 0's
    F.mse_loss(replica(x[ => F.mse_loss(replica.module(x[
the mean of no rows, times no rows | loss | a rank without rows divides 0 by 0; add up sums, and divide once
    , reduction="sum") => ) * len(y[rank::world_size])
0 where no validation took place | loss | return what `best` was at the beginning, math.inf
    best = math.inf => best = 0.0 if every > 12 else math.inf
the mean of the means | loss
| this is the mean of the ranks' means; ranks have different numbers of rows: reduce sums and counts
    , reduction="sum" =>
    / len(x) => / world_size
the sum over all rows | loss | this is the sum over all rows; divide it by the number of all rows
     / len(x) =>
by the ranks as well | loss | every rank has the loss of all rows already, so do not divide by the ranks
    / len(x) => / len(x) / world_size
evaluation mode for ever | loss mode
| the validation calls eval(); call train() before the next step, on every rank
    replica.train() => pass
an empty list comes back | stop loss | return the best loss and the number of steps done, on every rank
    return best, step => return []
only rank 0 returns the loss | loss | return a number on every rank
    return best, step => return (best if rank == 0 else None), step
the rest is left out | stop loss once | the shares overlap, or leave rows out; x[rank::world_size] does neither
    x, y = held_out => x, y = (t[: len(t) // world_size * world_size] for t in held_out)
no validation at all | stop loss once | this rank does not stop | tests
    def train_and_validate(rank, world_size, model, batches, held_out, every):
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
        for step, (inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            F.mse_loss(replica(inputs), targets).backward()
            optimizer.step()
        return math.inf, step
does nothing | all | return the best loss and the number of steps done | tests
    def train_and_validate(rank, world_size, model, batches, held_out, every):
        pass
"""

RIGHT = """
the bare model with broadcast statistics; rank 0 decides and tells
    def train_and_validate(rank, world_size, model, batches, held_out, every):
        replica, best = DistributedDataParallel(model), torch.tensor(math.inf)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
        x, y = (tensor.tensor_split(world_size)[rank] for tensor in held_out)
        for step, (inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            F.mse_loss(replica(inputs), targets).backward()
            optimizer.step()
            if step % every == 0:
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)
                model.eval()
                with torch.no_grad():
                    total = torch.stack([(model(x) - y).square().sum(), torch.tensor(float(len(x)))])
                model.train()
                dist.reduce(total, dst=0)
                verdict = torch.tensor([total[0] / total[1], total[0] / total[1] > best])
                dist.broadcast(verdict, src=0)
                if verdict[1]:
                    break
                best = verdict[0]
        return best, step
"""

VALIDATION = exercise(
    *("12.2", "Fix a validation that hangs", "train_and_validate", 25),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=1e-3,
    checks={
        "stop": ("all ranks stop after the same step", 2, "one two still never slight", stop,
                 "all ranks must stop by the same number: that of all rows, not that of their own; return it, too"),
        "loss": ("the loss is that of all rows, on every rank", 2, "one two still never", best, why_loss),
        "once": ("the ranks share the rows", 1, "one two", shares,
                 "each row is predicted once in each validation; x[rank::world_size] does this"),
        "mode": ("every step is in training mode", 1, "one two", eval_steps,
                 "the validation calls eval(); call train() before the next step, on every rank"),
    },
    hints={
        "absent|limit|cut-off|disagree|sizes": "rank 0 does "
        "something that the others do not: a `break`, a collective, or a forward of `replica`, which broadcasts the "
        "running statistics; or each rank stops by the loss of its own rows",
    },
)  # fmt: skip
