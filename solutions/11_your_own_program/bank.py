"""The answer bank of lesson 11: programs converted and repaired in other ways, and the mistakes people make there.

Most wrong answers are edits of the notebook's solution. `tests/grading/test_banks.py` runs all of this.
"""

from ddp_course.rehearsal.exercise_programs import BROKEN, ONE_DEVICE
from tests.grading.bank import Right, right, wrong
from tests.grading.submissions import solutions

IMPORTS = """
import contextlib
import re
from statistics import mean, median
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from ddp_course.parallel.syncbn import SyncBatchNorm
from ddp_course.rehearsal.exercise_programs import BROKEN, ONE_DEVICE
"""

CONVERT, _, REPAIR, _, STEPS = solutions("11").values()


def as_text(answer: str, name: str) -> str:
    """Return an answer that says its program as one text, so that lines of the program can be edited."""
    given = {"ONE_DEVICE": ONE_DEVICE, "BROKEN": BROKEN}
    exec(answer, given)
    return f'def {name}():\n    return r"""{given[name]()}"""\n'


CONVERTED, REPAIRED = as_text(CONVERT, "program"), as_text(REPAIR, "repaired")

# --- 11.1 ------------------------------------------------------------------------------------------

CONVERT_RIGHT = r"""
rows by slices of one permutation, the last rank speaks, another name for the file at first
    def program():
        top, _, _ = ONE_DEVICE.partition("def main")
        lines = [
            "import os",
            "import torch.distributed as td",
            "def own(rows):",
            "    return rows[td.get_rank() :: td.get_world_size()]",
            "td.init_process_group(backend='gloo')",
            "n, chief = td.get_world_size(), td.get_rank() == td.get_world_size() - 1",
            "epochs, seed = map(int, sys.argv[1:])",
            "train, test, net = make_data(480, seed), make_data(101, seed + 1), make_model(seed)",
            "ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)",
            "sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)",
            "for epoch in range(epochs):",
            "    order = own(torch.randperm(480, generator=torch.Generator().manual_seed(epoch)))",
            "    losses = []",
            "    for rows in order.split(BATCH // n):",
            "        x, y = train[rows]",
            "        losses.append((ddp(x) - y).pow(2).mean())",
            "        sgd.zero_grad()",
            "        losses[-1].backward()",
            "        sgd.step()",
            "    mean = torch.stack(losses).detach().mean() / n",
            "    td.all_reduce(mean)",
            "    x, y = test[own(torch.arange(101))]",
            "    wrong = (net(x) - y).detach().abs().sum()",
            "    td.reduce(wrong, n - 1)",
            "    if chief:",
            "        print(f'epoch {epoch}: loss {mean:.6f}, error {wrong / 101:.6f}', flush=True)",
            "        state = {name.removeprefix('module.'): value for name, value in ddp.state_dict().items()}",
            "        torch.save(state, 'model.pt.part')",
            "        os.replace('model.pt.part', 'model.pt')",
            "td.barrier()",
            "td.destroy_process_group()",
        ]
        return top + "\n".join(lines)
"""

CONVERT_WRONG = r"""
every epoch has the same order | model loss error | every epoch has the order of the first
    sampler.set_epoch(epoch) => pass
each rank has the whole batch | model loss error | the batch is 2 times as large
    BATCH // world_size => BATCH
all ranks train on all rows | model loss error | every rank trains on all rows
    sampler = DistributedSampler(train) => order = torch.Generator()
    import DataLoader, DistributedSampler, => import RandomSampler, DataLoader,
    sampler=sampler => sampler=RandomSampler(train, generator=order)
    sampler.set_epoch(epoch) => order.manual_seed(epoch)
the forward goes past the replica | model loss error | call the model that DistributedDataParallel has wrapped
    replica(x) => model(x)
the loss of one rank | loss | this is one rank's loss
    total, error = sums.tolist() => error = sums[1].item()
the error of one rank's rows | error | this is the error of one rank's rows
    total, error = sums.tolist() => total, error = sums[0].item(), error * len(test) / len(mine)
a mean of the ranks' means | error | the ranks' means count the same
    sums = torch.tensor([total, error], => sums = torch.tensor([total, error / len(mine) * len(test) / world_size],
the sampler of the test repeats rows | error | DistributedSampler repeats rows
    range(rank, len(test), world_size) => list(DistributedSampler(test, shuffle=False))
    total, error = sums.tolist() => total, error = sums.tolist()
            error *= len(test) / (len(mine) * world_size)
every rank evaluates all rows | error | every row is counted on every rank
    DataLoader(mine, 20) => DataLoader(test, 20)
every rank prints and saves | voice writer | print on one rank only
            if rank:\n            continue\n =>
every rank saves | writer | save on one rank only
            if rank:\n            continue\n =>
    print(f => rank or print(f
the rank on its node | error voice writer | print on one rank only
    rank, world_size = dist.get_rank() => rank, world_size = int(os.environ["LOCAL_RANK"])
    import sys => import os, sys
saved once, at the end | writer | save after each
    torch.save( => epoch < epochs - 1 or torch.save(
only rank 0 ends its group | end | on every rank
    dist.destroy => rank or dist.destroy
each rank says that it begins | voice | print on one rank only
    sampler = DistributedSampler(train) => sampler = DistributedSampler(train)
        print("rank", rank, "begins")
a dictionary around the state | model | and nothing around it
    torch.save(model.state_dict() => torch.save({"model": model.state_dict()}
names with module. | model | save the state of the model inside
    torch.save(model.state_dict() => torch.save(replica.state_dict()
another file | writer | the file is called "model.pt"
    "model.pt" => "last.pt"
nothing is averaged twice, but the sum is divided by nothing | loss error | the sums of all ranks are divided
    total / len(train) => total / len(sampler)
    error / len(test) => error / len(mine)
the group is never made | all | call dist.init_process_group() before anything
    dist.init_process_group("gloo") => pass
lines of a program | all | return the program as one text
    def program():
        return ONE_DEVICE.splitlines()
"""

