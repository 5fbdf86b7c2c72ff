"""The answer bank of lesson 12: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

IMPORTS = """
import math
import os
import re
from collections import Counter
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
"""

DIAGNOSE, VALIDATE, UNEVEN_JOIN = solutions("12").values()

# --- 12.1 ------------------------------------------------------------------------------------------

DIAGNOSE_RIGHT = r"""
by whom the others name
    def diagnose(said):
        ends = [text.splitlines()[-1] if text else "" for text in said]
        everything = " ".join(said)
        if "CollectiveFingerPrint" in everything:
            # Whom do the others name? The one to blame is named by more than one of them.
            named = Counter(int(n) for text in said for n in re.findall(r"but Rank (\d+) is", text))
            kind = "order" if "Op type" in everything else "shape"
            return [f"collective-{kind}", named.most_common(1)[0][0]]
        for rank, end in enumerate(ends):
            if not end:
                return ["skipped-collective", rank]
        for rank, text in enumerate(said):
            match = re.search(r"did not receive grad for rank (\d+)", text)
            if match:
                return ["unused-parameters", torch.tensor(int(match[1]))]
        lost = [bool(re.search(r"\[/.*gloo.*\]", text)) for text in said]
        return ["one-rank-raises", lost.index(False)]
"""

DIAGNOSE_WRONG = r"""
of a mismatch, the rank that the first text names second | collective-order collective-shape
| the rank to look at is the one that runs something else than all the others
    min(range(len(own)), key=lambda rank: own.count(own[rank])) => int(
                re.search(r"but Rank (\d+)", said[own.index(min(own, key=own.count))])[1])
the first rank that speaks | one-rank-raises alike | this rank only lost the connection to a peer
    enumerate(said) if "gloo/transport" not in text => enumerate(said) if text
a lost peer is recognised by the word connection | alike | this rank only lost the connection to a peer
    "gloo/transport" not in text => not re.search("(?i)connection|timeout|timed out", text)
    next(rank for => next((rank for
    text))\n => text)), 0)\n
any timeout is a rank that never came | alike | what torch says of a lost peer or of patience comes from gloo
        if "" in said:\n =>     if any(re.search("(?i)timeouterror", text) for text in said):
            return "skipped-collective", 0
        if "" in said:\n
every mismatch is one of the order | collective-shape | in which aspects the collectives differ
    if len(set(ops)) > 1 else => if True else
