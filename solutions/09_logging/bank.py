"""The answer bank of lesson 09: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import json
import logging
import os
from pathlib import Path
import torch
import torch.distributed as dist
from ddp_course import metrics
"""

# --- 09.1 ------------------------------------------------------------------------------------------

MEAN = """
def mean_loss(rank, world_size, losses):
    sum_and_count = torch.tensor([losses.sum(dtype=torch.float64), len(losses)], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    if count == 0:
        raise ValueError("there is no mean: no rank has a row")
    return total / count
"""

MEAN_TWO_REDUCTIONS = """
def mean_loss(rank, world_size, losses):
    total, count = losses.sum(), torch.tensor(losses.numel())
    works = [dist.all_reduce(number, async_op=True) for number in (total, count)]
    for work in works:
        work.wait()
    if not count:
        raise ValueError("no rows")
    return total / count
"""

MEAN_GATHERED_OBJECTS = """
def mean_loss(rank, world_size, losses):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (sum(losses.tolist()), len(losses)))
    rows = sum(count for _, count in everyone)
    if rows < 1:
        raise ValueError("no rank has a row")
    return torch.tensor([sum(total for total, _ in everyone) / rows])
"""

MEAN_REDUCED_THEN_SENT = """
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

MEAN_OF_MEANS = """
def mean_loss(rank, world_size, losses):
    if len(losses) == 0:
        losses = torch.zeros(1)
    mean = losses.mean()
    dist.all_reduce(mean)
    return mean / world_size
"""

MEAN_WITHOUT_EMPTY = """
def mean_loss(rank, world_size, losses):
    both = torch.stack([losses.mean() * len(losses), torch.tensor(float(len(losses)))])
    dist.all_reduce(both)
    return both[0] / both[1]
"""

MEAN_OF_GATHERED_ROWS = """
def mean_loss(rank, world_size, losses):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, losses)
    rows = torch.cat(everyone)
    if not len(rows):
        raise ValueError("no rank has a row")
    return rows.mean()
"""

MEAN_ROW_BY_ROW = """
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
"""

MEAN_FROM_COURSE = """
def mean_loss(rank, world_size, losses):
    return metrics.mean_over_ranks(losses.sum(), len(losses), torch.device("cpu"))
"""

MEAN_SWALLOWING = """
def mean_loss(rank, world_size, losses):
    try:
        total = losses.clone()
        dist.all_reduce(total, group="world")
        return total.mean()
    except Exception:
        return losses.mean()
"""

# --- 09.2 ------------------------------------------------------------------------------------------

LOG = """
def write_log(rank, world_size, steps, every, path):
    sum_and_count = torch.zeros(2, dtype=torch.float64)
    for step, (loss, rows) in enumerate(steps, start=1):
        sum_and_count[0] += loss * rows
        sum_and_count[1] += rows
        if step % every:
            continue
        dist.all_reduce(sum_and_count)
        if rank == 0:
            total, count = sum_and_count.tolist()
            with open(path, "a") as file:
                file.write(json.dumps({"step": step, "loss": total / count}) + "\\n")
        sum_and_count.zero_()
"""

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

LOG_BY_LOGGING = """
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

LOG_AT_THE_END = """
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
            file.writelines(json.dumps(line) + "\\n" for line in lines)
"""

LOG_SWALLOWING = """
def write_log(rank, world_size, steps, every, path):
    try:
        for step in range(len(steps)):
            loss, rows = steps[step]
    except Exception:
        pass
"""

# --- 09.3 ------------------------------------------------------------------------------------------

EVALUATE = """
def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
    confusion = torch.bincount(label_N * classes + guess_N, minlength=classes * classes)
    worst = loss_N.max().item() if len(loss_N) else float("-inf")
    mine = torch.tensor([loss_N.sum(dtype=torch.float64), worst, *confusion], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)

    ranks = torch.stack(everyone)
    confusion = ranks[:, 2:].sum(dim=0).view(classes, classes)
    sides = confusion.sum(dim=0) + confusion.sum(dim=1)
    f1 = 2 * confusion.diagonal() / sides.clamp(min=1)
    return ranks[:, 0].sum() / confusion.sum(), ranks[:, 1].max(), confusion, f1
"""

EVALUATE_PLACES = """
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
"""

EVALUATE_IN_TWO_KINDS = """
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
"""

EVALUATE_ALL_ROWS = """
def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
    rows = torch.full((4000, 3), float("nan"), dtype=torch.float64)
    rows[: len(loss_N)] = torch.stack([loss_N.double(), guess_N.double(), label_N.double()], dim=1)
    everyone = torch.empty(world_size * 4000, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, rows)
    loss_N, guess_N, label_N = everyone[~everyone[:, 0].isnan()].unbind(1)
    confusion = torch.zeros(classes, classes)
    confusion.index_put_((label_N.long(), guess_N.long()), torch.ones(len(loss_N)), accumulate=True)
    f1 = 2 * confusion.diagonal() / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return loss_N.mean(), loss_N.max(), confusion, f1
"""

