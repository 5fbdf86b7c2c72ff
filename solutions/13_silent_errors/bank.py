"""The answer bank of lesson 13: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.submissions import solutions

IMPORTS = """
from collections import Counter
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
"""

ONE_FORWARD, COMPARE = solutions("13").values()
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

COMPARE_RIGHT = """
bytes of each parameter
    def compare_ranks(rank, world_size, numbers, weights):
        mine = {name: value.numpy().tobytes() for name, value in weights.items()}
        parts = [None] * world_size
        dist.all_gather_object(parts, (list(numbers), mine))
        read = [number for of_rank, _ in parts for number in of_rank]
        apart = [name for name in mine if len({of_rank[name] for _, of_rank in parts}) > 1]
        return [n for n in sorted(set(read)) if read.count(n) > 1], apart
smallest and largest of each value
    def compare_ranks(rank, world_size, numbers, weights):
        apart = []
        for name, value in weights.items():
            low, high = value.clone(), value.clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            if not torch.equal(low, high):
                apart.append(name)
        lists = [None] * world_size
        dist.all_gather_object(lists, numbers)
        return sorted(n for n, times in Counter(sum(lists, [])).items() if times > 1), apart
"""

COMPARE_WRONG = """
a sum of the values | apart | a sum stays as it was
    torch.equal(first[name], each[name]) => abs(first[name].sum() - each[name].sum()) < 1e-5
a tolerance | apart | equal bit by bit
    torch.equal( => torch.allclose(
each rank with rank 0 only | apart | all ranks must return the same
    for _, each in everyone) => for each in [weights])
a sample counts once a rank | twice | that one rank reads twice
    for number in numbers) => for number in set(numbers))
its own samples alone | twice | read by two ranks
    for numbers, _ in everyone => for numbers in [numbers]
nothing is ever wrong | twice apart | gather the numbers of all
    return repeated, apart => return [], []
names alone | all | return two lists
    return repeated, apart => return apart
"""

RIGHT = [
    Right("13.1", "two backward passes, one average", TWO_BACKWARDS),
    Right("13.1", "two backward passes, two averages", TWO_BACKWARDS.replace("replica.no_sync()", "nullcontext()")),
    *right("13.2", COMPARE, COMPARE_RIGHT),
]
WRONG = [
    *wrong("13.1", ONE_FORWARD, WRONG_ONES),
    *wrong("13.1", TWO_BACKWARDS, TWO_WRONG),
    *wrong("13.2", COMPARE, COMPARE_WRONG),
]
