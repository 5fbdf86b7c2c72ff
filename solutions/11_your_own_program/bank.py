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

_, _, REPAIR, *_ = solutions("11").values()


def as_text(answer: str, name: str) -> str:
    """Return an answer that says its program as one text, so that lines of the program can be edited."""
    given = {"ONE_DEVICE": ONE_DEVICE, "BROKEN": BROKEN}
    exec(answer, given)
    return f'def {name}():\n    return r"""{given[name]()}"""\n'


REPAIRED = as_text(REPAIR, "repaired")


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
    *right("11.3", REPAIR, REPAIR_RIGHT),
    *right("11.3", REPAIRED, REPAIR_BY_ONE),
]
WRONG = [
    *wrong("11.3", REPAIRED, REPAIR_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------
