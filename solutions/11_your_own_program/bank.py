"""The answer bank of lesson 11: programs converted and repaired in other ways, and the mistakes people make there.

Most wrong answers are edits of the notebook's solution. `tests/grading/test_banks.py` runs all of this.
"""

from ddp_course.rehearsal.exercise_programs import BROKEN, ONE_DEVICE
from tests.grading.bank import right, wrong
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

CONVERT, _, REPAIR, *_ = solutions("11").values()


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

RIGHT = [
    *right("11.1", CONVERT, CONVERT_RIGHT),
    *right("11.3", REPAIR, REPAIR_RIGHT),
    *right("11.3", REPAIRED, REPAIR_BY_ONE),
]
WRONG = [
    *wrong("11.1", CONVERTED, CONVERT_WRONG),
    *wrong("11.3", REPAIRED, REPAIR_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------
