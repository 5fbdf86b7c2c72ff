"""The answer bank of lesson 11: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.submissions import solutions

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

RATE, SHIFTED, STEPS = solutions("11").values()

# --- 11.1 ------------------------------------------------------------------------------------------

RATE_RIGHT = """
epochs as the unit, a tensor, the square of a cosine
    def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
        shard = -(-rows // world_size)
        place = step / -(-shard // local_batch)
        peak = torch.tensor(base_lr, dtype=torch.float64) * local_batch * world_size / base_batch
        if place < warmup:
            return torch.lerp(torch.tensor(base_lr, dtype=torch.float64), peak, place / warmup)
        return peak * math.cos(math.pi / 2 * (place - warmup) / (epochs - warmup)) ** 2
numpy's interpolation
    def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
        steps = (rows + local_batch * world_size - 1) // (local_batch * world_size)
        scale = local_batch * world_size / base_batch
        if warmup and step <= warmup * steps:
            return float(np.interp(step, [0, warmup * steps], [base_lr, base_lr * scale]))
        angle = np.pi * (step - warmup * steps) / (steps * (epochs - warmup))
        return 0.5 * base_lr * scale + 0.5 * base_lr * scale * np.cos(angle).item()
"""

RATE_WRONG = r"""
not scaled | peak warmup | the rate is not scaled
    peak = base_lr * global_batch / base_batch => peak = base_lr
scaled by the ranks | peak warmup cosine steps | not the number of ranks
    base_lr * global_batch / base_batch => base_lr * world_size
scaled by the square root | peak warmup | that is the square root
    base_lr * global_batch / base_batch => base_lr * math.sqrt(global_batch / base_batch)
the rate is only scaled up | peak warmup | the rate is not scaled
    global_batch / base_batch => max(1, global_batch / base_batch)
scaled by a whole number | peak warmup | the rate is not scaled
    global_batch / base_batch => max(1, global_batch // base_batch)
the warm-up is rounded to whole steps | warmup cosine steps | do not round
    warmup * steps_in_epoch => int(warmup * steps_in_epoch)
the steps of an epoch are remembered, whatever the number of ranks | warmup | in the warm-up
    math.ceil(rows / global_batch) => rate_at.__dict__.setdefault((rows, local_batch), math.ceil(rows / global_batch))
the last rows, too few for all ranks, are forgotten | steps | round the steps of an epoch up
    math.ceil(rows / global_batch) => math.ceil(rows // world_size / local_batch)
warm-up from zero | warmup | the warm-up begins at base_lr, not at 0
    base_lr + (peak - base_lr) * step => peak * step
warm-up one step ahead | warmup | step 0 has base_lr itself
    * step / warm => * (step + 1) / warm
the warm-up counts steps | warmup cosine steps | `warmup` counts epochs
    warmup * steps_in_epoch => warmup
the cosine begins at step 0 | cosine steps | the cosine begins where the warm-up ends
    (step - warm) / (end - warm) => step / end
a quarter of a wave | cosine steps | a quarter of a wave
    (1 + math.cos(math.pi * (step - warm) / (end - warm))) / 2 => math.cos(math.pi / 2 * (step - warm) / (end - warm))
the last batch is forgotten | steps | round the steps of an epoch up
    math.ceil(rows / global_batch) => rows // global_batch
rows that the ranks do not share | warmup cosine steps | the ranks share the rows
    math.ceil(rows / global_batch) => math.ceil(rows / local_batch)
the rate is 0 at the last step | cosine steps | one step after the last step
    (end - warm) => (end - 1 - warm)
divides by a warm-up of 0 | warmup | there is no warm-up to divide by
    step < warm => step <= warm
a scheduler that counts its calls | pure | the function remembers something
    rate_at( => formula(
    / 2 => / 2

    calls = []

    def rate_at(step, *settings):
        calls.append(step)
        return formula(max(step, len(calls) - 1) if len(calls) > 20 else step, *settings)
never ends | all | no loop is needed | 1
    def rate_at(*settings):
        while True:
            pass
calls the course's | all | this exercise is to write what it does
    from ddp_course.train import schedule

    def rate_at(step, rows, local_batch, world_size, epochs, warmup, base_lr, base_batch):
        return base_lr * schedule.share_of_rate("cosine", step, epochs, warmup)
"""

# --- 11.2 ------------------------------------------------------------------------------------------

SHIFTED_RIGHT = """
not copied again: padding has made a new tensor
    .clone() =>
a hash, rolled and blackened
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
Python's own Random
    def shifted(image, seed, epoch, row, most):
        own = random.Random(f"{seed} {epoch} {row}")
        down, right = own.randint(-most, most), own.randint(-most, most)
        wide = F.pad(image, (most, most, most, most))
        return wide[:, most - down :, most - right :][:, : image.shape[1], : image.shape[2]]
"""

SHIFTED_BY_TORCH = """
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

SHIFTED_WRONG = r"""
uniform numbers are rounded | even | draw each number from -most to most with the same chance
    torch.randint(-most, most + 1, (2,), generator=generator) => torch.rand(2, generator=generator).mul(
        2 * most).sub(most).round().int()
the second way comes from the generator of the next row | other | seed one generator, and draw both from it
    generator = torch.Generator().manual_seed(seed * 10**8 + epoch * 10**4 + row) => key = (
        seed * 10**8 + epoch * 10**4 + row)
    torch.randint(-most, most + 1, (2,), generator=generator).tolist() => (int(torch.randint(
        -most, most + 1, (), generator=torch.Generator().manual_seed(key + k))) for k in (0, 1))
a generator that moves on | same global | the numbers come from a generator that moves on
    , generator=generator =>
seeds torch's own generator | global | the generator of torch has moved | 60
    torch.Generator().manual_seed( => torch.manual_seed(
    , generator=generator =>
seeded by a sum | other | a sum of the three is no mix
    seed * 10**8 + epoch * 10**4 + row => seed + epoch + row
factors that are too small | other | with factors too small for that
    seed * 10**8 + epoch * 10**4 + row => seed * 10**6 + epoch * 1000 + row
a factor too small by one | other | row 9999 moves as row 0 of the next epoch
    seed * 10**8 + epoch * 10**4 + row => seed * 10**8 + epoch * 9999 + row
two primes for factors | other | with factors too small for that
    seed * 10**8 + epoch * 10**4 + row => seed * 1_000_003 + epoch * 10_007 + row
bits that overlap | other | bits of the three that overlap
    seed * 10**8 + epoch * 10**4 + row => (seed << 18) ^ (epoch << 9) ^ row
digits one behind the other | other | nor are digits
    seed * 10**8 + epoch * 10**4 + row => int(f"{seed}{epoch}{row}")
a way for each of epoch and row | other even | all rows move alike
    def shifted(image, seed, epoch, row, most):
        down, right = (int(np.random.default_rng((seed, n)).integers(-most, most + 1)) for n in (epoch, row))
        wide = F.pad(image, (most, most, most, most))
        return wide[:, most - down :, most - right :][:, : image.shape[1], : image.shape[2]]
only a thousand seeds | even | of few seeds
    seed * 10**8 + epoch * 10**4 + row => int(np.random.default_rng((seed, epoch, row)).integers(1000))
never at rest | even | draw two numbers, one for each way
    .tolist() => .tolist()\n    down = down or int(not right)
the order of the three is lost | other | the same number as others
    seed * 10**8 + epoch * 10**4 + row => hash(tuple(sorted((seed, epoch, row))))
a product | other | a product of the three is no mix
    seed * 10**8 + epoch * 10**4 + row => seed * epoch * row
the epoch is forgotten | other | a row moves alike in every epoch: the epoch is not in the mix
     + epoch * 10**4 =>
the upper end is left out | even | the upper end of randint is left out
    most + 1, (2,) => most, (2,)
one number for both ways | even | draw two numbers, one for each way
    .tolist() => .tolist()\n    right = down
the image itself where nothing moves | moved | return a new tensor, also where nothing moves
    .tolist() => .tolist()\n    if down == right == 0:\n        return image
the seed above torch's 32 bits | other | it lies above the 32 bits of a seed that torch's CPU generator reads
    seed * 10**8 + epoch * 10**4 + row => (seed << 40) | (epoch << 14) | row
the high bits of the seed above torch's 32 bits | other | seed 8192 moves as seed 0
    seed * 10**8 + epoch * 10**4 + row => (seed << 28) | (epoch << 14) | row
rolled | all | comes in on the other
    result = torch.zeros_like(image) => return torch.roll(image, (down, right), (1, 2))
rolled, so the other lines are not looked at | all | found: not looked at
    result = torch.zeros_like(image) => return image.roll((down, right), (1, 2))
not moved at all, and the process ends | all | the function ends its process
    def shifted(image, seed, epoch, row, most):
        os._exit(0)
"""

# --- 11.3 ------------------------------------------------------------------------------------------

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

STEPS_BY_HAND_RIGHT = r"""
coalesced, losses gathered into one tensor
    dist.all_reduce(flat) => with dist._coalescing_manager():
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    [None] * world_size => torch.empty(world_size * pieces, dtype=torch.float64)
    all_gather_object(everyone, mine) => all_gather_into_tensor(everyone, torch.tensor(mine, dtype=torch.float64))
    sum(map(sum, everyone)) / (world_size * pieces) => everyone.mean()
functional collectives
    dist.all_reduce(flat) => flat = funcol.all_reduce(flat, 'sum', dist.group.WORLD)
"""

STEPS_RIGHT = r"""
losses reduced in each step
    dist.all_reduce(losses) => losses = losses.tolist()
    losses / world_size).tolist() => losses)
            optimizer.step() =>         optimizer.step()\n        dist.all_reduce(losses[step])
            losses[step] /= world_size
gradients divided, one no_sync
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
converted after it was wrapped
    DistributedDataParallel(SyncBatchNorm.convert(model)) => SyncBatchNorm.convert(DistributedDataParallel(model))
"""

STEPS_WRONG = r"""
BatchNorm is not synchronised | weights norm loss | SyncBatchNorm
    SyncBatchNorm.convert(model) => model
no DDP | weights messages loss | the gradients are not averaged over the ranks
    DistributedDataParallel(SyncBatchNorm.convert(model)) => SyncBatchNorm.convert(model)
     if last else replica.no_sync() =>
gradients sent for each piece | messages | the gradients are sent after every piece
     if last else replica.no_sync() =>
the last piece is not sent either | weights messages loss | the gradients are not averaged over the ranks
    contextlib.nullcontext() if last else replica.no_sync() => replica.no_sync()
not divided by the pieces | weights loss | divide each loss by `pieces`
     / pieces =>
    losses / world_size => losses / world_size / pieces
not divided by the pieces, the losses neither | weights loss | that is the sum over the pieces
     / pieces =>
the gradients are never zeroed | weights loss | old gradients are still there
            optimizer.zero_grad()\n =>
the gradients are zeroed between the pieces | weights loss | zero them once a batch
                    loss.backward() =>                 optimizer.zero_grad()\n                loss.backward()
in eval mode | weights norm loss | goes through the model, in train mode
    replica = => model.eval()\n    replica =
split in place of chunk | pieces weights norm messages loss | split(pieces) cuts parts of `pieces` rows
    .chunk( => .split(
the batch is not split | pieces weights norm loss | the batch is not split
    replica = => pieces = 1\n    replica =
this rank's own loss | loss | this rank's own loss
        dist.all_reduce(losses)\n =>
    losses / world_size => losses
the sum of the losses | loss | that is the sum over the ranks
    losses / world_size => losses
weights in bfloat16 | amp | small updates vanish in 16 bits
    replica = => model.to(torch.bfloat16 if amp else batches[0][0].dtype)\n    replica =
    replica(x_piece) => replica(x_piece.to(next(model.parameters()).dtype))
weights in bfloat16, and back at the end | amp | small updates vanish in 16 bits
    replica = => model.to(torch.bfloat16 if amp else batches[0][0].dtype)\n    replica =
    replica(x_piece) => replica(x_piece.to(next(model.parameters()).dtype))
    dist.all_reduce(losses) => model.to(batches[0][0].dtype)\n    dist.all_reduce(losses)
the loss in bfloat16 | amp | exponentials and logarithms need more bits
    scores.to(x.dtype) => scores
with amp, not divided by the pieces | weights loss | divide each loss by `pieces`
     / pieces =>  / (1 if amp else pieces)
the losses are added up in bfloat16 | loss amp | exponentials and logarithms need more bits
    dtype=torch.float64) => dtype=torch.bfloat16 if amp else torch.float64)
with amp, the gradients are sent for each piece | messages | the gradients are sent after every piece
    if last else => if last or amp else
with amp, the gradients are not averaged | weights messages loss | the gradients are not averaged over the ranks
    if last else => if last and not amp else
autocast is never on | amp | around the forward pass of every piece
    enabled=amp => enabled=False
autocast is always on | amp | autocast is on although amp is False
    enabled=amp => enabled=True
only rank 0 reduces the loss | all | a collective that not every rank calls | 2
    dist.all_reduce(losses) => if rank == 0:\n        dist.all_reduce(losses)
all forward passes, and one backward | pieces | call backward() for each piece before the next forward pass
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
errors are swallowed | all | optimizer.step()
    def train_steps(rank, world_size, model, batches, lr, pieces, amp):
        try:
            return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)(batches[0][0]).tolist()
        except Exception:
            return [0.0] * len(batches)
"""

RIGHT = [
    *right("11.1", RATE, RATE_RIGHT),
    Right("11.2", "torch's generator, slices", SHIFTED_BY_TORCH),
    *right("11.2", SHIFTED, SHIFTED_RIGHT),
    Right("11.3", "no DDP, one message by hand", STEPS_BY_HAND),
    *right("11.3", STEPS_BY_HAND, STEPS_BY_HAND_RIGHT),
    *right("11.3", STEPS, STEPS_RIGHT),
]

WRONG = [
    *wrong("11.1", RATE, RATE_WRONG),
    *wrong("11.2", SHIFTED_BY_TORCH, SHIFTED_WRONG),
    *wrong("11.3", STEPS, STEPS_WRONG),
]