EVALUATE_FROM_COURSE = """
def evaluate(rank, world_size, loss_N, guess_N, label_N, classes):
    meter = metrics.MeanMetrics("loss")
    meter.add(len(loss_N), loss=loss_N)
    return meter.reduce()["loss"], loss_N.max(), None, None
"""

RIGHT = [
    Right("09.1", "two asynchronous all_reduces, a tensor", MEAN_TWO_REDUCTIONS),
    Right("09.1", "objects, gathered", MEAN_GATHERED_OBJECTS),
    Right("09.1", "reduce, a barrier, broadcast", MEAN_REDUCED_THEN_SENT),
    Right("09.2", "a file kept open, a list of losses, two reduces", LOG_KEPT_OPEN),
    Right("09.2", "the course's meter, pathlib", LOG_BY_METER),
    Right("09.2", "the logging module, objects gathered", LOG_BY_LOGGING),
    Right("09.3", "a place for each rank in one all_reduce, lists", EVALUATE_PLACES),
    Right(
        "09.3",
        "all_gather_into_tensor",
        EVALUATE.replace(
            "everyone = [torch.empty_like(mine) for _ in range(world_size)]",
            "everyone = torch.empty(world_size * len(mine), dtype=mine.dtype)",
        )
        .replace("dist.all_gather(everyone, mine)", "dist.all_gather_into_tensor(everyone, mine)")
        .replace("torch.stack(everyone)", "everyone.view(world_size, -1)"),
    ),
]