# --- 11.3 ------------------------------------------------------------------------------------------

REPAIR_RIGHT = r"""
one forward for both parts, the means weighted, an early name for the state
    def repaired():
        return (
            BROKEN.replace("(nn.functional.mse_loss(model(x), y)", "(nn.functional.mse_loss(replica.forward(x), y)")
            .replace('{"model": ', '{"moments": optimizer.state_dict(), "model": ')
            .replace("        torch.save(", "        rank or torch.save(")
            .replace("        first =", "        optimizer.load_state_dict(saved['moments'])\n        first =")
            .replace("errors.append((model(x) - y).abs().mean())", "errors.append((model(x) - y).abs().flatten())")
            .replace("torch.stack(errors).mean()", "torch.cat(errors).sum()")
            .replace("error.item() / world_size", "error.item() / len(test)")
        )
"""

# Pickle sends a tensor by torch.save, into memory.
REPAIR_BY_ONE = r"""
rank 0 reads the state, and sends it as an object
    saved = torch.load("state.pt", weights_only=True) => box = [not rank and torch.load("state.pt", weights_only=True)]
            dist.broadcast_object_list(box, src=0)
            saved = box[0]
"""

REPAIR_WRONG = r"""
the forward past the replica stays | step resume error | look at each forward
    replica(x), y) / PARTS).backward()\n                optimizer => model(x), y) / PARTS).backward()
                    optimizer
every micro-batch under no_sync | step resume error | look at each forward
                else:\n =>             else:
                    replica.require_backward_grad_sync = False\n
the optimizer begins again | resume error | save and load the optimizer's state
    optimizer.load_state_dict(saved["optimizer"]) => pass
every micro-batch is sent | step | but the last belong inside replica.no_sync()
    with replica.no_sync(): => if True:
saved once, at the end | writer | save after each
    if rank == 0:\n            torch.save => if rank == 0 and epoch == epochs - 1:
                torch.save
another name for the epoch | writer | the keys ('model', 'epoch') stay
    "epoch" => "done"
a mean of the ranks' means | error | the ranks' means count the same
    dist.all_reduce(sums) => sums = sums[:1] / sums[1]
        dist.all_reduce(sums)
    (sums[0] / sums[1]).item() => sums.item() / world_size
the error of rank 0 alone | error | this is the error of one rank's rows
    dist.all_reduce(sums) => pass
every rank writes | writer | save on one rank only
    if rank == 0:\n            torch.save => if True:
                torch.save
every rank prints | voice | print on one rank only
    if rank == 0:\n            print => if True:
                print
the given program | step resume error writer | look at each forward
    def repaired():
        return BROKEN
"""


# --- 11.5 ------------------------------------------------------------------------------------------

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
the losses are added up in bfloat16 | amp | exponentials and logarithms need more bits
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
    *right("11.1", CONVERT, CONVERT_RIGHT),
    *right("11.3", REPAIR, REPAIR_RIGHT),
    *right("11.3", REPAIRED, REPAIR_BY_ONE),
    Right("11.5", "no DDP, one message by hand", STEPS_BY_HAND),
    *right("11.5", STEPS_BY_HAND, STEPS_BY_HAND_RIGHT),
    *right("11.5", STEPS, STEPS_RIGHT),
]
WRONG = [
    *wrong("11.1", CONVERTED, CONVERT_WRONG),
    *wrong("11.3", REPAIRED, REPAIR_WRONG),
    *wrong("11.5", STEPS, STEPS_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------
