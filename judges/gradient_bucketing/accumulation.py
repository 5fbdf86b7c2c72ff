"""07.3 `accumulate(replica, loss_function, micro_batches)`: is it silent until the last backward pass?

The replica is torch's own DDP, which talks from C++; its collectives pass the dispatcher as all others do. So what
happened is a log of letters: FBFBFBss is two silent micro-batches, and a third whose backward pass sends two buckets.
Read next: `compression.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.expect import all_of, equals, exercise, turned
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.gradient_bucketing.overlap import LAST, STUCK, log_is

WIDTHS, ROWS = (6, 6, 6, 6, 6), 3
SETTLE = 3  # ordinary steps after which DDP has its buckets


@dataclass(frozen=True)
class Case:
    """One call, with so many micro-batches."""

    count: int
    seed: int

    def model(self) -> nn.Sequential:
        """Return the same model on every rank."""
        return tasks.net(self.seed, *WIDTHS)

    def batches(self, rank: int) -> list[tasks.Batch]:
        """Return one rank's micro-batches; their gradients differ."""
        return [(x, y + n) for n in range(self.count) for x, y in [tasks.batch(self.seed, rank, n, ROWS, WIDTHS[0])]]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let DDP settle its buckets, call the function, and take one ordinary step; keep a log of each."""
    model = case.model()
    replica = DistributedDataParallel(model, bucket_cap_mb=8 * WIDTHS[0] ** 2 / 2**20)

    def ordinary() -> str:
        replica.zero_grad()
        x, y = case.batches(rank)[0]
        with Log(model) as log:
            nn.functional.mse_loss(replica(x), y).backward()
        return log.text

    before = [ordinary() for _ in range(SETTLE)][-1]
    replica.zero_grad()
    batches = case.batches(rank)
    with Log(model) as log:
        function(replica, nn.functional.mse_loss, batches)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    found = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
    left = [part for pair in batches for part in pair]
    given = [part for pair in case.batches(rank) for part in pair]
    changed = len(left) != len(given) or not all(map(torch.equal, left, given))
    return Note(
        buckets=before.count("s"),
        gradients=found,
        logs=[log.text],
        after=[ordinary()],
        given_changed=changed,
    )


def rounds(rng: Random) -> list[Round]:
    """Several micro-batches, then one, then another number of them."""
    ranks, seed = rng.choice((2, 3)), rng.randint(1, 10**6)
    counts = {"many": rng.choice((4, 5)), "one": 1, "few": rng.choice((2, 3))}
    return [Round(ranks, [(name, Case(count, seed + count)) for name, count in counts.items()])]


# --- What is expected ------------------------------------------------------------------------------


def one_process(seen: Seen, times: float = 1, ranks: slice = slice(None), of: slice = slice(None)) -> list[float]:
    """Return the gradient of one process.

    Args:
        times: a factor too much. ranks, of: whose gradients, and of which micro-batches, count.
    """
    model, world = seen.case.model(), range(seen.world_size)
    own_RKP = [torch.stack([tasks.gradient(model, rows) for rows in seen.case.batches(rank)]) for rank in world[ranks]]
    return (times * torch.stack(own_RKP)[:, of].sum(1).mean(0) / seen.case.count).tolist()


def mistakes(seen: Seen) -> dict[str, dict]:
    """Return the knobs that each mistake turns."""
    count, ranks, own = seen.case.count, seen.world_size, slice(seen.rank, seen.rank + 1)
    outside = "this is the rank's own gradient: the last micro-batch must be outside no_sync, forward and backward"
    twice = "it is divided by the world size twice; torch's DDP averages over the ranks already"
    one = "one micro-batch only is in it; leave .grad alone between them, so that gradients add up"
    return {
        "there is no gradient: call backward for every micro-batch, and no zero_grad at the end": {"times": 0},
        "the micro-batches' means are added: divide each loss by the number of micro-batches": {"times": count},
        twice: {"times": 1 / ranks},
        f"{twice}, and not by the number of micro-batches": {"times": count / ranks},
        "it is divided by the number of micro-batches twice": {"times": 1 / count},
        outside: {"ranks": own},
        f"{outside}; and divide each loss": {"ranks": own, "times": count},
        one: {"of": slice(-1, None)},
        f"{one}, and divide each loss": {"of": slice(-1, None), "times": count},
        f"{one}: this is the first": {"of": slice(0, 1)},
        f"{one}: this is the first, undivided": {"of": slice(0, 1), "times": count},
        "the last micro-batch is missing": {"of": slice(0, -1)},
    }


rule = "every micro-batch counts the same: each loss divided by their number, all added up in .grad"
mean = equals("the last bias's gradient", one_process, turned(one_process, mistakes), rule, of="gradients", **LAST)
silent = log_is(
    "%(count)s micro-batches, each with a forward and a backward pass; nothing sent before the last",
    {
        r"([^F]*F){%(count)s}[^F]*": "call the replica once for each micro-batch; all at once need the memory that "
        "accumulation saves",
        r"[^F]*(F[^F]*B[^F]*)*": "call backward for each micro-batch, so that its graph is freed before the next "
        "forward pass",
        r"[^FsS]*(F[^FsS]*){%(count)s}.*": "all micro-batches but the last belong inside replica.no_sync(), forward "
        "and backward: DDP decides in the forward pass, which must be inside too",
    },
)
last = log_is(
    "%(buckets)s collectives in the last of %(count)s backward passes, as in an ordinary step",
    {
        r"([^F]*F){%(count)s}[^F]*[sS].*": "the last micro-batch must have a forward and a backward pass of its own, "
        "outside no_sync",
        r"(.*F)?[^SF]*": "something is sent outside backward; DDP's own hooks do it all, if the last micro-batch is "
        "outside no_sync",
        r".*F[^sF]*(s[^sF]*){%(buckets)s}": "each bucket is sent once in the last backward pass, by DDP itself",
    },
)
off = "no_sync was left on: use it as `with replica.no_sync():`, which switches back, also after an error"
as_before = all_of(
    log_is("a step before an ordinary one", {r".*F.*": "call the replica for each micro-batch"}),
    log_is("%(buckets)s collectives in an ordinary step afterwards", {r"[^s]*(s[^s]*){%(buckets)s}": off}, of="after"),
)

ACCUMULATE = exercise(
    *("07.3", "Accumulate with few all-reduces", "accumulate", 15),
    act=act,
    rounds=rounds,
    checks={
        "mean": ("the gradients are those of the whole batch", 2, mean, "many few"),
        "silent": ("nothing is sent before the last micro-batch", 1, silent, "many few"),
        "last": ("the last backward pass sends each bucket once", 1, last, "many few"),
        "one": ("a single micro-batch works, too", 1, all_of(mean, last), "one"),
        "after": ("an ordinary step afterwards averages as before", 1, as_before, "many one few"),
    },
    refused=("ddp_course.parallel.ddp.BucketedDDP", "ddp_course.parallel.naive.NaiveDDP"),
    hints={
        **STUCK,
        r"'Sequential' object has no attribute 'no_sync'": "no_sync belongs to the replica, not to its module",
        r"context manager protocol": "use it as `with replica.no_sync():`, with the brackets",
        r"backward through the graph a second time": "call backward once for each micro-batch's own loss",
    },
)