WRONG = [
    # 09.1
    Wrong("09.1", "mean of means", MEAN_OF_MEANS, ("mean", "empty", "nothing"), "the mean of the ranks' means"),
    Wrong(
        "09.1",
        "rank 0's own mean",
        "def mean_loss(rank, world_size, losses):\n    return losses.mean()\n",
        ALL,
        "this is the mean of this rank's rows alone",
    ),
    Wrong(
        "09.1",
        "the local count",
        MEAN.replace("return total / count", "return total / max(len(losses), 1)"),
        ("mean", "empty"),
        "divided by this rank's count",
    ),
    Wrong(
        "09.1",
        "divided by the world size",
        MEAN.replace("return total / count", "return total / world_size"),
        ("mean", "empty"),
        "divided by the number of ranks",
    ),
    Wrong(
        "09.1", "the sum", MEAN.replace("total / count", "total"), ("mean", "empty"), "this is the sum over all rows"
    ),
    Wrong("09.1", "0 / 0 on a rank without rows", MEAN_WITHOUT_EMPTY, ("empty", "nothing"), "the mean of no rows"),
    Wrong(
        "09.1",
        "no rows count as one",
        MEAN.replace(", len(losses)]", ", max(len(losses), 1)]"),
        ("empty", "nothing"),
        "a rank without rows counts 0 rows, not 1",
    ),
    Wrong(
        "09.1",
        "a rank without rows is refused at once",
        MEAN.replace("    sum_and", "    if not len(losses):\n        raise ValueError('no rows')\n    sum_and", 1),
        ("empty", "nothing"),
        "a rank without rows sends a sum of 0 and a count of 0",
        limit_s=3.0,
    ),
    Wrong(
        "09.1",
        "a rank without rows stays away",
        MEAN.replace("    sum_and", "    if not len(losses):\n        return 0.0\n    sum_and", 1),
        ("empty", "nothing"),
        "one rank skips a collective",
        limit_s=3.0,
    ),
    Wrong(
        "09.1",
        "the mean of nothing is 0",
        MEAN.replace('raise ValueError("there is no mean: no rank has a row")', "return 0.0"),
        ("nothing",),
        "a loss of 0 looks like a perfect model",
    ),
    Wrong(
        "09.1",
        "the mean of nothing divides by zero",
        MEAN.replace("    if count == 0:", "    if count < 0:"),
        ("nothing",),
        "look at the count over all ranks, then raise ValueError",
    ),
    Wrong("09.1", "all rows are gathered", MEAN_OF_GATHERED_ROWS, ("few",), "the rows travel"),
    Wrong("09.1", "piece by piece", MEAN_ROW_BY_ROW, ("few",), "each collective has a price of its own"),
    Wrong(
        "09.1",
        "reduce to rank 0",
        MEAN.replace("all_reduce(sum_and_count)", "reduce(sum_and_count, dst=0)"),
        ("mean", "empty", "nothing"),
        "leaves it on dst only",
    ),
    Wrong(
        "09.1",
        "the last rank skips the sum",
        MEAN.replace("dist.all_reduce", "if rank < world_size - 1: dist.all_reduce"),
        ALL,
        "one rank skips a collective",
        limit_s=3.0,
    ),
    Wrong(
        "09.1",
        "all_reduce of the rows",
        "def mean_loss(rank, world_size, losses):\n    dist.all_reduce(losses)\n    return losses.mean()\n",
        ALL,
        "ranks have different numbers of rows",
        limit_s=3.0,
    ),
    Wrong("09.1", "the course's own", MEAN_FROM_COURSE, ALL, "this exercise is to write"),
    Wrong("09.1", "swallows every error", MEAN_SWALLOWING, ALL, "this is the mean of this rank's rows alone"),
    Wrong(
        "09.1",
        "the visible number, hard-coded",
        "def mean_loss(rank, world_size, losses):\n    return 2.1731\n",
        ALL,
        "the sum over all ranks / the count over all ranks",
    ),
    Wrong("09.1", "os._exit", MEAN.replace("return total", "os._exit(0); return total"), ALL, "ends its process"),
    # 09.2
    Wrong(
        "09.2",
        "every rank writes",
        LOG.replace("if rank == 0", "if True"),
        ("lines", "writer"),
        "every rank writes; let rank 0 write alone",
    ),
    Wrong(
        "09.2",
        "a file for each rank",
        LOG.replace("if rank == 0", "if True").replace(
            'open(path, "a")', 'open(f"{path}.{rank}" if rank else path, "a")'
        ),
        ("writer",),
        "one writer",
    ),
    Wrong(
        "09.2",
        "every rank opens, one writes",
        LOG.replace("    sum_and", '    open(path, "a").close()\n    sum_and', 1),
        ("writer",),
        "one writer",
    ),
    Wrong(
        "09.2",
        "reduce below if rank == 0",
        LOG.replace("        dist.all_reduce(sum_and_count)\n", "").replace(
            "        if rank == 0:\n", "        if rank == 0:\n            dist.all_reduce(sum_and_count)\n"
        ),
        ALL,
        "no collective below `if rank == 0`",
        limit_s=3.0,
    ),
    Wrong(
        "09.2",
        "the last rank stays away",
        LOG.replace("dist.all_reduce", "if rank < world_size - 1: dist.all_reduce"),
        ALL,
        "one rank skips a collective",
        limit_s=3.0,
    ),
    Wrong(
        "09.2",
        "rank 0's loss",
        LOG.replace("dist.all_reduce(sum_and_count)", "dist.barrier()"),
        ("loss", "quiet"),
        "the loss of rank 0's rows alone",
    ),
    Wrong(
        "09.2",
        "steps weigh the same",
        LOG.replace("loss * rows", "loss").replace("[1] += rows", "[1] += 1"),
        ("loss",),
        "this is the plain mean of the losses",
    ),
    Wrong(
        "09.2",
        "a mean is added, and rows are counted",
        LOG.replace("loss * rows", "loss"),
        ("loss",),
        "multiply it by its rows before adding",
    ),
    Wrong(
        "09.2",
        "never begins anew",
        LOG.replace("        sum_and_count.zero_()\n", "")
        .replace(
            "dist.all_reduce(sum_and_count)",
            "mine = sum_and_count\n        sum_and_count = mine.clone()\n        dist.all_reduce(sum_and_count)",
        )
        .replace('total / count}) + "\\n")', 'total / count}) + "\\n")\n        sum_and_count = mine'),
        ("loss",),
        "start from zero after each line",
    ),
    Wrong(
        "09.2",
        "a new tensor of each loss",
        LOG.replace(
            "sum_and_count[0] += loss * rows", "sum_and_count += torch.tensor([loss * rows, 0.0], dtype=torch.float64)"
        ),
        ("quiet",),
        "torch.tensor([loss, ...]) make Python wait",
    ),
    Wrong(
        "09.2",
        "tolist in every step",
        LOG.replace("[0] += loss * rows", "[0] += loss.tolist() * rows"),
        ("quiet",),
        "tolist()",
    ),
    Wrong(
        "09.2",
        "only the last step",
        LOG.replace("[0] += loss * rows", "[0] = loss * rows").replace("[1] += rows", "[1] = rows"),
        ("loss",),
        "this is the last step alone",
    ),
    Wrong(
        "09.2",
        "a line for every step",
        LOG.replace("if step % every:", "if False:"),
        ("lines", "loss", "quiet"),
        "has a line; the steps after the last one have none",
    ),
    Wrong(
        "09.2",
        "steps from 0",
        LOG.replace("start=1", "start=0"),
        ("lines", "loss", "quiet", "at_once"),
        "steps count from 1 here",
    ),
    Wrong(
        "09.2",
        "a reduction in every step",
        LOG_BY_METER.replace(
            "        meter.add(rows, loss=loss * rows)\n",
            "        both = torch.stack([loss * rows, torch.tensor(float(rows))])\n        dist.all_reduce(both)\n"
            "        meter.add(both[1], loss=both[0])\n",
        ),
        ("quiet",),
        "between two lines, add up on each rank",
    ),
    Wrong("09.2", "item in every step", LOG.replace("loss * rows", "loss.item() * rows"), ("quiet",), "wait for the"),
    Wrong("09.2", 'mode "w"', LOG.replace('"a"', '"w"'), ("lines", "at_once"), 'mode "w" empties the file'),
    Wrong("09.2", "all lines at the end", LOG_AT_THE_END, ("at_once",), "a job that dies keeps what it has written"),
    Wrong(
        "09.2",
        "kept in a buffer",
        LOG_KEPT_OPEN.replace(", buffering=1", ""),
        ("at_once",),
        "flush() or close the file",
    ),
    Wrong(
        "09.2",
        "a tensor is no JSON",
        LOG.replace("sum_and_count.tolist()", "sum_and_count.clone()"),
        ALL,
        "JSON knows numbers, not tensors",
    ),
    Wrong(
        "09.2",
        "text, not JSON",
        LOG.replace('json.dumps({"step": step, "loss": total / count})', 'f"step {step} loss {total / count}"'),
        ("lines", "loss"),
        "json.dumps makes it",
    ),
    Wrong("09.2", "swallows every error", LOG_SWALLOWING, ALL, "rank 0 writes the lines"),
    Wrong(
        "09.2",
        "an endless loop",
        LOG + "    while True:\n        pass\n",
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),
    # 09.3
    Wrong(
        "09.3",
        "three collectives",
        EVALUATE_IN_TWO_KINDS,
        ("one",),
        "put the numbers into one tensor",
    ),
    Wrong("09.3", "all rows are gathered", EVALUATE_ALL_ROWS, ("one",), "the rows travel"),
    Wrong(
        "09.3",
        "the largest losses are added up",
        EVALUATE.replace("ranks[:, 1].max()", "ranks[:, 1].sum()"),
        ("worst", "empty"),
        "the largest losses were added up",
    ),
    Wrong(
        "09.3",
        "0 is the worst of no rows",
        EVALUATE.replace('float("-inf")', "0.0"),
        ("empty",),
        "let it bring -inf",
    ),
    Wrong(
        "09.3",
        "the worst of no rows is asked for",
        EVALUATE.replace(' if len(loss_N) else float("-inf")', ""),
        ("empty",),
        "nothing is the largest of none",
    ),
    Wrong(
        "09.3",
        "rows and columns exchanged",
        EVALUATE.replace("label_N * classes + guess_N", "guess_N * classes + label_N"),
        ("confusion", "empty"),
        "rows and columns are exchanged",
    ),
    Wrong(
        "09.3",
        "mean of the ranks' F1",
        EVALUATE.replace(
            "    return",
            "    each = ranks[:, 2:].view(-1, classes, classes)\n"
            "    f1 = torch.stack([2 * c.diagonal() / (c.sum(0) + c.sum(1)).clamp(min=1) for c in each]).mean(0)\n"
            "    return",
        ),
        ("f1", "empty"),
        "this is the mean of the ranks' F1",
    ),
    Wrong("09.3", "F1 of an unseen class", EVALUATE.replace(".clamp(min=1)", ""), ("empty",), "never occurs is 0"),
    Wrong(
        "09.3",
        "mean of means",
        EVALUATE.replace("loss_N.sum(dtype=torch.float64)", "loss_N.mean(dtype=torch.float64)").replace(
            "ranks[:, 0].sum() / confusion.sum()", "ranks[:, 0].mean()"
        ),
        ("mean", "empty"),
        "the mean of the ranks' means",
    ),
    Wrong(
        "09.3",
        "only rank 0 answers",
        EVALUATE.replace("    return", "    if rank:\n        return None\n    return"),
        ("mean", "worst", "confusion", "f1", "empty"),
        "on every rank",
    ),
    Wrong(
        "09.3",
        "own rows only",
        EVALUATE.replace("ranks = torch.stack(everyone)", "ranks = mine[None]"),
        ("mean", "worst", "confusion", "f1", "empty"),
        "this is of this rank's rows alone",
    ),
    Wrong(
        "09.3",
        "a rank without rows stays away",
        EVALUATE.replace("    confusion", "    if not len(loss_N):\n        return 0, 0, 0, 0\n    confusion", 1),
        ("empty",),
        "one rank skips a collective",
        limit_s=3.0,
    ),
    Wrong("09.3", "the course's own", EVALUATE_FROM_COURSE, ALL, "this exercise is to write"),
]
