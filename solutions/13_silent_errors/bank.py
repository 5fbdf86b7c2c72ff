"""The answer bank of lesson 13: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, wrong
from tests.grading.submissions import solutions

IMPORTS = """
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
"""

(ONE_FORWARD,) = solutions("13").values()
BOTH = """        on_real, on_generated = replica(torch.cat([x, z])).split(len(x))  # one forward
        loss = softplus(-on_real).mean() + softplus(on_generated).mean()
        loss.backward()
"""
TWO_BACKWARDS = ONE_FORWARD.replace(
    BOTH,
    """        with replica.no_sync():
            softplus(-replica(x)).mean().backward()
        softplus(replica(z)).mean().backward()
""",
)
assert TWO_BACKWARDS != ONE_FORWARD

WRONG_ONES = """
two forward passes, one backward pass | several | writes rank 0's gate over the one
    replica(torch.cat([x, z])).split(len(x)) => replica(x), replica(z)
the bare model | several | the ranks' weights differ
    replica(torch.cat => critic(torch.cat
divided again | several | divided by the world size again
    loss.backward() => (loss / world_size).backward()
one mean over both batches | alone several | half of the right one
    softplus(-on_real).mean() + softplus(on_generated).mean() => softplus(torch.cat([-on_real, on_generated])).mean()
"""

TWO_WRONG = r"""
no average at all | several | the ranks' weights differ
    \n        softplus(replica(z)) => \n            softplus(replica(z))
cleared between the two backward passes | alone several | the gradients of the real samples are missing
    replica(x)).mean().backward() => replica(x)).mean().backward(); optimizer.zero_grad()
"""

RIGHT = [
    Right("13.1", "two backward passes, one average", TWO_BACKWARDS),
    Right("13.1", "two backward passes, two averages", TWO_BACKWARDS.replace("replica.no_sync()", "nullcontext()")),
]
WRONG = [*wrong("13.1", ONE_FORWARD, WRONG_ONES), *wrong("13.1", TWO_BACKWARDS, TWO_WRONG)]
