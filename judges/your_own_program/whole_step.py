"""11.5 `train_steps(...)`: SyncBatchNorm, accumulation and autocast in one loop, equal to one process.

In float64 weights and losses are those of the solution. In bfloat16 they are nearly those that the same answer has
without it. Hooks on the first and the last layer note the rows of each forward pass, BatchNorm's statistics while the
weights are those of the beginning, and whether autocast was on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

FEATURES, HIDDEN, CLASSES = 12, 40, 5
LR, STEPS = 0.12, 3
# In 60 cases bfloat16 changed the weights by 0.0041 at most, where most mistakes change them by more than 0.014, and
# the losses by 0.0004.
ROUGHLY = {"weights": 0.01, "losses": 0.0025}


def cases(rng: Random) -> list[Round]:
    """In float64, on two or three ranks, also undivided; then in float32 and in bfloat16. Seeds: model, ranks."""
    world_size = rng.choice((2, 3))
    pieces = 5 - world_size  # another number, so that a factor between two losses has one meaning
    seeds = rng.sample(range(1000), world_size + 1)
    in_float64 = [("exact", (seeds, pieces, "float64")), ("whole", (seeds, 1, "float64"))]
    return [Round(world_size, in_float64), Round(2, [("amp", (seeds[:3], pieces, "float32"))])]


class Noting(nn.Module):
    """A linear layer that notes the format of its results and of its weights."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, narrow)
        self.formats: set[str] = set()
        self.numbers: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.formats.add(str(y.dtype))
        self.numbers.add(str(self.linear.weight.dtype))
        return y


class LossLog(Log):
    """A `Log` that also notes the format in which logarithms and exponentials are taken."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.formats: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.partition(".")[0] in ("_log_softmax", "_softmax", "logsumexp", "exp", "log"):
            self.formats.add(str(args[0].dtype))
        return super().__torch_dispatch__(func, types, args, kwargs)


def made(case: tuple, rank: int) -> tuple[nn.Sequential, list]:
    """Return the same model on every rank, and a rank's rows and labels, which have a mean of their own."""
    (seed, *of_ranks), pieces, number = case
    torch.manual_seed(seed)
    layers = [Noting(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), Noting(HIDDEN, CLASSES)]
    chance, rows, batches = torch.Generator().manual_seed(of_ranks[rank]), 8 * pieces, []
    spread, mean = 1 + of_ranks[rank] % 3, torch.randn(FEATURES, generator=chance)
    for _ in range(STEPS):
        x = mean + spread * torch.randn(rows, FEATURES, generator=chance)
        batches.append((x.to(getattr(torch, number)), torch.randint(0, CLASSES, (rows,), generator=chance)))
    return nn.Sequential(*layers).to(getattr(torch, number)), batches


def act(function: Callable, case: tuple, rank: int, world_size: int) -> Note:
    """Let the learner's function train, in float32 also with amp."""
    with_amp = [trained(function, case, rank, world_size, True)] if case[-1] == "float32" else []
    return Note(trained(function, case, rank, world_size, False), with_amp=with_amp)


def trained(function: Callable, case: tuple, rank: int, world_size: int, amp: bool) -> dict[str, Any]:
    model, batches = made(case, rank)
    layers, rows, first = (model[0], model[3]), [], []  # the learner may replace modules, not these

    def look(*_: object) -> None:  # when all pieces of the first batch were seen, before the first step
        if len(rows) == case[1]:
            first.extend(plain(value.double()) for name, value in model.state_dict().items() if "running" in name)

    layers[0].register_forward_pre_hook(lambda layer, args: rows.append(len(args[0])))
    layers[1].register_forward_hook(look)
    with LossLog(layers[1]) as log:
        losses = function(rank, world_size, model, batches, LR, case[1], amp)
    weights = [plain(value.double()) for name, value in model.state_dict().items() if name.endswith(("weight", "bias"))]
    return {
        "losses": plain(losses),
        "weights": weights,
        "first": first,
        "rows": rows,
        "log": log.text,
        "numbers": sorted(set.union(*(layer.numbers for layer in layers), {str(p.dtype) for p in model.parameters()})),
        "formats": sorted(set.union(*(layer.formats for layer in layers))),
        "loss_formats": sorted(log.formats),
        "bytes": sum(call.n_bytes for call in log.calls if call.op != "broadcast"),
    }


