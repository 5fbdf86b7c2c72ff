"""16.2 `train_step(replica, optimizer, loss_function, micro_batches, max_norm)`: is it one step on the whole batch?

When what happened is a log of letters, such as FBFBFBssU: two silent micro-batches, a third whose backward sends two
buckets, the update. Read next: `utilisation.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

WIDTHS, ROWS, RATE = (5, 5, 5, 5, 5), 2, 0.5
TOLERANCE = 1e-5  # clip_grad_norm_ adds 1e-6 to the norm
SETTLE = 3  # ordinary steps after which DDP has its buckets
WORDS = {"F": "forward", "B": "backward", "s": "sent", "S": "sent outside backward", "U": "update"}


def cases(rng: Random) -> list[Round]:
    """A gradient too long, one short enough, and a single micro-batch: how many, steps, the largest norm, a seed."""
    world_size, count = rng.choice((2, 3)), rng.choice((3, 4))
    cut = count, 2, rng.choice((0.3, 0.4)), rng.randint(1, 10**6)
    uncut = rng.choice((2, 3)), 3, 1e6, rng.randint(1, 10**6)
    return [Round(world_size, [("cut", cut), ("uncut", uncut), ("one", (1, 2, 0.5, rng.randint(1, 10**6)))])]


def batches(seed: int, count: int, rank: int, step: int) -> list[tasks.Batch]:
    """Return one rank's micro-batches of one step; their gradients differ, so it matters where one clips."""
    x, y = tasks.batch(seed, rank, step, count * ROWS, WIDTHS[0])
    return [(x, y + number) for number, (x, y) in enumerate(zip(x.split(ROWS), y.split(ROWS), strict=True))]


def act(function, case: tuple, rank: int, world_size: int) -> Note:
    """Let DDP settle its buckets, then take the steps; keep the weights, the norms and a log of each step."""
    count, steps, max_norm, seed = case
    model = tasks.net(seed, *WIDTHS)
    replica = DistributedDataParallel(model, bucket_cap_mb=8 * WIDTHS[0] ** 2 / 2**20)
    for _ in range(SETTLE):
        x, y = batches(seed, count, rank, 0)[0]
        nn.functional.mse_loss(replica(x), y).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    note = Note(weights=[], norms=[], logs=[])
    for step in range(steps):
        with Log(model, optimizer) as log:
            norm = function(replica, optimizer, nn.functional.mse_loss, batches(seed, count, rank, step), max_norm)
        note["weights"].append(tasks.weights(model))
        note["norms"].append(norm if isinstance(norm, float) else f"a {type(norm).__name__}")
        note["logs"].append(log.text)
    return note


def told(log: str, letters: str) -> str:
    """Return those events of a log that have these letters, in words."""
    return ", ".join(WORDS[letter] for letter in log if letter in letters)


def weights(seen: Seen) -> list[Any]:
    """Forward passes and updates, and where they lead to."""
    return [[told(log, "FU") for log in seen["logs"]], seen["weights"]]


def until_last(seen: Seen) -> list[str]:
    """What happens until the last forward pass; where the update is, is seen elsewhere."""
    return [told(log[: log.rfind("F") + 1], "FBsS") for log in seen["logs"]]


def sent(seen: Seen) -> list[str]:
    """What is sent after the last forward pass, in backward and outside of it."""
    barrier = "; a barrier" if seen["barriers"] else ""
    return [told(log[log.rfind("F") + 1 :], "sS") + barrier for log in seen["logs"]]


CLIP = "norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)"

