"""16.2 `train_step(replica, optimizer, loss_function, micro_batches, max_norm)`: is it one step on the whole batch?

The same steps are taken in one process, rightly and with one knob turned for each known mistake. When what happened is
a log of letters, such as FBFBFBssU: two silent micro-batches, a third whose backward sends two buckets, the update.
Read next: `utilisation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import short
from ddp_course.grading.vocabulary.expect import all_of, equals, exercise, follows, nothing, turned
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.play import Note, Round, Seen

WIDTHS, ROWS, RATE = (5, 5, 5, 5, 5), 2, 0.5
TOLERANCE = 1e-5  # clip_grad_norm_ adds 1e-6 to the norm
SETTLE = 3  # ordinary steps after which DDP has its buckets


@dataclass(frozen=True)
class Case:
    """Some steps in a row, of so many micro-batches each."""

    count: int
    steps: int
    max_norm: float
    seed: int

    def batches(self, rank: int, step: int) -> list[tasks.Batch]:
        """Return one rank's micro-batches of one step; their gradients differ, so it matters where one clips."""
        x, y = tasks.batch(self.seed, rank, step, self.count * ROWS, WIDTHS[0])
        return [(x, y + number) for number, (x, y) in enumerate(zip(x.split(ROWS), y.split(ROWS), strict=True))]

    def model(self) -> nn.Sequential:
        """Return the same model on every rank."""
        return tasks.net(self.seed, *WIDTHS)


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Let DDP settle its buckets, then take the steps; keep the weights, the norms and a log of each step."""
    model = case.model()
    replica = DistributedDataParallel(model, bucket_cap_mb=8 * WIDTHS[0] ** 2 / 2**20)
    for _ in range(SETTLE):
        x, y = case.batches(rank, 0)[0]
        with Log(model) as log:
            nn.functional.mse_loss(replica(x), y).backward()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    note = Note(buckets=log.text.count("s"), weights=[], norms=[], logs=[], barrier="")
    for step in range(case.steps):
        with Log(model, optimizer) as log:
            norm = function(replica, optimizer, nn.functional.mse_loss, case.batches(rank, step), case.max_norm)
        note["barrier"] = note["barrier"] or (log.calls != log.talks and "a barrier")
        note["weights"].append(tasks.weights(model))
        note["norms"].append(norm if isinstance(norm, float) else None)
        note["logs"].append(log.text)
    return note


def rounds(rng: Random) -> list[Round]:
    """A gradient too long, one short enough, and a single micro-batch, in one run."""
    world_size, count = rng.choice((2, 3)), rng.choice((3, 4))
    cut = Case(count, 2, rng.choice((0.3, 0.4)), rng.randint(1, 10**6))
    uncut = Case(rng.choice((2, 3)), 3, 1e6, rng.randint(1, 10**6))
    return [Round(world_size, [("cut", cut), ("uncut", uncut), ("one", Case(1, 2, 0.5, rng.randint(1, 10**6)))])]


# --- One process, rightly and wrongly --------------------------------------------------------------


def one_process(
    seen: Seen,
    cut: str = "whole",
    times: float = 1,
    ranks: slice = slice(None),
    of: slice = slice(None),
    keep: bool = False,
) -> tuple[list, list]:
    """Return weights and norms of each step.

    Args:
        cut: what is clipped. times: a factor too much. ranks, of: whose gradients, and of which micro-batches, count.
        keep: whether those of the step before are still there.
    """
    case, model, found, norms, kept = seen.case, seen.case.model(), [], [], 0.0
    sizes = [p.numel() for p in model.parameters()]

    def clipped(g_P: torch.Tensor) -> torch.Tensor:
        return g_P * min(1.0, case.max_norm / (g_P.norm().item() or case.max_norm))

    for step in range(case.steps):
        by_rank = [[tasks.gradient(model, b) for b in case.batches(rank, step)] for rank in range(seen.world_size)]
        own_RP = torch.stack([torch.stack(gs)[of].sum(0) / case.count for gs in by_rank[ranks]])
        if cut in ("each", "early"):
            for rank, gs in enumerate(by_rank):
                so_far = torch.zeros_like(gs[0])
                for g_P in gs[:-1]:
                    so_far = clipped(so_far + g_P / case.count) if cut == "each" else so_far + g_P / case.count
                own_RP[rank] = clipped(so_far) + gs[-1] / case.count
        whole = own_RP.mean(0) * times + kept
        norms.append((own_RP[seen.rank] if cut == "own" else whole).norm().item())
        if cut == "own":
            whole = torch.stack([clipped(g_P) for g_P in own_RP]).mean(0)
        elif cut == "values":
            whole = whole.clamp(-case.max_norm, case.max_norm)
        elif cut == "apart":
            whole = torch.cat([clipped(part) for part in whole.split(sizes)])
        elif cut == "always":
            whole = whole * case.max_norm / whole.norm()
        elif cut in ("whole", "each"):
            whole = clipped(whole)
        kept = whole if keep else 0.0  # clip_grad_norm_ has cut .grad itself
        tasks.descend(model, whole, RATE)
        found.append(tasks.weights(model))
    return found, norms


def mistakes(seen: Seen) -> dict[str, dict]:
    """Return the knobs that each mistake turns."""
    count, me = seen.case.count, seen.rank
    return {
        "the micro-batches' means are added: divide each loss by the number of micro-batches": {"times": count},
        "it is divided by the number of micro-batches twice": {"times": 1 / count},
        "it is divided by the world size twice; torch's DDP averages over the ranks already":
            {"times": 1 / seen.world_size},
        "the gradient is not clipped, or clipped after the update": {"cut": "nothing"},
        "it is clipped before the last backward pass, so each rank cuts a part of its own gradient": {"cut": "early"},
        "it is clipped after every micro-batch: clip once, after the last backward pass": {"cut": "each"},
        "each rank clips its own gradient, so what is averaged is another one; clip after DDP's average":
            {"cut": "own"},
        "single numbers are clipped (clip_grad_value_); cut by the norm of all gradients together": {"cut": "values"},
        "each parameter is clipped by its own norm: the norm is that of all gradients together": {"cut": "apart"},
        "a gradient that is short enough must stay as it is; do not make it longer": {"cut": "always"},
        "this is the rank's own gradient: the last micro-batch must be outside no_sync, forward and backward":
            {"ranks": slice(me, me + 1)},
        "one micro-batch only is in it; leave .grad alone between them, so that gradients add up":
            {"of": slice(-1, None)},
        "the gradients of the step before are still there: call optimizer.zero_grad() before or after each step":
            {"keep": True},
    }  # fmt: skip


# --- What is expected ------------------------------------------------------------------------------


def norm_slips(seen: Seen):
    """The norm after clipping, and those of the mistakes."""
    yield "this is the norm after clipping; take it before", min(one_process(seen)[1][0], seen.case.max_norm)
    yield from turned(lambda seen, **knobs: one_process(seen, **knobs)[1][0], mistakes)(seen)


weights = equals(
    lambda seen, right: (
        f"after {seen.case.steps} steps of {seen.case.count} micro-batches, the last weight {short(right[-1][-1])}"
    ),
    lambda seen, **knobs: one_process(seen, **knobs)[0],
    turned(lambda seen, **knobs: one_process(seen, **knobs)[0], mistakes),
    "each loss divided by their number, all added up in .grad, averaged by DDP, clipped once, then the update",
    of="weights",
    tolerance=TOLERANCE,
    shown=lambda found: found[-1][-1],
)
norm = equals(
    "the norm of the averaged gradient before clipping,",
    lambda seen: one_process(seen)[1][0],
    norm_slips,
    "return what clip_grad_norm_ returns after the last backward pass, as a float: .item()",
    of=lambda seen: seen["norms"][0],
    tolerance=TOLERANCE,
)
update = follows(
    (r".*U.*", "one update", "optimizer.step() was not called"),
    (r"([^FU]*F){%(count)s}[^FU]*U[^FU]*", "one update, after %(count)s micro-batches", "step once, after the last"),
)
silent = follows(
    (
        r"([^F]*F){%(count)s}[^F]*",
        "%(count)s micro-batches, one after the other",
        "call the replica once for each micro-batch; all at once need the memory that accumulation saves",
    ),
    (
        r"[^F]*(F[^F]*B[^F]*)*",
        "a backward pass after each forward pass",
        "call backward after each forward pass; until then its graph stays in memory, which accumulation saves",
    ),
    (
        r"[^FsS]*(F[^FsS]*){%(count)s}.*",
        "nothing sent before the last of %(count)s micro-batches",
        "all micro-batches but the last belong inside replica.no_sync(), forward and backward",
    ),
)
no_barrier = nothing(
    *("barrier", "no collective outside backward"),
    "a barrier is a collective: the ranks meet in DDP's own, in the last backward pass",
)
sending = follows(
    (
        r"(.*F)?[^SF]*",
        "no collective outside backward",
        "DDP has averaged when backward returns, so every rank finds the same norm by itself: send nothing more",
    ),
    (
        r".*F[^sF]*(s[^sF]*){%(buckets)s}",
        "%(buckets)s collectives in the last backward pass",
        "the last micro-batch must be outside no_sync, forward and backward: there DDP sends each bucket once",
    ),
)
right, sent_once = all_of(update, weights), all_of(sending, no_barrier)

STEP = exercise(
    "16.2",
    "One step of several small batches",
    "train_step",
    20,
    act=act,
    rounds=rounds,
    checks={
        "clipped": ("the weights are those of one process on the whole batch, clipped", 2, right, "cut"),
        "short": ("a gradient that is short enough is not changed, step after step", 1, right, "uncut"),
        "norm": ("the returned norm is that of the whole batch's gradient", 1, norm, "cut uncut"),
        "silent": ("one micro-batch at a time, and nothing is sent before the last", 1, silent, "cut uncut"),
        "once": ("the last backward pass sends each bucket once, and nothing follows", 1, sent_once, "cut uncut"),
        "one": ("a single micro-batch works, too", 1, all_of(right, sent_once), "one"),
    },
    refused=(
        *("ddp_course.train.gpt.accumulate", "ddp_course.parallel.ddp.BucketedDDP"),
        "ddp_course.parallel.naive.NaiveDDP",
    ),
    hints={
        r"'Sequential' object has no attribute 'no_sync'": "no_sync belongs to the replica, not to its module",
        r"context manager protocol": "use it as `with replica.no_sync():`, with the brackets",
        r"backward through the graph a second time": "call backward once for each micro-batch's own loss",
        "limit: waited in (all_reduce|barrier|broadcast)": "some ranks wait in a collective that "
        "another one skips; look for a branch on the rank",
    },
)
