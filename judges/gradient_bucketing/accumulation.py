"""07.3 `accumulate(replica, loss_function, micro_batches)`: is it silent until the last backward pass?

The replica is torch's own DDP, which talks from C++; its collectives pass the dispatcher as all others do. So what
happened is a log of letters: FBFBFBss is two silent micro-batches, and a third whose backward pass sends two buckets.
Read next: `compression.py`.
"""

from __future__ import annotations

from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.observe import LETTERS, Log
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
from judges.gradient_bucketing.overlap import STUCK

WIDTHS, ROWS = (6, 6, 6, 6, 6), 3
SETTLE = 3  # ordinary steps after which DDP has its buckets


def cases(rng: Random) -> list[Round]:
    """Several micro-batches, then one, then another number of them."""
    ranks, seed = rng.choice((2, 3)), rng.randint(1, 10**6)
    counts = {"many": rng.choice((4, 5)), "one": 1, "few": rng.choice((2, 3))}
    return [Round(ranks, [(name, (count, seed + count)) for name, count in counts.items()])]


def act(function, case: tuple[int, int], rank: int, world_size: int) -> Note:
    """Let DDP settle its buckets, call the function, and take one ordinary step; keep a log of each."""
    count, seed = case
    model = tasks.net(seed, *WIDTHS)
    replica = DistributedDataParallel(model, bucket_cap_mb=8 * WIDTHS[0] ** 2 / 2**20)

    def batches() -> list[tasks.Batch]:
        return [(x, y + n) for n in range(count) for x, y in [tasks.batch(seed, rank, n, ROWS, WIDTHS[0])]]

    def logged(call) -> str:
        replica.zero_grad()
        with Log(model) as log:
            call()
        return log.text

    def ordinary() -> None:
        x, y = batches()[0]
        nn.functional.mse_loss(replica(x), y).backward()

    for _ in range(SETTLE):
        logged(ordinary)
    given = batches()
    log = logged(lambda: function(replica, nn.functional.mse_loss, given))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    found = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
    changed = [a.tolist() for pair in given for a in pair] != [a.tolist() for pair in batches() for a in pair]
    return Note(gradients=found, log=log, after=logged(ordinary), given_changed=changed)


def gradients(seen: Seen) -> dict:
    return {"gradient": seen["gradients"]}


def before_the_last(seen: Seen) -> str:
    return f"{seen['log'].count('F')} forward passes, and until the last {seen['log'].rpartition('F')[0]}"


def last(seen: Seen) -> str:
    sent = seen["log"].rpartition("F")[2].replace("B", "")
    return f"{seen['log'].count('F')} forward passes, and after the last {sent}"


def why_silent(seen: Seen) -> str:
    if seen["log"].count("F") < seen.case[0]:
        return "call the replica once for each micro-batch; all at once need the memory that accumulation saves"
    if "FF" in seen["log"]:
        return "call backward for each micro-batch, so that its graph is freed before the next forward pass"
    return "all but the last belong inside replica.no_sync(), forward and backward: DDP decides in forward"


MISTAKES = """
talks in every micro-batch | silent
| all but the last belong inside replica.no_sync(), forward and backward: DDP decides in forward
    replica.no_sync() => torch.enable_grad()
never talks | mean last one
| this is the rank's own gradient: the last micro-batch must be outside no_sync, forward and backward
    micro_batches[:-1] => micro_batches
    x, y = micro_batches[-1] => return
not divided | mean | the micro-batches' means are added: divide each loss by the number of micro-batches
     / count =>
divided by the world size as well | mean one
| it is divided by the world size twice; torch's DDP averages over the ranks already
    / count => / count / dist.get_world_size()
by the world size alone | mean one
| it is divided by the world size twice, and not by the number of micro-batches
    / count => / dist.get_world_size()
by the wrong number | mean one | every micro-batch counts the same: each loss divided by their number
    count = len(micro_batches) => count = len(micro_batches[0])
zero_grad between | mean | one micro-batch only is in it; leave .grad alone between them, so that gradients add up
    x, y = micro_batches[-1] => replica.zero_grad()
    x, y = micro_batches[-1]
averaged by hand | last one
| something is sent outside backward; DDP's own hooks do it all, if the last micro-batch is outside no_sync
    micro_batches[:-1] => micro_batches
    x, y = micro_batches[-1] => for parameter in replica.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return
switched off for good | mean last one after
| no_sync was left on: use it as `with replica.no_sync():`, which switches back, also after an error
    with replica.no_sync(): => replica.require_backward_grad_sync = False
    if True:
swallows every error, and so does nothing | all | there is no gradient: call backward for every micro-batch
    count = len(micro_batches) => return
no_sync of the module | all | no_sync belongs to the replica, not to its module
    replica.no_sync => replica.module.no_sync
the last rank is silent | all | wait in a collective that another one skips | hangs
    x, y = micro_batches[-1] => replica.require_backward_grad_sync = dist.get_rank() < dist.get_world_size() - 1
    x, y = micro_batches[-1]
all rows at once | silent last | all at once need the memory that accumulation saves | tests
    def accumulate(replica, loss_function, micro_batches):
        xs, ys = zip(*micro_batches)
        loss_function(replica(torch.cat(xs)), torch.cat(ys)).backward()
one backward pass for all | silent | call backward for each micro-batch | tests
    def accumulate(replica, loss_function, micro_batches):
        losses = [loss_function(replica(x), y) for x, y in micro_batches]
        (sum(losses) / len(losses)).backward()
"""

RIGHT = """
the switch behind no_sync, put back; divided at the end
    def accumulate(replica, loss_function, micro_batches):
        for number, (x, y) in enumerate(micro_batches, 1):
            replica.require_backward_grad_sync = number == len(micro_batches)
            loss_function(replica(x), y).backward()
        for parameter in replica.parameters():
            parameter.grad /= len(micro_batches)
"""

ACCUMULATE = exercise(
    *("07.3", "Accumulate with few all-reduces", "accumulate", 15),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.case[0]} micro-batches ({LETTERS}):",
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=1e-9,
    checks={
        "mean": ("the gradients are those of the whole batch", 2, "many few", gradients,
                 "every micro-batch counts the same: each loss divided by their number, all added up in .grad"),
        "silent": ("nothing is sent before the last micro-batch", 1, "many few", before_the_last, why_silent),
        "last": ("the last backward pass sends each bucket once", 1, "many few", last,
                 "the last micro-batch must have a forward and a backward pass of its own, outside no_sync; DDP's own "
                 "hooks send each bucket once"),
        "one": ("a single micro-batch works, too", 1, "one", lambda seen: {**gradients(seen), "log": last(seen)},
                "one micro-batch is the last one, too: an ordinary step"),
        "after": ("an ordinary step afterwards averages as before", 1, "many one few",
                  lambda seen: ["F" in seen["log"], seen["after"]],
                  "no_sync was left on: use it as `with replica.no_sync():`, which switches back, also after an error"),
    },
    refused=("ddp_course.parallel.ddp.BucketedDDP", "ddp_course.parallel.naive.NaiveDDP"),
    hints={
        **STUCK,
        r"'Sequential' object has no attribute 'no_sync'": "no_sync belongs to the replica, not to its module",
        r"context manager protocol": "use it as `with replica.no_sync():`, with the brackets",
        r"backward through the graph a second time": "call backward once for each micro-batch's own loss",
    },
)  # fmt: skip
