"""The answer bank of lesson 09: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

IMPORTS = """
import json
import logging
import os
from pathlib import Path
import torch
import torch.distributed as dist
from ddp_course import metrics
"""

MEAN, LOG, EVALUATE = solutions("09").values()

# --- 09.1 ------------------------------------------------------------------------------------------

MEAN_RIGHT = """
two asynchronous all_reduces, a tensor
    def mean_loss(rank, world_size, losses):
        total, count = losses.sum(), torch.tensor(losses.numel())
        works = [dist.all_reduce(number, async_op=True) for number in (total, count)]
        for work in works:
            work.wait()
        if not count:
            raise ValueError("no rows")
        return total / count
objects, gathered
    def mean_loss(rank, world_size, losses):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, (sum(losses.tolist()), len(losses)))
        rows = sum(count for _, count in everyone)
        if rows < 1:
            raise ValueError("no rank has a row")
        return torch.tensor([sum(total for total, _ in everyone) / rows])
reduce, a barrier, broadcast
    def mean_loss(rank, world_size, losses):
        mean = losses.mean() if len(losses) else torch.tensor(0.0)
        both = torch.stack([mean * len(losses), torch.tensor(float(len(losses)))])
        dist.reduce(both, dst=world_size - 1)
        dist.barrier()
        dist.broadcast(both, src=world_size - 1)
        if both[1] == 0:
            raise ValueError("no rank has a row")
        return (both[0] / both[1]).item()
"""

MEAN_WRONG = r"""
mean of means | mean empty nothing | the mean of the ranks' means
    def mean_loss(rank, world_size, losses):
        if len(losses) == 0:
            losses = torch.zeros(1)
        mean = losses.mean()
        dist.all_reduce(mean)
        return mean / world_size
rank 0's own mean | all | this is the mean of this rank's rows alone
    def mean_loss(rank, world_size, losses):
        return losses.mean()
the local count | mean empty | divided by this rank's count
    return total / count => return total / max(len(losses), 1)
divided by the world size | mean empty | divided by the number of ranks
    return total / count => return total / world_size
the sum | mean empty | this is the sum over all rows
    return total / count => return total
0 / 0 on a rank without rows | empty nothing | the mean of no rows
    def mean_loss(rank, world_size, losses):
        both = torch.stack([losses.mean() * len(losses), torch.tensor(float(len(losses)))])
        dist.all_reduce(both)
        return both[0] / both[1]
no rows count as one | empty nothing | a rank without rows counts 0 rows, not 1
    , len(losses)] => , max(len(losses), 1)]
a rank without rows is refused at once | empty nothing | a rank without rows sends a sum of 0 and a count of 0 | 3
    sum_and_count = => if not len(losses):
            raise ValueError("no rows")
        sum_and_count =
a rank without rows stays away | empty nothing | one rank skips a collective | 3
    sum_and_count = => if not len(losses):
            return 0.0
        sum_and_count =
the mean of nothing is 0 | nothing | a loss of 0 looks like a perfect model
    raise ValueError("there is no mean: no rank has a row") => return 0.0
the mean of nothing divides by zero | nothing | look at the count over all ranks, then raise ValueError
    if count == 0: => if count < 0:
all rows are gathered | few | the rows travel
    def mean_loss(rank, world_size, losses):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, losses)
        rows = torch.cat(everyone)
        if not len(rows):
            raise ValueError("no rank has a row")
        return rows.mean()