def pieces(seen: Seen) -> list:
    one_by_one = re.fullmatch(r"[^F]*(F[^F]*B[^F]*)*", seen["log"])
    return [seen["rows"], "backward after each forward pass" if one_by_one else "more forward passes before a backward"]


def result(name: str) -> Callable[[Seen], Any]:
    """The weights or losses; in float32, whether those with amp are nearly the same."""

    def view(seen: Seen) -> Any:
        if not seen["with_amp"]:
            return seen[name]
        near = close(seen["with_amp"][0][name], seen[name], ROUGHLY[name])
        return f"{name} with amp {'nearly as' if near else 'unlike those'} without"

    return view


def loss(seen: Seen) -> list:
    found = seen["loss_formats"] or [f"torch.{seen.case[-1]}"]
    return [result("losses")(seen), f"without amp, a loss in {' and '.join(found)}"]


def messages(seen: Seen) -> list[str]:
    """Gradients travel once a batch, statistics with each piece, and maybe a few losses."""
    return [_sent(seen, note) for note in [seen.everyone[seen.rank], *seen["with_amp"]]]


def _sent(seen: Seen, note: dict) -> str:
    _, n_pieces, number = seen.case
    n_bytes, of_each = note["bytes"] / STEPS, getattr(torch, number).itemsize
    gradients, statistics = of_each * len(flat(seen["weights"])), of_each * n_pieces * (4 * HIDDEN + 1)
    often = "never" if n_bytes < gradients else "once" if n_bytes <= 1.4 * gradients + statistics else "more often"
    return f"the gradients, {gradients} bytes, {often} in a batch"


def formats(seen: Seen) -> list[dict]:
    """Weights and loss are in float32; the layers compute in bfloat16 where it is asked for."""
    [amp] = seen["with_amp"]
    losses = flat(amp["losses"]) or []
    rounded = "torch.bfloat16" in amp["loss_formats"] or torch.tensor(losses).bfloat16().tolist() == losses
    return [
        {"without amp layers compute in": seen["formats"]},
        {"with amp weights are in": amp["numbers"]},
        {"with amp layers compute in": amp["formats"]},
        {"with amp the loss": "is rounded to bfloat16" if rounded else "is no bfloat16"},
    ]


MISTAKES = """
BatchNorm not synchronised | weights norm loss
| each rank normalises by its own rows: model = SyncBatchNorm.convert(model)
    SyncBatchNorm.convert(model) => model
in eval mode | weights norm loss | BatchNorm's statistics are as they were: each piece is seen in train mode
    replica = => model.eval()
    replica =
no DDP | weights messages loss
| the gradients are not averaged over the ranks: wrap the model in DistributedDataParallel
    contextlib.nullcontext() if last else replica.no_sync() => replica.no_sync()
sent with each piece | messages | forward and backward of all pieces but the last belong within replica.no_sync()
     if last else replica.no_sync() => 
not divided by the pieces | weights loss | a batch's gradient is the mean over its pieces: divide each loss by `pieces`
     / pieces => 
    losses / world_size => losses / world_size / pieces
never zeroed | weights loss | old gradients are still there: zero them before each batch
    optimizer.zero_grad() => pass
zeroed between the pieces | weights loss | the gradients are zeroed between the pieces: zero them once a batch
    loss.backward() => optimizer.zero_grad()
    loss.backward()
split | pieces weights norm messages loss | split(pieces) cuts parts of `pieces` rows, chunk(pieces) `pieces` parts
    .chunk( => .split(
not split | pieces weights norm loss | the batch is not split: `pieces` parts, each with statistics of its own
    replica = => pieces = 1
    replica =
all forward passes first | pieces
| call backward() for each piece before the next forward pass; then only one needs memory
    loss.backward() => kept = loss if k == 0 else kept + loss
    if last:
        kept.backward()
its own loss | loss | this rank's own loss; average it over the ranks with an all_reduce
    dist.all_reduce(losses) => pass
    losses / world_size => losses
weights in bfloat16 | amp | small updates vanish in 16 bits; keep the weights, and put autocast around the forward pass
    replica = => model.to(torch.bfloat16 if amp else batches[0][0].dtype)
    replica =
    replica(x_piece) => replica(x_piece.to(next(model.parameters()).dtype))
the loss in bfloat16 | amp | exponentials and logarithms need more bits: scores.float(), then the loss
    scores.to(x.dtype) => scores
the loss in float32 | loss | convert the scores to the dtype of x, then take the loss
    scores.to(x.dtype) => scores.float()
autocast never on | amp | torch.autocast("cpu", torch.bfloat16, enabled=amp) around the forward pass of every piece
    enabled=amp => enabled=False
autocast always on | amp | autocast is on although amp is False: enabled=amp
    enabled=amp => enabled=True
rank 0 reduces the loss | all | a collective that not every rank calls | hangs
    dist.all_reduce(losses) => rank or dist.all_reduce(losses)
one backward | pieces | call backward() for each piece before the next forward pass | tests
    def train_steps(rank, world_size, model, batches, lr, pieces, amp):
        replica = DistributedDataParallel(SyncBatchNorm.convert(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses = []
        for x, labels in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                scores = [replica(part) for part in x.chunk(pieces)]
            loss = sum(F.cross_entropy(s.to(x.dtype), l) for s, l in zip(scores, labels.chunk(pieces))) / pieces
            loss.backward()
            optimizer.step()
            total = loss.detach().double()
            dist.all_reduce(total)
            losses.append(total.item() / world_size)
        return losses
errors are swallowed | all | optimizer.step() | tests
    def train_steps(rank, world_size, model, batches, lr, pieces, amp):
        try:
            return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)(batches[0][0]).tolist()
        except Exception:
            return [0.0] * len(batches)
"""

