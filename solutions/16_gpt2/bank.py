"""The answer bank of lesson 16: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong, edited

IMPORTS = """
import os
import random
import time
from contextlib import nullcontext
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
"""


# --- 16.1 ------------------------------------------------------------------------------------------

STREAM = """
class TextStream:
    def __init__(self, tokens, context, rank, world_size, seed):
        self.tokens, self.context, self.seed = tokens, context, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.position = 0

    def next_batch(self, rows):
        length, together = (len(self.tokens) - 1) // self.context, self.world_size * rows
        if self.position + together > length:
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(length, generator=generator)
        mine = order[self.position + self.rank : self.position + together : self.world_size]
        self.position += together
        pieces = self.tokens[mine[:, None] * self.context + torch.arange(self.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
"""

STREAM_IN_BLOCKS = """
class TextStream:
    def __init__(self, tokens, context, rank, world_size, seed):
        self.inputs = tokens[: (len(tokens) - 1) // context * context].view(-1, context)
        self.targets = tokens[1 : 1 + self.inputs.numel()].view(-1, context)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.place = [0, 0]

    def next_batch(self, rows):
        epoch, begin = self.place
        end = begin + rows * self.world_size
        if end > len(self.inputs):
            epoch, begin, end = epoch + 1, 0, rows * self.world_size
        order = list(range(len(self.inputs)))
        random.Random(f"{self.seed} {epoch}").shuffle(order)
        self.place = [epoch, end]
        mine = order[begin:end][self.rank * rows : (self.rank + 1) * rows]  # a block for each rank
        return self.inputs[mine], self.targets[mine]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = list(state["place"])
"""

STREAM_BY_NUMPY = """
class TextStream:
    def __init__(self, tokens, context, rank, world_size, seed):
        self.__dict__.update(tokens=tokens, context=context, rank=rank, world_size=world_size, seed=seed)
        self._begin(0)

    def _begin(self, epoch, consumed=0):
        self.epoch, self.consumed = epoch, consumed
        self.order = np.random.default_rng([self.seed, epoch]).permutation((len(self.tokens) - 1) // self.context)

    def next_batch(self, rows):
        if len(self.order) - self.consumed < rows * self.world_size:
            self._begin(self.epoch + 1)
        inputs, targets = [], []
        for row in range(rows):
            start = int(self.order[self.consumed + row * self.world_size + self.rank]) * self.context
            inputs.append(self.tokens[start : start + self.context])
            targets.append(self.tokens[start + 1 : start + 1 + self.context])
        self.consumed += rows * self.world_size
        return torch.stack(inputs), torch.stack(targets)

    def state_dict(self):
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state):
        self._begin(state["epoch"], state["consumed"])
"""

STREAM_LIVE = """
class TextStream:
    def __init__(self, tokens, context, rank, world_size, seed):
        self.__dict__.update(tokens=tokens, context=context, rank=rank, world_size=world_size, seed=seed)
        self.place = {"epoch": 0, "position": 0}

    def next_batch(self, rows):
        length, together = (len(self.tokens) - 1) // self.context, self.world_size * rows
        if self.place["position"] + together > length:
            self.place["epoch"] += 1
            self.place["position"] = 0
        generator = torch.Generator().manual_seed(1000 * self.seed + self.place["epoch"])
        order = torch.randperm(length, generator=generator)[self.place["position"] :]
        mine = order[self.rank * rows : (self.rank + 1) * rows]
        self.place["position"] += together
        pieces = self.tokens[mine[:, None] * self.context + torch.arange(self.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place.update(state)
"""

STREAM_OF_PARTS = """
class TextStream:
    def __init__(self, tokens, context, rank, world_size, seed):
        self.__dict__.update(tokens=tokens, context=context, rank=rank, world_size=world_size, seed=seed)
        self.epoch = self.position = 0

    def next_batch(self, rows):
        length, together = (len(self.tokens) - 1) // self.context, self.world_size * rows
        if self.position + together > length:
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        count, begin = length // self.world_size, self.position // self.world_size
        order = self.rank * count + torch.randperm(count, generator=generator)
        self.position += together
        pieces = self.tokens[order[begin : begin + rows, None] * self.context + torch.arange(self.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
"""

OWN_GENERATOR = ("torch.randperm(length, generator=generator)", "torch.randperm(length)")

# --- 16.2 ------------------------------------------------------------------------------------------

STEP = """
def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
    optimizer.zero_grad()
    last = len(micro_batches) - 1
    for number, (x, y) in enumerate(micro_batches):
        with nullcontext() if number == last else replica.no_sync():
            loss = loss_function(replica(x), y) / len(micro_batches)
            loss.backward()
    norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
    optimizer.step()
    return norm.item()
"""

STEP_BY_HAND = """
def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
    *quiet, (x, y) = micro_batches
    with replica.no_sync():
        for a, b in quiet:
            loss_function(replica(a), b).backward()
    loss_function(replica(x), y).backward()
    gradients = [p.grad.div_(len(micro_batches)) for p in replica.module.parameters()]
    norm = sum(float((g * g).sum()) for g in gradients) ** 0.5
    if norm > max_norm:
        for g in gradients:
            g.mul_(max_norm / norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm
"""

STEP_BY_FLAG = """
def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
    for number in range(len(micro_batches)):
        x, y = micro_batches[number]
        replica.require_backward_grad_sync = number + 1 == len(micro_batches)
        torch.autograd.backward(loss_function(replica(x), y) * (1 / len(micro_batches)))
    flat = nn.utils.parameters_to_vector(p.grad for p in replica.parameters())
    nn.utils.clip_grad_norm_(list(replica.parameters()), max_norm)
    optimizer.step()
    for p in replica.parameters():
        p.grad = None
    return float(flat.norm())
"""

CLIP = "    norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)\n"
QUIET = "        with nullcontext() if number == last else replica.no_sync():\n"

# --- 16.3 ------------------------------------------------------------------------------------------

USED = """
def utilisation(model, layers, width, context, local_tokens, seconds, peak):
    totals = torch.tensor([local_tokens, peak], dtype=torch.float64)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(totals)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    tokens, peaks = totals.tolist()
    multiplied = sum(parameter.numel() for parameter in model.parameters()) - model.position.weight.numel()
    flops = 6 * multiplied + 12 * layers * width * context
    rate = tokens / slowest.item()
    return rate, flops, flops * rate / peaks
"""

USED_GATHERED = """
def utilisation(model, layers, width, context, local_tokens, seconds, peak):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (local_tokens, seconds, peak))
    tokens, times, peaks = zip(*everyone)
    rate = sum(tokens) / max(times)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "position" not in name)
    flops = 2 * matrices * 3 + 4 * 3 * layers * width * context
    return [torch.tensor(rate, dtype=torch.float64), flops, rate * flops / sum(peaks)]
"""

USED_BY_STATE = """
def utilisation(model, layers, width, context, local_tokens, seconds, peak):
    mine = torch.tensor([local_tokens, seconds, peak], dtype=torch.float64)
    table = torch.empty(dist.get_world_size(), 3, dtype=torch.float64)
    dist.all_gather(list(table.unbind()), mine)
    every = dict(model.named_parameters(remove_duplicate=False))
    sizes = {id(p): p.numel() for name, p in every.items() if name != "position.weight"}
    need = 6 * sum(sizes.values()) + 12 * layers * width * context
    rate = float(table[:, 0].sum() / table[:, 1].max())
    return rate, need, need * rate / float(table[:, 2].sum())
"""

RIGHT = [
    Right("16.1", "every W-th window", STREAM),
    Right("16.1", "a block for each rank", STREAM_IN_BLOCKS),
    Right("16.1", "NumPy's generator, row by row", STREAM_BY_NUMPY),
    Right("16.2", "losses divided", STEP),
    Right("16.2", "gradients divided and cut by hand", STEP_BY_HAND),
    Right("16.2", "DDP's own flag", STEP_BY_FLAG),
    Right("16.3", "two all_reduces", USED),
    Right("16.3", "objects gathered", USED_GATHERED),
    Right("16.3", "a table of all ranks", USED_BY_STATE),
]

WRONG = [
    Wrong(
        "16.1",
        "the targets are the inputs",
        edited(STREAM, ("pieces[:, 1:]", "pieces[:, :-1]")),
        ("windows",),
        "the targets are the inputs themselves",
    ),
    Wrong(
        "16.1",
        "the last target is forgotten in the count",
        edited(STREAM, ("(len(self.tokens) - 1) // self.context", "len(self.tokens) // self.context")),
        ALL,
        "there are (len(tokens) - 1) // context windows",
    ),
    Wrong(
        "16.1",
        "windows overlap",
        edited(STREAM, ("mine[:, None] * self.context", "mine[:, None] * (self.context - 1)")),
        ("windows",),
        "window k begins at token k * context",
    ),
    Wrong(
        "16.1",
        "torch's default generator",
        edited(STREAM, OWN_GENERATOR),
        ("windows", "epoch", "order", "stopped", "resized"),
        "the order comes from torch's default generator",
    ),
    Wrong(
        "16.1",
        "random numbers that nobody seeded",
        edited(STREAM, (OWN_GENERATOR[0], "torch.tensor(random.sample(range(length), length))")),
        ("windows", "epoch", "stopped", "resized"),
        "the order is another one each time",
    ),
    Wrong(
        "16.1",
        "one window less than there are",
        edited(STREAM, ("(len(self.tokens) - 1) // self.context", "(len(self.tokens) - 1) // self.context - 1")),
        ("windows", "resized"),
        "before one comes again",
    ),
    Wrong(
        "16.1",
        "the state is the stream's own dictionary",
        STREAM_LIVE,
        ("stopped",),
        "state_dict must return values of its own",
    ),
    Wrong(
        "16.1",
        "the order is kept when a state is loaded",
        edited(
            STREAM_BY_NUMPY,
            (
                'self._begin(state["epoch"], state["consumed"])',
                'self.epoch, self.consumed = state["epoch"], state["consumed"]',
            ),
        ),
        ("stopped",),
        "also an order that it has kept",
    ),
    Wrong(
        "16.1",
        "each rank has a fixed part of the text",
        STREAM_OF_PARTS,
        ("resized",),
        "shuffle one order for all ranks, from which they take turns",
    ),
    Wrong(
        "16.1",
        "all ranks read the same",
        edited(
            STREAM,
            ("self.rank, self.world_size = rank, world_size", "self.rank, self.world_size = 0, 1"),
        ),
        ("epoch", "resized"),
        "all ranks read the same windows",
    ),
    Wrong(
        "16.1",
        "the epoch does not shuffle",
        edited(STREAM, ("1000 * self.seed + self.epoch", "self.seed")),
        ("order",),
        "the shuffle must depend on the epoch",
    ),
    Wrong(
        "16.1",
        "the seed is not used",
        edited(STREAM, ("1000 * self.seed + self.epoch", "self.epoch")),
        ("order",),
        "the shuffle does not use the seed",
    ),
    Wrong(
        "16.1",
        "the state is ignored",
        edited(STREAM, ('self.epoch, self.position = state["epoch"], state["position"]', "self.state = state")),
        ("stopped", "resized"),
        "it starts from the beginning: load_state_dict must set what next_batch reads",
    ),
    Wrong(
        "16.1",
        "the position counts this rank's windows",
        edited(
            STREAM,
            ("if self.position + together > length:", "if (self.position + rows) * self.world_size > length:"),
            (
                "order[self.position + self.rank : self.position + together : self.world_size]",
                "order[self.rank :: self.world_size][self.position : self.position + rows]",
            ),
            ("self.position += together", "self.position += rows"),
        ),
        ("resized",),
        "counted in windows of all ranks together",
    ),
    Wrong(
        "16.1",
        "the state has the rank in it",
        edited(STREAM, ('{"epoch"', '{"rank": self.rank, "epoch"')),
        ("state",),
        "nothing in it may depend on the rank",
    ),
    Wrong(
        "16.1",
        "the state holds the whole order",
        edited(STREAM, ('{"epoch"', '{"order": list(range(len(self.tokens) // self.context)), "epoch"')),
        ("state",),
        "a list grows with the text",
    ),
    Wrong(
        "16.1",
        "an endless loop at the epoch's end",
        edited(STREAM, ("self.epoch, self.position = self.epoch + 1, 0", "while True: pass")),
        ALL,
        "endless",
        limit_s=1.0,
    ),
    Wrong(
        "16.1",
        "the course's own",
        """
from ddp_course.data.text import TokenStream

class TextStream(TokenStream):
    def __init__(self, tokens, context, rank, world_size, seed):
        super().__init__(tokens, context, 1, world_size, rank, seed)
""",
        ALL,
        "TokenStream",
    ),
    Wrong(
        "16.2",
        "the losses are not divided",
        edited(STEP, (" / len(micro_batches)", "")),
        ("short", "norm"),
        "divide each loss by the number of micro-batches",
    ),
    Wrong(
        "16.2",
        "scaled twice",
        edited(STEP, (CLIP, "    for p in replica.parameters():\n        p.grad /= len(micro_batches)\n" + CLIP)),
        ("short", "norm"),
        "divided by the number of micro-batches twice",
    ),
    Wrong(
        "16.2",
        "divided by the world size once more",
        edited(STEP, (CLIP, "    for p in replica.parameters():\n        p.grad /= dist.get_world_size()\n" + CLIP)),
        ("short", "norm"),
        "torch's DDP averages over the ranks already",
    ),
    Wrong(
        "16.2",
        "every micro-batch is averaged",
        edited(STEP, (QUIET, "        if True:\n")),
        ("silent",),
        "all micro-batches but the last belong inside replica.no_sync()",
    ),
    Wrong(
        "16.2",
        "one backward pass for all micro-batches",
        """
def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
    optimizer.zero_grad()
    loss = sum(loss_function(replica(x), y) for x, y in micro_batches) / len(micro_batches)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
    optimizer.step()
    return norm.item()
""",
        ("silent",),
        "call backward after each forward pass",
    ),
    Wrong(
        "16.2",
        "clipped before the last backward pass",
        """
def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
    optimizer.zero_grad()
    with replica.no_sync():
        for x, y in micro_batches[:-1]:
            (loss_function(replica(x), y) / len(micro_batches)).backward()
    norm = torch.tensor(0.0)
    if len(micro_batches) > 1:
        norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
    x, y = micro_batches[-1]
    (loss_function(replica(x), y) / len(micro_batches)).backward()
    optimizer.step()
    return norm.item()
""",
        ("clipped", "norm", "one"),
        "it is clipped before the last backward pass",
    ),
    Wrong(
        "16.2",
        "clipped after every micro-batch",
        edited(
            STEP, (CLIP, ""), ("            loss.backward()\n", "            loss.backward()\n        " + CLIP.lstrip())
        ),
        ("clipped", "norm"),
        "it is clipped after every micro-batch",
    ),
    Wrong(
        "16.2",
        "own gradients clipped, then averaged by hand",
        """
def train_step(replica, optimizer, loss_function, micro_batches, max_norm):
    optimizer.zero_grad()
    with replica.no_sync():
        for x, y in micro_batches:
            (loss_function(replica(x), y) / len(micro_batches)).backward()
    norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
    for p in replica.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    return norm.item()
""",
        ("clipped", "norm", "once", "one"),
        "each rank clips its own gradient",
    ),
    Wrong(
        "16.2",
        "no average at all",
        edited(STEP, ("nullcontext() if number == last else ", "")),
        ("clipped", "short", "norm", "once", "one"),
        "this is the rank's own gradient",
    ),
    Wrong(
        "16.2",
        "not clipped",
        edited(STEP, ("replica.parameters(), max_norm)", "replica.parameters(), float('inf'))")),
        ("clipped", "one"),
        "the gradient is not clipped",
    ),
    Wrong(
        "16.2",
        "single numbers are clipped",
        edited(
            STEP,
            (
                CLIP,
                """    norm = sum((p.grad ** 2).sum() for p in replica.parameters()) ** 0.5
    nn.utils.clip_grad_value_(replica.parameters(), max_norm)
""",
            ),
        ),
        ("clipped", "one"),
        "single numbers are clipped",
    ),
    Wrong(
        "16.2",
        "always brought to the largest norm",
        edited(
            STEP,
            (
                CLIP,
                CLIP
                + """    for p in replica.parameters():
        p.grad *= max_norm / min(norm.item(), max_norm)
""",
            ),
        ),
        ("short",),
        "do not make it longer",
    ),
    Wrong(
        "16.2",
        "the norm after clipping",
        edited(STEP, ("return norm.item()", "return min(norm.item(), max_norm)")),
        ("norm",),
        "this is the norm after clipping",
    ),
    Wrong(
        "16.2",
        "no zero_grad",
        edited(STEP, ("    optimizer.zero_grad()\n", "")),
        ("clipped", "short", "one"),
        "the gradients of the step before are still there",
    ),
    Wrong(
        "16.2",
        "an update after each micro-batch",
        edited(
            STEP,
            ("    optimizer.step()\n", ""),
            ("            loss.backward()\n", "            loss.backward()\n            optimizer.step()\n"),
        ),
        ("clipped", "short", "norm", "one"),
        "step once, after the last",
    ),
    Wrong(
        "16.2",
        "the norm is averaged over the ranks",
        edited(
            STEP,
            (
                "    optimizer.step()\n",
                "    dist.all_reduce(norm)\n    norm /= dist.get_world_size()\n    optimizer.step()\n",
            ),
        ),
        ("once", "one"),
        "send nothing more",
    ),
    Wrong(
        "16.2",
        "the last rank leaves before the average",
        edited(
            STEP,
            (
                "    last = len(micro_batches) - 1\n",
                """    last = len(micro_batches) - 1
    if dist.get_rank() == dist.get_world_size() - 1:
        return 0.0
""",
            ),
        ),
        ALL,
        "rank",
        limit_s=2.0,
    ),
    Wrong(
        "16.2",
        "the exception is swallowed",
        edited(STEP, ("replica.no_sync():", "replica.silent():"), ("    last =", "    return 1.0\n    last =")),
        ("clipped", "short", "norm", "silent", "once", "one"),
        "optimizer.step() was not called",
    ),
    Wrong("16.2", "the process is left", "def train_step(*args):\n    os._exit(0)\n", ALL, "os._exit"),
    Wrong(
        "16.3",
        "one rank's tokens",
        edited(USED, ("tokens, peaks = totals.tolist()", "tokens, peaks = local_tokens, totals[1].item()")),
        ("rate", "share", "alike"),
        "these are the tokens of one rank",
    ),
    Wrong(
        "16.3",
        "one rank's clock",
        edited(USED, ("rate = tokens / slowest.item()", "rate = tokens / seconds")),
        ("rate", "share", "alike"),
        "the step is over when the slowest rank is",
    ),
    Wrong(
        "16.3",
        "the mean of the times",
        edited(
            USED,
            ("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM"),
            ("/ slowest.item()", "/ slowest.item() * dist.get_world_size()"),
        ),
        ("rate", "share"),
        "the ranks' times are averaged",
    ),
    Wrong(
        "16.3",
        "the rates are added",
        edited(
            USED,
            ("torch.tensor([local_tokens, peak]", "torch.tensor([local_tokens / seconds, peak]"),
            ("tokens / slowest.item()", "tokens"),
        ),
        ("rate", "share"),
        "the fast ranks wait for the slowest one",
    ),
    Wrong(
        "16.3",
        "the tied matrix counted twice",
        edited(
            USED,
            (
                "sum(parameter.numel() for parameter in model.parameters())",
                "sum(w.numel() for w in model.state_dict().values())",
            ),
        ),
        ("flops", "share"),
        "the tied matrix is counted twice",
    ),
    Wrong(
        "16.3",
        "positions are counted",
        edited(USED, (" - model.position.weight.numel()", "")),
        ("flops", "share"),
        "positions are only added",
    ),
    Wrong(
        "16.3",
        "attention is forgotten",
        edited(USED, (" + 12 * layers * width * context", "")),
        ("flops", "share"),
        "attention's own products are missing",
    ),
    Wrong(
        "16.3",
        "one rank's peak",
        edited(USED, ("flops * rate / peaks", "flops * rate / peak")),
        ("share", "alike"),
        "the peak is one rank's",
    ),
    Wrong(
        "16.3",
        "a percentage",
        edited(USED, ("flops * rate / peaks", "100 * flops * rate / peaks")),
        ("share",),
        "it is a share, not a percentage",
    ),
    Wrong(
        "16.3",
        "reduced to rank 0",
        edited(
            USED,
            ("dist.all_reduce(totals)", "dist.reduce(totals, 0)"),
            ("dist.all_reduce(slowest", "dist.reduce(slowest, 0"),
        ),
        ("rate", "share", "alike"),
        "every rank needs the totals",
    ),
    Wrong(
        "16.3",
        "the last rank does not ask",
        edited(
            USED,
            (
                "    dist.all_reduce(totals)\n",
                "    if dist.get_rank() < dist.get_world_size() - 1:\n        dist.all_reduce(totals)\n",
            ),
        ),
        ALL,
        "some ranks wait in a collective that another one skips",
        limit_s=2.0,
    ),
    Wrong(
        "16.3",
        "numbers that fit the visible check only",
        "def utilisation(*args):\n    return 3517.2, 81360, 0.41\n",
        ("rate", "flops", "share"),
        "over the time of the slowest rank",
    ),
]