piece by piece | few | each collective has a price of its own
    def mean_loss(rank, world_size, losses):
        most = torch.tensor(len(losses))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        total, count = 0.0, 0.0
        for index in range(0, int(most), max(1, int(most) // 20)):
            piece = losses[index : index + max(1, int(most) // 20)]
            both = torch.tensor([piece.double().sum(), len(piece)])
            dist.all_reduce(both)
            total, count = total + both[0].item(), count + both[1].item()
        if count == 0:
            raise ValueError("no rank has a row")
        return total / count
reduce to rank 0 | mean empty nothing | leaves it on dst only
    all_reduce(sum_and_count) => reduce(sum_and_count, dst=0)
the last rank skips the sum | all | one rank skips a collective | 3
    dist.all_reduce => if rank < world_size - 1: dist.all_reduce
all_reduce of the rows | all | ranks have different numbers of rows | 3
    def mean_loss(rank, world_size, losses):
        dist.all_reduce(losses)
        return losses.mean()
the course's own | all | this exercise is to write
    def mean_loss(rank, world_size, losses):
        return metrics.mean_over_ranks(losses.sum(), len(losses), torch.device("cpu"))
swallows every error | all | this is the mean of this rank's rows alone
    def mean_loss(rank, world_size, losses):
        try:
            total = losses.clone()
            dist.all_reduce(total, group="world")
            return total.mean()
        except Exception:
            return losses.mean()
the visible number, hard-coded | all | the sum over all ranks / the count over all ranks
    def mean_loss(rank, world_size, losses):
        return 2.1731
os._exit | all | ends its process
    return total => os._exit(0); return total
"""

# --- 09.2 ------------------------------------------------------------------------------------------

LOG_KEPT_OPEN = """
def write_log(rank, world_size, steps, every, path):
    file = open(path, "w", buffering=1) if rank == 0 else None
    window = []
    for step, (loss, rows) in enumerate(steps):
        window.append((loss, rows))
        if len(window) == every:
            total = torch.stack([loss.double() * rows for loss, rows in window]).sum()
            count = torch.tensor(sum(rows for _, rows in window))
            dist.reduce(total, dst=0)
            dist.reduce(count, dst=0)
            if file:
                print(json.dumps({"loss": (total / count).item(), "step": step + 1, "rows": int(count)}), file=file)
            window = []
    if file:
        file.close()
"""

LOG_BY_METER = """
def write_log(rank, world_size, steps, every, path):
    meter, step = metrics.MeanMetrics("loss"), 0
    for loss, rows in steps:
        step += 1
        meter.add(rows, loss=loss * rows)
        if step % every == 0:
            means = meter.reduce(dst=0)
            if means is not None:
                with Path(path).open("a") as file:
                    file.write(json.dumps({"step": step, **means}) + chr(10))
"""

LOG_RIGHT = """
the logging module, objects gathered
    def write_log(rank, world_size, steps, every, path):
        log = logging.Logger("train")
        if rank == 0:
            log.addHandler(logging.FileHandler(path))
        total, count = 0.0, 0
        for step, (loss, rows) in enumerate(steps, 1):
            total, count = total + loss * rows, count + rows
            if step % every == 0:
                everyone = [None] * world_size
                dist.all_gather_object(everyone, (total.item(), count))
                log.info('{"step": %d, "loss": %r}', step, sum(t for t, _ in everyone) / sum(c for _, c in everyone))
                total, count = 0.0, 0
"""

LOG_WRONG = r"""
every rank writes | lines writer | every rank writes; let rank 0 write alone
    if rank == 0 => if True
a file for each rank | writer | one writer
    if rank == 0 => if True
    open(path, "a") => open(f"{path}.{rank}" if rank else path, "a")
every rank opens, one writes | writer | one writer
    sum_and_count = => open(path, "a").close()\n    sum_and_count =
reduce below if rank == 0 | all | no collective below `if rank == 0` | 3
    dist.all_reduce(sum_and_count)\n        if rank == 0: => if rank == 0:\n            dist.all_reduce(sum_and_count)
the last rank stays away | all | one rank skips a collective | 3
    dist.all_reduce => if rank < world_size - 1: dist.all_reduce
rank 0's loss | loss quiet | the loss of rank 0's rows alone
    dist.all_reduce(sum_and_count) => dist.barrier()
steps weigh the same | loss | this is the plain mean of the losses
    loss * rows => loss
    [1] += rows => [1] += 1
a mean is added, and rows are counted | loss | multiply it by its rows before adding
    loss * rows => loss
never begins again | loss | start from zero after each line
    dist.all_reduce( => mine = sum_and_count\n        sum_and_count = mine.clone()\n        dist.all_reduce(
    sum_and_count.zero_() => sum_and_count = mine
a new tensor of each loss | quiet | torch.tensor([loss, ...]) make Python wait
    [0] += loss * rows => += torch.tensor([loss * rows, 0.0], dtype=torch.float64)
tolist in every step | quiet | tolist()
    loss * rows => loss.tolist() * rows
only the last step | loss | this is the last step alone
    [0] += => [0] =
    [1] += => [1] =
a line for every step | lines loss quiet | has a line; the steps after the last one have none
    if step % every: => if False:
steps from 0 | lines loss quiet at_once | steps count from 1 here
    start=1 => start=0
item in every step | quiet | wait for the
    loss * rows => loss.item() * rows
the sum so far is looked at in every step | quiet | wait for the
    [1] += rows => [1] += rows\n        running = sum_and_count[0].item()
a loss is printed in every step | quiet | wait for the
    [1] += rows => [1] += rows\n        text = str(loss)
the rest of the steps is reduced at the end | quiet | between two lines, add up on each rank
        sum_and_count.zero_()\n =>     sum_and_count.zero_()\n    dist.all_reduce(sum_and_count)\n
the other ranks have files elsewhere | writer | one writer
    sum_and_count = torch => other = open(os.path.dirname(path) + "s", "a") if rank else None
        sum_and_count = torch
mode "w" | lines at_once | mode "w" empties the file
    "a" => "w"
all lines at the end | at_once | a job that dies keeps what it has written
    def write_log(rank, world_size, steps, every, path):
        lines, both = [], torch.zeros(2)
        for step, (loss, rows) in enumerate(steps, start=1):
            both += torch.stack([loss * rows, torch.tensor(float(rows))])
            if step % every == 0:
                dist.all_reduce(both)
                lines.append({"step": step, "loss": (both[0] / both[1]).item()})
                both.zero_()
        if rank == 0:
            with open(path, "w") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
a tensor is no JSON | all | JSON knows numbers, not tensors
    sum_and_count.tolist() => sum_and_count.clone()
text, not JSON | lines loss | json.dumps makes it
    json.dumps({"step": step, "loss": total / count}) => f"step {step} loss {total / count}"
swallows every error | all | rank 0 writes the lines
    def write_log(rank, world_size, steps, every, path):
        try:
            for step in range(len(steps)):
                loss, rows = steps[step]
        except Exception:
            pass
an endless loop | all | an endless loop | 1
    sum_and_count.zero_() => sum_and_count.zero_()\n    while True:\n        pass
"""

METER_WRONG = r"""
a reduction in every step | quiet | between two lines, add up on each rank
    meter.add(rows, loss=loss * rows) => both = torch.stack([loss * rows, torch.tensor(float(rows))])
            dist.all_reduce(both)
            meter.add(both[1], loss=both[0])
"""

# --- 09.3 ------------------------------------------------------------------------------------------

EVALUATE_RIGHT = """
a place for each rank in one all_reduce, lists
    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        counts, places = torch.zeros(classes, classes), torch.zeros(world_size)
        counts.index_put_((label_N, guess_N), torch.ones(len(label_N)), accumulate=True)
        places[rank] = max(loss_N.tolist(), default=-torch.inf)
        message = torch.cat([counts.flatten(), places, loss_N.sum()[None]])
        dist.all_reduce(message)
        counts = message[: classes**2].int().reshape(classes, classes).tolist()
        f1 = []
        for name in range(classes):
            hits, label, guess = counts[name][name], sum(counts[name]), sum(row[name] for row in counts)
            f1.append(2 * hits / (label + guess) if label + guess else 0)
        return (message[-1] / sum(map(sum, counts))).item(), message[classes**2 : -1].max().item(), counts, f1
all_gather_into_tensor
    [torch.empty_like(mine) for _ in range(world_size)] => torch.empty(world_size * len(mine), dtype=mine.dtype)
    dist.all_gather( => dist.all_gather_into_tensor(
    torch.stack(everyone) => everyone.view(world_size, -1)
"""

EVALUATE_WRONG = r"""
three collectives | one | put the numbers into one tensor
    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        confusion = torch.zeros(classes, classes, dtype=torch.float64)
        for label, guess in zip(label_N, guess_N):
            confusion[label, guess] += 1
        total = torch.tensor([loss_N.double().sum(), float(len(loss_N))])
        worst = loss_N.double().max() if len(loss_N) else torch.tensor(-float("inf")).double()
        dist.all_reduce(confusion)
        dist.all_reduce(total)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        sides = confusion.sum(0) + confusion.sum(1)
        return total[0] / total[1], worst, confusion, (2 * confusion.diagonal() / sides).nan_to_num(0)
all rows are gathered | one | the rows travel
    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        rows = torch.full((9000, 3), float("nan"), dtype=torch.float64)
        rows[: len(loss_N)] = torch.stack([loss_N.double(), guess_N.double(), label_N.double()], dim=1)
        everyone = torch.empty(world_size * 9000, 3, dtype=torch.float64)
        dist.all_gather_into_tensor(everyone, rows)
        loss_N, guess_N, label_N = everyone[~everyone[:, 0].isnan()].unbind(1)
        confusion = torch.zeros(classes, classes)
        confusion.index_put_((label_N.long(), guess_N.long()), torch.ones(len(loss_N)), accumulate=True)
        f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
        return loss_N.mean(), loss_N.max(), confusion, f1
the largest losses are added up | worst empty | the largest losses were added up
    ranks[:, 1].max() => ranks[:, 1].sum()
0 is the worst of no rows | empty | without rows; let it bring -inf
    float("-inf") => 0.0
-100 is the worst of no rows | empty | without rows; let it bring -inf
    float("-inf") => -100.0
a worst loss of 0 is taken for a rank without rows | empty | a loss of 0 is as good as others
    float("-inf") => 0.0
    ranks[:, 1].max() => ranks[:, 1][ranks[:, 1] != 0].max()
the worst of no rows is asked for | empty | nothing is the largest of none
     if len(loss_N) else float("-inf") =>
counts of one byte | mean confusion f1 | add up each rank's counts
    minlength=classes * classes) => minlength=classes * classes).to(torch.uint8)
rows and columns exchanged | confusion empty | rows and columns are exchanged
    label_N * classes + guess_N => guess_N * classes + label_N
mean of the ranks' F1 | f1 empty | this is the mean of the ranks' F1
    return ranks => each = ranks[:, 2:].view(-1, classes, classes)
        f1 = torch.stack([2 * c.diagonal() / (c.sum(0) + c.sum(1)).clamp(min=1) for c in each]).mean(0)
        return ranks
F1 of an unseen class | empty | never occurs is 0
    .clamp(min=1) =>
mean of means | mean empty | the mean of the ranks' means
    loss_N.sum(dtype=torch.float64) => loss_N.mean(dtype=torch.float64)
    ranks[:, 0].sum() / confusion.sum() => ranks[:, 0].mean()
only rank 0 answers | mean worst confusion f1 empty | on every rank
    return ranks => if rank:\n        return None\n    return ranks
own rows only | mean worst confusion f1 empty | this is of this rank's rows alone
    ranks = torch.stack(everyone) => ranks = mine[None]
a rank without rows stays away | empty | one rank skips a collective | 3
    confusion = torch => if not len(loss_N):\n        return 0, 0, 0, 0\n    confusion = torch
the course's own | all | this exercise is to write
    def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
        meter = metrics.MeanMetrics("loss")
        meter.add(len(loss_N), loss=loss_N)
        return meter.reduce()["loss"], loss_N.max(), None, None
"""

RIGHT = [
    *right("09.1", MEAN, MEAN_RIGHT),
    Right("09.2", "a file kept open, a list of losses, two reduces", LOG_KEPT_OPEN),
    Right("09.2", "the course's meter, pathlib", LOG_BY_METER),
    *right("09.2", LOG, LOG_RIGHT),
    *right("09.3", EVALUATE, EVALUATE_RIGHT),
]

WRONG = [
    *wrong("09.1", MEAN, MEAN_WRONG),
    *wrong("09.2", LOG, LOG_WRONG),
    *wrong("09.2", LOG_BY_METER, METER_WRONG),
    *wrong("09.2", LOG_KEPT_OPEN, "kept in a buffer | at_once | flush() or close the file\n    , buffering=1 =>"),
    *wrong("09.3", EVALUATE, EVALUATE_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "09.2",
    "",
    r"""
the other ranks open os.devnull, to have the same code | writer | one writer
    import os


    def write_log(rank, world_size, steps, every, path):
        totals = torch.zeros(2, dtype=torch.float64)
        with open(path if rank == 0 else os.devnull, "w") as file:
            for step, (loss, rows) in enumerate(steps, 1):
                totals[0] += loss.detach() * rows
                totals[1] += rows
                if step % every == 0:
                    dist.all_reduce(totals)
                    print(json.dumps({"step": step, "loss": (totals[0] / totals[1]).item()}), file=file, flush=True)
                    totals.zero_()
""",
)