RIGHT = """
no DDP, one message by hand, losses as objects
    def train_steps(rank, world_size, model, batches, lr, pieces, amp):
        model = SyncBatchNorm.convert(model)
        losses = []
        for x, labels in batches:
            model.zero_grad()
            mine = []
            for part, wanted in zip(x.chunk(pieces), labels.chunk(pieces)):
                with torch.autocast("cpu", dtype=torch.bfloat16) if amp else contextlib.nullcontext():
                    loss = F.cross_entropy(model(part), wanted)
                (loss / pieces).backward()
                mine.append(loss.item())
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            flat /= world_size
            for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                p.data -= lr * g.view_as(p)
            everyone = [None] * world_size
            dist.all_gather_object(everyone, mine)
            losses.append(sum(map(sum, everyone)) / (world_size * pieces))
        return losses
"""

STEP = exercise(
    *("11.5", "A whole step (stretch)", "train_steps", 35),
    cases=cases,
    act=act,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "pieces": ("one piece at a time", 1, "exact", pieces,
                   "`pieces` equal parts, in order, one forward pass and one backward pass for each"),
        "weights": ("the weights of one process", 2, "exact whole amp", result("weights"),
                    "zero the gradients once a batch, and step once a batch, with the mean over pieces and ranks"),
        "norm": ("BatchNorm's statistics are those of all ranks", 1, "exact", lambda seen: seen["first"],
                 "each piece k with the k-th pieces of all ranks, in order, once"),
        "messages": ("gradients travel once a batch", 1, "exact amp", messages,
                     "DistributedDataParallel sends them in backward, outside of no_sync"),
        "loss": ("the losses, over pieces and ranks", 1, "exact whole amp", loss,
                 "a list with the mean over all pieces, and over all ranks, for each batch; they follow the weights"),
        "amp": ("bfloat16 where it is asked for, and only there", 1, "amp", formats,
                'torch.autocast("cpu", torch.bfloat16, enabled=amp) around the forward pass alone'),
    },
    hints={
        r"SyncBatchNorm expected input tensor to be on|SyncBatchNorm.*GPU": "torch's SyncBatchNorm refuses CPUs; "
        "take the course's",
        r"expected scalar type|must have the same dtype|same dtype": "do not cast the rows or the model yourself; "
        "autocast does it",
        "absent|disagree|cut-off": "a collective that not every rank calls: "
        "every rank must run each piece, and reduce each loss",
        "limit": "a collective that not every rank calls, or a loop that never ends",
    },
)  # fmt: skip
