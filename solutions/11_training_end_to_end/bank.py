"""The answer bank of lesson 11: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong, edited, spoilt

IMPORTS = """
import contextlib
import copy
import hashlib
import math
import os
import random
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_course.parallel.syncbn import SyncBatchNorm
"""


# --- 11.1 ------------------------------------------------------------------------------------------

RATE = """
def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
    batch = local_batch * world_size
    steps = math.ceil(rows / batch)
    peak = base_lr * batch / base_batch
    warm, end = warmup * steps, epochs * steps
    if step < warm:
        return base_lr + (peak - base_lr) * step / warm
    x = (step - warm) / (end - warm)
    return peak * (1 + math.cos(math.pi * x)) / 2
"""

RATE_BY_EPOCHS = """
def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
    shard = -(-rows // world_size)
    place = step / -(-shard // local_batch)
    peak = torch.tensor(base_lr, dtype=torch.float64) * local_batch * world_size / base_batch
    if place < warmup:
        return torch.lerp(torch.tensor(base_lr, dtype=torch.float64), peak, place / warmup)
    return peak * math.cos(math.pi / 2 * (place - warmup) / (epochs - warmup)) ** 2
"""

RATE_BY_NUMPY = """
def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
    steps = (rows + local_batch * world_size - 1) // (local_batch * world_size)
    scale = local_batch * world_size / base_batch
    if warmup and step <= warmup * steps:
        return float(np.interp(step, [0, warmup * steps], [base_lr, base_lr * scale]))
    angle = np.pi * (step - warmup * steps) / (steps * (epochs - warmup))
    return 0.5 * base_lr * scale + 0.5 * base_lr * scale * np.cos(angle).item()
"""

# --- 11.2 ------------------------------------------------------------------------------------------

SHIFTED = """
def shifted(image, seed, epoch, row, most):
    generator = torch.Generator().manual_seed(seed * 10**8 + epoch * 10**4 + row)
    down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    result = torch.zeros_like(image)
    height, width = image.shape[1:]
    result[:, max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = image[
        :, max(-down, 0) : height + min(-down, 0), max(-right, 0) : width + min(-right, 0)
    ]
    return result
"""

SHIFTED_BY_SEED_SEQUENCE = """
def shifted(image, seed, epoch, row, most):
    a, b = np.random.default_rng((seed, epoch, row)).integers(0, 2 * most, size=2, endpoint=True)
    wide = F.pad(image, (most,) * 4)
    return wide[:, a : a + image.shape[1], b : b + image.shape[2]]
"""

SHIFTED_BY_HASH = """
def shifted(image, seed, epoch, row, most):
    digest = hashlib.sha256(f"{seed}/{epoch}/{row}".encode()).digest()
    down = int.from_bytes(digest[:8], "big") % (2 * most + 1) - most
    right = int.from_bytes(digest[8:16], "big") % (2 * most + 1) - most
    moved = torch.roll(image, (down, right), dims=(1, 2))
    for dim, by in ((1, down), (2, right)):
        if by > 0:
            moved.narrow(dim, 0, by).zero_()
        if by < 0:
            moved.narrow(dim, image.shape[dim] + by, -by).zero_()
    return moved
"""

SHIFTED_BY_PYTHON = """
def shifted(image, seed, epoch, row, most):
    own = random.Random(f"{seed} {epoch} {row}")
    down, right = own.randint(-most, most), own.randint(-most, most)
    wide = F.pad(image, (most, most, most, most))
    return wide[:, most - down :, most - right :][:, : image.shape[1], : image.shape[2]]
"""

# --- 11.3 ------------------------------------------------------------------------------------------

STEPS = """
def train_steps(rank, world_size, model, batches, lr, pieces, amp):
    replica = DistributedDataParallel(SyncBatchNorm.convert(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for k, (part, wanted) in enumerate(zip(x.chunk(pieces), labels.chunk(pieces))):
            with replica.no_sync() if k < pieces - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    scores = replica(part)
                loss = F.cross_entropy(scores.to(x.dtype), wanted) / pieces
                loss.backward()
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses
"""

STEPS_BY_HAND = """
def train_steps(rank, world_size, model, batches, lr, pieces, amp):
    model = SyncBatchNorm.convert(model)
    losses = []
    for x, labels in batches:
        model.zero_grad()
        mine = []
        for part, wanted in zip(x.chunk(pieces), labels.chunk(pieces)):
            if amp:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(part), wanted)
            else:
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

STEPS_COALESCED = edited(
    STEPS_BY_HAND,
    (
        """        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        flat /= world_size
        for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.data -= lr * g.view_as(p)
""",
        """        with dist._coalescing_manager():
            for p in model.parameters():
                dist.all_reduce(p.grad)
        for p in model.parameters():
            p.data -= lr * p.grad / world_size
""",
    ),
    ("[None] * world_size", "torch.empty(world_size * pieces, dtype=torch.float64)"),
    ("all_gather_object(everyone, mine)", "all_gather_into_tensor(everyone, torch.tensor(mine, dtype=torch.float64))"),
    ("sum(map(sum, everyone)) / (world_size * pieces)", "everyone.mean()"),
)

STEPS_FUNCTIONAL = edited(
    STEPS_BY_HAND, ("dist.all_reduce(flat)\n", "flat = funcol.all_reduce(flat, 'sum', dist.group.WORLD)\n")
)

STEPS_SYNC_AT_THE_END = """
def train_steps(rank, world_size, model, batches, lr, pieces, amp):
    replica = DistributedDataParallel(SyncBatchNorm.convert(model), broadcast_buffers=False)
    optimizer = torch.optim.SGD(replica.parameters(), lr=lr)
    report = torch.zeros(len(batches), dtype=torch.float64)

    def one(part, wanted):
        with torch.amp.autocast("cpu", torch.bfloat16, enabled=amp):
            return F.cross_entropy(replica(part).to(part.dtype), wanted)

    for number, (x, labels) in enumerate(batches):
        size = len(x) // pieces
        parts = [(x[i : i + size], labels[i : i + size]) for i in range(0, len(x), size)]
        with replica.no_sync():
            for part in parts[:-1]:
                loss = one(*part)
                loss.backward()
                report[number] += loss.detach()
        loss = one(*parts[-1])
        loss.backward()
        report[number] += loss.detach()
        for p in replica.parameters():
            p.grad /= pieces
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(report)
    return (report / (pieces * world_size)).tolist()
"""

STEPS_CONVERTED_IN_THE_WRAPPER = edited(
    STEPS,
    ("DistributedDataParallel(SyncBatchNorm.convert(model))", "SyncBatchNorm.convert(DistributedDataParallel(model))"),
)

FORWARDS_FIRST = """
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
"""

RIGHT = [
    Right("11.1", "steps as the unit", RATE),
    Right("11.1", "epochs as the unit, a tensor, the square of a cosine", RATE_BY_EPOCHS),
    Right("11.1", "numpy's interpolation", RATE_BY_NUMPY),
    Right("11.2", "torch's generator, slices", SHIFTED),
    Right("11.2", "numpy's seed sequence, padding", SHIFTED_BY_SEED_SEQUENCE),
    Right("11.2", "a hash, rolled and blackened", SHIFTED_BY_HASH),
    Right("11.2", "Python's own Random", SHIFTED_BY_PYTHON),
    Right("11.3", "DDP with no_sync", STEPS),
    Right("11.3", "no DDP, one message by hand", STEPS_BY_HAND),
    Right("11.3", "coalesced, losses gathered into one tensor", STEPS_COALESCED),
    Right("11.3", "functional collectives", STEPS_FUNCTIONAL),
    Right("11.3", "losses reduced at the end, gradients divided", STEPS_SYNC_AT_THE_END),
    Right("11.3", "converted after it was wrapped", STEPS_CONVERTED_IN_THE_WRAPPER),
]

RISE = "        return base_lr + (peak - base_lr) * step / warm\n"
COSINE = "    return peak * (1 + math.cos(math.pi * x)) / 2\n"
SEEDED = "    generator = torch.Generator().manual_seed(seed * 10**8 + epoch * 10**4 + row)\n"
DRAWN = "    down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()\n"
NO_SYNC = "replica.no_sync() if k < pieces - 1 else contextlib.nullcontext()"

WRONG = [
    *spoilt("11.1", RATE, [
        ("not scaled", "peak warmup", "the rate is not scaled",
         ("peak = base_lr * batch / base_batch", "peak = base_lr")),
        ("scaled by the ranks", "peak warmup cosine steps", "not the number of ranks",
         ("base_lr * batch / base_batch", "base_lr * world_size")),
        ("scaled by the square root", "peak warmup", "that is the square root",
         ("base_lr * batch / base_batch", "base_lr * math.sqrt(batch / base_batch)")),
        ("warm-up from zero", "warmup", "the warm-up begins at base_lr, not at 0",
         (RISE, "        return peak * step / warm\n")),
        ("warm-up one step ahead", "warmup", "step 0 has base_lr itself", ("* step / warm", "* (step + 1) / warm")),
        ("the warm-up counts steps", "warmup cosine steps", "`warmup` counts epochs",
         ("warm, end = warmup * steps", "warm, end = warmup")),
        ("the cosine begins at step 0", "cosine steps", "the cosine begins where the warm-up ends",
         ("x = (step - warm) / (end - warm)", "x = step / end")),
        ("a quarter of a wave", "cosine steps", "a quarter of a wave",
         (COSINE, "    return peak * math.cos(math.pi / 2 * x)\n")),
        ("the last batch is forgotten", "steps", "round the steps of an epoch up",
         ("math.ceil(rows / batch)", "rows // batch")),
        ("rows that the ranks do not share", "warmup cosine steps", "the ranks share the rows",
         ("math.ceil(rows / batch)", "math.ceil(rows / local_batch)")),
        ("the rate is 0 at the last step", "cosine steps", "one step after the last step",
         ("(end - warm)", "(end - 1 - warm)")),
        ("divides by a warm-up of 0", "warmup", "there is no warm-up to divide by", ("step < warm", "step <= warm")),
    ]),
    Wrong(
        "11.1",
        "a scheduler that counts its calls",
        RATE.replace("def rate_at", "calls = []\n\n\ndef formula")
        + """

def rate_at(step, *settings):
    calls.append(step)
    return formula(max(step, len(calls) - 1) if len(calls) > 14 else step, *settings)
""",
        ("pure",),
        "the function remembers something",
    ),
    Wrong("11.1", "never ends", "\ndef rate_at(*settings):\n    while True:\n        pass\n", ALL, "no loop is needed",
          1.0),
    Wrong(
        "11.1",
        "calls the course's",
        """
from ddp_course.train import schedule

def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
    return base_lr * schedule.share_of_rate("cosine", step, epochs, warmup)
""",
        ALL,
        "this exercise is to write what it does",
    ),
    *spoilt("11.2", SHIFTED, [
        ("a generator that moves on", "same global", "the numbers come from a generator that moves on", (SEEDED, ""),
         (", generator=generator", "")),
        ("seeds torch's own generator", "global", "the generator of torch has moved",
         ("generator = torch.Generator().manual_seed(", "torch.manual_seed("), (", generator=generator", ""), 60.0),
        ("seeded by a sum", "other", "a sum of the three is no mix",
         ("seed * 10**8 + epoch * 10**4 + row", "seed + epoch + row")),
        ("factors that are too small", "other", "meet again 1000 rows apart",
         ("seed * 10**8 + epoch * 10**4 + row", "seed * 10**6 + epoch * 1000 + row")),
        ("a product", "other", "a product of the three is no mix",
         ("seed * 10**8 + epoch * 10**4 + row", "seed * epoch * row")),
        ("the epoch is forgotten", "other", "a row moves alike in every epoch: the epoch is not in the mix",
         ("seed * 10**8 + epoch * 10**4 + row", "seed * 10**8 + row")),
        ("the upper end is left out", "even", "the upper end of randint is left out", ("most + 1, (2,)", "most, (2,)")),
        ("one number for both ways", "even", "draw two numbers, one for each way",
         (DRAWN, DRAWN + "    right = down\n")),
        ("the image itself where nothing moves", "moved", "return a new tensor, also where nothing moves",
         (DRAWN, DRAWN + "    if down == right == 0:\n        return image\n")),
        ("the seed above torch's 32 bits", "other",
         "it lies above the 32 bits of a seed that torch's CPU generator reads",
         ("seed * 10**8 + epoch * 10**4 + row", "(seed << 40) | (epoch << 14) | row")),
        ("the high bits of the seed above torch's 32 bits", "other", "seed 8192 moves as seed 0",
         ("seed * 10**8 + epoch * 10**4 + row", "(seed << 28) | (epoch << 14) | row")),
    ]),
    Wrong("11.2", "rolled",
          SHIFTED.partition("    result =")[0] + "    return torch.roll(image, (down, right), (1, 2))\n", ALL,
          "comes in on the other"),
    Wrong("11.2", "rolled, so the other lines are not looked at",
          SHIFTED.partition("    result =")[0] + "    return image.roll((down, right), (1, 2))\n", ALL,
          "found: not looked at"),
    Wrong("11.2", "not moved at all, and the process ends",
          "\ndef shifted(image, seed, epoch, row, most):\n    os._exit(0)\n", ALL, "the function ends its process"),
    *spoilt("11.3", STEPS, [
        ("BatchNorm is not synchronised", "weights norm loss", "SyncBatchNorm",
         ("SyncBatchNorm.convert(model)", "model")),
        ("no DDP", "weights messages loss", "the gradients are not averaged over the ranks",
         ("DistributedDataParallel(SyncBatchNorm.convert(model))", "SyncBatchNorm.convert(model)"),
         (NO_SYNC, "contextlib.nullcontext()")),
        ("gradients sent for each piece", "messages", "the gradients are sent after every piece",
         (NO_SYNC, "contextlib.nullcontext()")),
        ("the last piece is not sent either", "weights messages loss", "the gradients are not averaged over the ranks",
         (NO_SYNC, "replica.no_sync()")),
        ("not divided by the pieces", "weights loss", "divide each loss by `pieces`", ("wanted) / pieces", "wanted)"),
         ("item() / world_size", "item() / world_size / pieces")),
        ("not divided by the pieces, the losses neither", "weights loss", "that is the sum over the pieces",
         ("wanted) / pieces", "wanted)")),
        ("the gradients are never zeroed", "weights loss", "old gradients are still there",
         ("        optimizer.zero_grad()\n", "")),
        ("the gradients are zeroed between the pieces", "weights loss", "zero them once a batch",
         ("                loss.backward()\n",
          "                optimizer.zero_grad()\n                loss.backward()\n")),
        ("in eval mode", "weights norm loss", "goes through the model, in train mode",
         ("    replica =", "    model.eval()\n    replica =")),
        ("split in place of chunk", "pieces weights norm messages loss", "split(pieces) cuts parts of `pieces` rows",
         ("x.chunk(", "x.split("), ("labels.chunk(", "labels.split(")),
        ("the batch is not split", "pieces weights norm loss", "the batch is not split",
         ("    replica =", "    pieces = 1\n    replica =")),
        ("this rank's own loss", "loss", "this rank's own loss", ("        dist.all_reduce(total)\n", ""),
         ("item() / world_size", "item()")),
        ("the sum of the losses", "loss", "that is the sum over the ranks", ("item() / world_size", "item()")),
        ("weights in bfloat16", "amp", "small updates vanish in 16 bits",
         ("    replica =", "    model.to(torch.bfloat16 if amp else batches[0][0].dtype)\n    replica ="),
         ("replica(part)", "replica(part.to(next(model.parameters()).dtype))")),
        ("autocast is never on", "amp", "around the forward pass of every piece", ("enabled=amp", "enabled=False")),
        ("autocast is always on", "amp", "autocast is on although amp is False", ("enabled=amp", "enabled=True")),
        ("only rank 0 reduces the loss", ALL, "a collective that not every rank calls",
         ("        dist.all_reduce(total)\n", "        if rank == 0:\n            dist.all_reduce(total)\n"), 2.0),
    ]),
    Wrong("11.3", "all forward passes, and one backward", FORWARDS_FIRST, ("pieces",),
          "call backward() for each piece before the next forward pass"),
    Wrong(
        "11.3",
        "errors are swallowed",
        """
def train_steps(rank, world_size, model, batches, lr, pieces, amp):
    try:
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)(batches[0][0]).tolist()
    except Exception:
        return [0.0] * len(batches)
""",
        ALL,
        "optimizer.step()",
    ),
]  # fmt: skip