MISTAKES = f"""
the losses are added | short norm | the micro-batches' means are added: divide each loss by the number of micro-batches
     / len(micro_batches) =>
divided twice | short norm | it is divided by the number of micro-batches twice
    norm = => for p in replica.parameters():
        p.grad /= len(micro_batches)
    norm =
divided by the world size once more | short norm | torch's DDP averages over the ranks already
    norm = => for p in replica.parameters():
        p.grad /= dist.get_world_size()
    norm =
every micro-batch is sent | silent | all but the last micro-batch belong inside replica.no_sync(), forward and backward
    replica.no_sync() => nullcontext()
one backward pass | silent | call backward after each forward pass; until then its graph is kept
    last = len(micro_batches) - 1 => loss = sum(loss_function(replica(x), y) for x, y in micro_batches)
    (loss / len(micro_batches)).backward()
    enumerate(micro_batches) => []
clipped too early | clipped norm one | each rank cuts a part of its own gradient: clip after the last backward pass
    {CLIP} => pass
    with nullcontext() => if number == last:
        {CLIP}
    with nullcontext()
clipped after every micro-batch | clipped norm | it is clipped after every micro-batch: clip once, after the last
    {CLIP} => pass
    .backward() => .backward()
    {CLIP}
own gradients clipped, then averaged | clipped norm once one | each rank clips its own gradient; clip after the average
    nullcontext() if number == last else replica => replica
    optimizer.step() => for p in replica.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
no average | clipped short norm once one | this is the rank's own gradient: the last micro-batch must be outside no_sync
    nullcontext() if number == last else replica => replica
the last micro-batch alone | clipped short norm | one micro-batch only is in it; leave .grad alone between them
    with nullcontext() => optimizer.zero_grad()
    with nullcontext()
not clipped | clipped one | the gradient is not clipped, or clipped after the update
    replica.parameters(), max_norm) => replica.parameters(), float('inf'))
single numbers are clipped | clipped one | single numbers are clipped; cut by the norm of all gradients together
    {CLIP} => {CLIP.replace("max_norm", "float('inf')")}
    nn.utils.clip_grad_value_(replica.parameters(), max_norm)
each parameter by its own norm | clipped one | the norm is that of all gradients together, not each parameter's own
    {CLIP} => {CLIP.replace("max_norm", "float('inf')")}
    for p in replica.parameters():
        nn.utils.clip_grad_norm_(p, max_norm)
always the largest norm | short | a gradient that is short enough must stay as it is; do not make it longer
    optimizer.step() => for p in replica.parameters():
        p.grad *= max_norm / min(norm.item(), max_norm)
    optimizer.step()
the norm after clipping | norm | this is the norm after clipping; take it before
    norm.item() => min(norm.item(), max_norm)
the norm as a tensor | norm | return the norm as a float: .item()
    norm.item() => norm
no zero_grad | clipped short one | the gradients of the step before are still there: optimizer.zero_grad()
    optimizer.zero_grad() => pass
an update after each micro-batch | clipped short norm one | step once, after the last micro-batch
    optimizer.step() => pass
    .backward() => .backward()
    optimizer.step()
the norm is averaged | once one | DDP has averaged when backward returns, so each rank finds the same norm: send no more
    optimizer.step() => dist.all_reduce(norm)
    norm /= dist.get_world_size()
    optimizer.step()
a barrier at the end | once one | a barrier is a collective: the ranks meet in DDP's own, in the last backward pass
    return norm.item() => dist.barrier()
    return norm.item()
the last rank leaves | all | rank | hangs
    last = len => if dist.get_rank() == dist.get_world_size() - 1: return 0.0
    last = len
written freely: no_sync around backward alone | silent | inside replica.no_sync(), forward and backward | tests
    def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
        optimizer.zero_grad(set_to_none=False)
        for x, y in micro_batches[:-1]:
            loss = loss_function(replica(x), y)
            with replica.no_sync():
                loss.div(len(micro_batches)).backward()
        x, y = micro_batches[-1]
        loss_function(replica(x), y).div(len(micro_batches)).backward()
        norm = float(nn.utils.clip_grad_norm_(replica.module.parameters(), max_norm))
        optimizer.step()
        return norm
written freely: one large batch | clipped short silent | for each micro-batch one forward and one backward | tests
    def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
        x, y = map(torch.cat, zip(*micro_batches))
        optimizer.zero_grad()
        loss_function(replica(x), y).backward()
        norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
        optimizer.step()
        return float(norm)
"""

RIGHT = """
DDP's own flag, cut by hand
    with nullcontext() if number == last else replica.no_sync(): => replica.require_backward_grad_sync = number == last
    if True:
    norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm) => gradients = []
    for p in replica.parameters():
        gradients.append(p.grad)
    norm = torch.stack([(g * g).sum() for g in gradients]).sum().sqrt()
    for g in gradients:
        g.mul_(min(1.0, max_norm / norm.item()))
"""

SUM = "each loss divided by their number, all added up in .grad, averaged by DDP, clipped once, then one update"
SEND = "in the last backward pass, outside no_sync, DDP sends each bucket once; nothing else is sent"


def said(seen: Seen) -> str:
    return f"{seen.case[1]} steps of {seen.case[0]} micro-batches, largest norm {seen.case[2]:g}:"


STEP = exercise(
    *("16.2", "One step of several small batches", "train_step", 20),
    cases=cases,
    act=act,
    said=said,
    tolerance=TOLERANCE,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "clipped": ("the weights are those of one process on the whole batch, clipped", 2, "cut", weights, SUM),
        "short": ("a gradient that is short enough is not changed, step after step", 1, "uncut", weights, SUM),
        "norm": ("the returned norm is that of the whole batch's gradient", 1, "cut uncut", lambda s: s["norms"][0],
                 "return what clip_grad_norm_ returns after the last backward pass, as a float: .item()"),
        "silent": ("one micro-batch at a time, and nothing is sent before the last", 1, "cut uncut", until_last,
                   "for each micro-batch one forward and one backward pass; all but the last inside replica.no_sync()"),
        "once": ("the last backward pass sends each bucket once, and nothing follows", 1, "cut uncut", sent, SEND),
        "one": ("a single micro-batch works, too", 1, "one", lambda s: [weights(s), sent(s)], f"{SUM}; {SEND}"),
    },
    refused=("ddp_course.parallel.ddp.BucketedDDP", "ddp_course.parallel.naive.NaiveDDP"),
    hints={
        r"'Sequential' object has no attribute 'no_sync'": "no_sync belongs to the replica, not to its module",
        r"context manager protocol": "use it as `with replica.no_sync():`, with the brackets",
        r"backward through the graph a second time": "call backward once for each micro-batch's own loss",
        "limit: waited in (all_reduce|barrier|broadcast)": "some ranks wait in a collective that "
        "another one skips; look for a branch on the rank",
    },
)  # fmt: skip