of a shape only the first number | collective-shape
| the rank to look at is the one that runs something else than all the others
    TensorShape=\[(.*?)\] => TensorShape=\[(\d+)
the odd operation is the one that is no all_reduce | collective-order
| the rank to look at is the one that runs something else than all the others
    return name, min( => return name, next((rank for rank, op in enumerate(ops) if op != "ALLREDUCE"), None) if (
            name == "collective-order") else min(
the shapes are looked at before the operations | collective-order | in which aspects the collectives differ
    ("collective-order", ops) if len(set(ops)) > 1 else ("collective-shape", shapes) => (
            ("collective-order", ops) if len(set(shapes)) == 1 else ("collective-shape", shapes))
a traceback with torch's lines is taken for an echo | one-rank-raises | this rank only lost the connection to a peer
    next(rank for rank, text in enumerate(said) if "gloo/transport" not in text) => next(
            (rank for rank, text in enumerate(said) if "torch/distributed" not in text), 0)
unused parameters are not looked for | unused-parameters | one rank names parameters that got no gradient
    did not receive grad => did not receive a gradient
a silent rank is not foreseen | skipped-collective | one says nothing
        if "" in said:\n        return "skipped-collective", said.index("")\n =>
the last line of a text that has none | skipped-collective | this failure made the function raise
        for rank, text =>     said = [t.splitlines()[-1] and t for t in said]\n    for rank, text
names of its own | one-rank-raises alike | the names are those of the table
    "one-rank-raises" => "crash"
lists of both | all | the names are those of the table
    def diagnose(said):
        return ["one-rank-raises"], [1]
only the name | all | return two things: the name of the failure
    def diagnose(said):
        return 'one-rank-raises'
"""

# --- 12.2 ------------------------------------------------------------------------------------------

VALIDATE_BARE = """
def validated(replica, x, y):
    # The bare model needs no DDP, but rank 0's running statistics.
    for buffer in replica.module.buffers():
        dist.broadcast(buffer, src=0)
    mine = torch.arange(len(x)).tensor_split(dist.get_world_size())[dist.get_rank()]
    replica.module.eval()
    with torch.no_grad():
        errors = (replica.module(x[mine]) - y[mine]).square()
    replica.module.train()
    sums = torch.tensor([errors.sum().double(), errors.numel()], dtype=torch.float64)
    everyone = [torch.zeros(2, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sums)
    total, count = sum(everyone).tolist()
    return total / count

def train_and_validate(rank, world_size, model, batches, held_out, every):
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
    losses, steps = [], 0
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.mse_loss(replica(inputs), targets).backward()
        optimizer.step()
        steps += 1
        if steps % every:
            continue
        losses.append(validated(replica, *held_out))
        if losses[-1] > min(losses):
            break
    return min([math.inf, *losses]), torch.tensor(steps)
"""

VALIDATE_BARE_WRONG = """
the loss is that of all rows, but each rank stops by its own block of them
| all | each rank stops by the loss of its own rows | 2
    losses, steps = [], 0 => losses, own, steps = [], [], 0
    total, count = sum => own = (sums[0] / sums[1]).item()
        total, count = sum
    return total / count => return total / count, own
    losses.append(validated(replica, *held_out)) => loss, mine = validated(replica, *held_out)
            losses.append(loss)
            own.append(mine)
    if losses[-1] > min(losses): => if own[-1] > min(own):
"""

VALIDATE_RIGHT = """
rank 0 decides and tells
    def train_and_validate(rank, world_size, model, batches, held_out, every):
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.05)
        x, y = (tensor[rank::world_size] for tensor in held_out)
        best = torch.tensor(math.inf)
        for step, (inputs, targets) in enumerate(batches, 1):
            optimizer.zero_grad()
            F.mse_loss(replica(inputs), targets).backward()
            optimizer.step()
            if step % every == 0:
                replica.eval()
                with torch.no_grad():
                    total = torch.stack([F.mse_loss(replica(x), y, reduction="sum"), torch.tensor(float(len(x)))])
                dist.reduce(total, dst=0)
                verdict = torch.tensor([total[0] / total[1], total[0] / total[1] > best])
                dist.broadcast(verdict, src=0)
                replica.train()
                if verdict[1]:
                    break
                best = verdict[0]
        return best, step
"""

VALIDATE_WRONG = r"""
the script as it was | all | broadcasts the running statistics also in a validation | 2
    if step % every == 0: => if step % every == 0 and rank == 0:
    total = F.mse_loss(replica(x[rank::world_size]), => loss = F.mse_loss(replica(x),
    y[rank::world_size], reduction="sum") => y).item()
                dist.all_reduce(total)\n            loss = total.item() / len(x)\n =>
the bare model on rank 0, whose break the others do not know | all | rank 0 does something that the others do not | 2
    if step % every == 0: => if step % every == 0 and rank == 0:
    total = F.mse_loss(replica(x[rank::world_size]), => loss = F.mse_loss(replica.module(x),
    y[rank::world_size], reduction="sum") => y).item()
                dist.all_reduce(total)\n            loss = total.item() / len(x)\n =>
rank 0 validates all rows with the bare model, and tells the others | once | the others wait; give each rank its share
    F.mse_loss(replica(x[rank::world_size]), => F.mse_loss(replica.module(x),
    y[rank::world_size], reduction="sum") => y, reduction="sum") if rank == 0 else torch.zeros(())
a barrier for rank 0 only | all | rank 0 does something that the others do not | 2
                replica.eval() =>             if rank == 0:
                    dist.barrier()
                replica.eval()
every rank validates all rows | once | every rank does all of the work
    x[rank::world_size] => x
    y[rank::world_size] => y
    / len(x) => / len(x) / world_size
stops at a loss that is 1 % worse, not before | stop | worse by less than 1 % is worse
    loss > best => loss > best * 1.01
stops at an equal loss | stop | as good as the best is not worse
    loss > best => loss >= best
the mean of no rows, times no rows | loss | a rank without rows divides 0 by 0
    , reduction="sum") => ) * len(y[rank::world_size])
0 where no validation took place | loss | math.inf
    best = math.inf => best = 0.0 if every > 12 else math.inf
the mean of the means | loss | the mean of the ranks' means
    , reduction="sum" =>
    total.item() / len(x) => total.item() / world_size
the sum over all rows | loss | divide it by the number of all rows
    total.item() / len(x) => total.item()
each rank predicts with its own running statistics | loss | its own running statistics
    F.mse_loss(replica(x[ => F.mse_loss(replica.module(x[
evaluation mode for ever | loss mode | call train() before the next step
            replica.train()\n =>
nobody stops | stop once | this rank does not stop
                    break\n            best = loss =>                 continue\n            best = loss
each rank stops by the loss of its own rows | all | each rank stops by the loss of its own rows | 2
                dist.all_reduce(total)\n =>
    total.item() / len(x) => total.item() / len(x[rank::world_size])
an empty list comes back | stop loss | return the best loss and the number of steps done
        return best, step =>     return []
only rank 0 returns the loss | loss | return a number on every rank
        return best, step =>     return (best if rank == 0 else None), step
the rest that does not divide is left out | stop loss once | leave rows out
        x, y = held_out\n =>     x, y = (t[: len(t) // world_size * world_size] for t in held_out)\n
"""

# --- 12.3 ------------------------------------------------------------------------------------------

UNEVEN_AGREED = """
def train_uneven(rank, world_size, model, batches, rate):
    total = 0
    while True:
        batch = next(batches, None)
        n = torch.tensor(0 if batch is None else len(batch[0]))
        dist.all_reduce(n)
        if n == 0:
            return total
        total += n
        model.zero_grad()
        if batch is not None:
            (F.mse_loss(model(batch[0]), batch[1], reduction="sum") / n).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            with torch.no_grad():
                p -= rate * p.grad
"""

UNEVEN_FLAT = """
from torch.nn.utils import parameters_to_vector, vector_to_parameters

def train_uneven(rank, world_size, model, batches, rate):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    mine = list(batches)
    counts = [None] * world_size
    dist.all_gather_object(counts, [len(x) for x, _ in mine])
    for step in range(max(map(len, counts))):
        present = sum(step < len(c) for c in counts)
        optimizer.zero_grad(set_to_none=False)
        if step < len(mine):
            x, y = mine[step]
            F.mse_loss(model(x), y).backward()
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        at = 0
        for p in model.parameters():
            p.grad = (flat[at : at + p.numel()] / present).view_as(p)
            at += p.numel()
        optimizer.step()
    return sum(sum(c) for c in counts)
"""

UNEVEN_JOIN_WRONG = r"""
plain DDP | all | must take part in the collectives until no rank has one, and no longer | 2
    with Join([replica], divide_by_initial_world_size=False): => if True:
Join as it comes | whole none | divide_by_initial_world_size=False
    , divide_by_initial_world_size=False =>
its own rows only are counted | count none | the rank's own rows
        dist.all_reduce(rows)\n =>
an all_reduce of its own within Join | all | move your own after the `with` | 2
                rows += len(inputs)\n    dist.all_reduce(rows)\n =>             now = torch.tensor([len(inputs)])
                dist.all_reduce(now)
                rows += now\n
no zero_grad | whole none | the gradients of the steps before are still in .grad
                optimizer.zero_grad()\n =>
batches are counted | count none | these are batches
    rows += len(inputs) => rows += 1
"""

UNEVEN_AGREED_WRONG = r"""
no zero_grad, and the summed gradients are summed again | whole none
| the gradients of the step before are still in .grad
            model.zero_grad()\n =>
all stop with the first | rows whole count none | rows are lost
            if n == 0:\n =>         n = n.clone() if batch is not None else n * 0
            dist.all_reduce(n, dist.ReduceOp.MIN)
            if n == 0:\n
a rank that has no batch leaves its process | all | remove exit(), sys.exit() or os._exit() | 2
            if n == 0:\n =>         if batch is None:
                os._exit(0)
            if n == 0:\n
a loop without an end | all | and no longer | 1.5
                return total\n =>             continue\n
"""

UNEVEN_FLAT_WRONG = r"""
the first batch again, to fill up | rows whole none | batches are used again to fill up
    if step < len(mine):\n            x, y = mine[step] => if mine:\n            x, y = mine[step % len(mine)]
    present = sum(step < len(c) for c in counts) => present = world_size
gradients are summed | whole none | gradients are summed over the ranks
     / present) => )
a rank without a batch takes no step, and all get rank 0's weights | whole none | a wrong mean
            optimizer.step()\n =>         if step < len(mine):\n            optimizer.step()\n
        return sum( =>     for p in model.parameters():
            dist.broadcast(p.data, src=0)
        return sum(
a rank without a batch takes no step | whole none | must take the step, too
            optimizer.step()\n =>         if step < len(mine):\n            optimizer.step()\n
the length of an iterator | all | take them one by one
    mine = list(batches) => mine = [next(batches) for _ in range(len(batches))]
"""

RIGHT = [
    *right("12.1", DIAGNOSE, DIAGNOSE_RIGHT),
    Right("12.2", "the bare model with broadcast statistics, gathered sums", VALIDATE_BARE),
    *right("12.2", VALIDATE, VALIDATE_RIGHT),
    Right("12.3", "agree on the rows before each step", UNEVEN_AGREED),
    Right("12.3", "all counts first, one flat all_reduce", UNEVEN_FLAT),
]

WRONG = [
    *wrong("12.1", DIAGNOSE, DIAGNOSE_WRONG),
    *wrong("12.2", VALIDATE, VALIDATE_WRONG),
    *wrong("12.2", VALIDATE_BARE, VALIDATE_BARE_WRONG),
    *wrong("12.3", UNEVEN_JOIN, UNEVEN_JOIN_WRONG),
    *wrong("12.3", UNEVEN_AGREED, UNEVEN_AGREED_WRONG),
    *wrong("12.3", UNEVEN_FLAT, UNEVEN_FLAT_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "12.1",
    "",
    r"""
an exception of its own is one that is no RuntimeError | one-rank-raises | this failure made the function raise
    def diagnose(said):
        own = {}
        for rank, text in enumerate(said):
            if found := re.search(r"Rank \d+ is running collective: .*?OpType=(\w+), TensorShape=\[(.*?)\]", text):
                own[rank] = found.groups()
        if own:
            which = 0 if len({call[0] for call in own.values()}) > 1 else 1
            usual = Counter(call[which] for call in own.values()).most_common(1)[0][0]
            odd = next(rank for rank, call in own.items() if call[which] != usual)
            return ("collective-order", "collective-shape")[which], odd
        for rank, text in enumerate(said):
            if "Expected to have finished reduction" in text:
                return "unused-parameters", rank
        for rank, text in enumerate(said):
            if text and not re.search(r"^RuntimeError: ", text, re.M):
                return "one-rank-raises", rank
        return "skipped-collective", said.index("")
blames the rank that the first text names as the other one | collective-order | something else than all the others
    def diagnose(said):
        for text in said:
            found = re.search(r"but Rank (\d+) is running.*differ in the following aspects:\s*(.*)", text, re.S)
            if found:
                return "collective-order" if "Op type" in found[2] else "collective-shape", int(found[1])
        for rank, text in enumerate(said):
            if "did not receive grad for rank" in text:
                return "unused-parameters", rank
        for rank, text in enumerate(said):
            if text and "gloo" not in text and "monitoredBarrier" not in text:
                return "one-rank-raises", rank
        return "skipped-collective", said.index("")
""",
)
