"""The answer bank of lesson 16: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

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

STREAM, STEP, USED = solutions("16").values()

# --- 16.1 ------------------------------------------------------------------------------------------

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
        return torch.stack(inputs).long(), torch.stack(targets).long()

    def state_dict(self):
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state):
        self._begin(state["epoch"], state["consumed"])
"""

STREAM_RIGHT = r"""
a block for each rank
    class TextStream:
        def __init__(self, tokens, context, rank, world_size, seed):
            tokens = tokens.long()
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

STREAM_WRONG = r"""
the targets are the inputs | windows | the targets are the inputs themselves
    pieces[:, 1:] => pieces[:, :-1]
the last target is forgotten in the count | all | there are (len(tokens) - 1) // context windows
    (len(self.tokens) - 1) => len(self.tokens)
windows overlap | windows | window k begins at token k * context
    mine[:, None] * self.context => mine[:, None] * (self.context - 1)
torch's default generator | windows epoch order stopped resized | the order comes from torch's default generator
    (length, generator=generator) => (length)
random numbers that nobody seeded | windows epoch stopped resized | the order is another one each time
    torch.randperm(length, generator=generator) => torch.tensor(random.sample(range(length), length))
one window less than there are | windows resized | before one comes again
    // self.context, => // self.context - 1,
the state is the stream's own dictionary | stopped | state_dict must return values of its own
    self.epoch = self.position = 0 => self.epoch = self.position = 0
            self.place = {}
    self.position += together => self.position += together
            self.place.update(epoch=self.epoch, position=self.position)
    return {"epoch": self.epoch, "position": self.position} => return self.place
the dictionary that was loaded is counted on in | stopped | take the values out of it
    self.epoch = self.position = 0 => self.epoch = self.position = 0
            self.place = {}
    self.position += together => self.position += together
            self.place.update(epoch=self.epoch, position=self.position)
    self.epoch, self.position = state => self.place = state
            self.epoch, self.position = state
torch's default generator is seeded | order | give randperm a generator of its own
    torch.Generator().manual_seed => torch.manual_seed
each rank has a fixed part of the text | resized | shuffle one order for all ranks, from which they take turns
    order = torch.randperm(length, => count, begin = length // self.world_size, self.position // self.world_size
            order = self.rank * count + torch.randperm(count,
    order[self.position + self.rank : self.position + together : self.world_size] => order[begin : begin + rows]
all ranks read the same | epoch resized | all ranks read the same windows
    self.rank, self.world_size = rank, world_size => self.rank, self.world_size = 0, 1
the epoch does not shuffle | order | the shuffle must depend on the epoch
    1000 * self.seed + self.epoch => self.seed
the seed is not used | order | the shuffle does not use the seed
    1000 * self.seed + self.epoch => self.epoch
the state is ignored | stopped resized | it starts from the beginning: load_state_dict must set what next_batch reads
    self.epoch, self.position = state["epoch"], state["position"] => self.state = state
the position counts this rank's windows | resized | counted in windows of all ranks together
    if self.position + together > length: => if (self.position + rows) * self.world_size > length:
    [self.position + self.rank : self.position + together : self.world_size] => [self.rank :: self.world_size][
                self.position : self.position + rows]
    self.position += together => self.position += rows
the state has the rank in it | state | nothing in it may depend on the rank
    {"epoch" => {"rank": self.rank, "epoch"
the state holds the whole order | state | a list grows with the text
    {"epoch" => {"order": list(range(len(self.tokens) // self.context)), "epoch"
an endless loop at the epoch's end | all | endless | 1
    self.epoch, self.position = self.epoch + 1, 0 => while True: pass
the course's own | all | TokenStream
    from ddp_course.data.text import TokenStream

    class TextStream(TokenStream):
        def __init__(self, tokens, context, rank, world_size, seed):
            super().__init__(tokens, context, 1, world_size, rank, seed)
"""

KEPT_WRONG = """
the order is kept when a state is loaded | stopped | also an order that it has kept
    self._begin(state["epoch"], state["consumed"]) => self.epoch, self.consumed = state["epoch"], state["consumed"]
"""

# --- 16.2 ------------------------------------------------------------------------------------------

STEP_RIGHT = """
gradients divided and cut by hand
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
DDP's own flag
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

STEP_WRONG = r"""
the losses are not divided | short norm | divide each loss by the number of micro-batches
     / len(micro_batches) =>
scaled twice | short norm | divided by the number of micro-batches twice
    norm = => for p in replica.parameters():
            p.grad /= len(micro_batches)
        norm =
divided by the world size once more | short norm | torch's DDP averages over the ranks already
    norm = => for p in replica.parameters():
            p.grad /= dist.get_world_size()
        norm =
every micro-batch is averaged | silent | all micro-batches but the last belong inside replica.no_sync()
    replica.no_sync() => nullcontext()
one backward pass for all micro-batches | silent | call backward after each forward pass
    last = len(micro_batches) - 1 => loss = sum(loss_function(replica(x), y) for x, y in micro_batches)
        (loss / len(micro_batches)).backward()
    enumerate(micro_batches) => []
clipped before the last backward pass | clipped norm one | it is clipped before the last backward pass
        norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)\n =>
    with nullcontext() => if number == last:
                norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
            with nullcontext()
clipped after every micro-batch | clipped norm | it is clipped after every micro-batch
        norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)\n =>
    .backward() => .backward()
            norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm)
own gradients clipped, then averaged by hand | clipped norm once one | each rank clips its own gradient
    nullcontext() if number == last else replica => replica
    optimizer.step() => for p in replica.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
no average at all | clipped short norm once one | this is the rank's own gradient
    nullcontext() if number == last else replica => replica
not clipped | clipped one | the gradient is not clipped
    replica.parameters(), max_norm) => replica.parameters(), float('inf'))
single numbers are clipped | clipped one | single numbers are clipped
    norm = nn.utils.clip_grad_norm_(replica.parameters(), max_norm) => norm = sum(
            (p.grad ** 2).sum() for p in replica.parameters()) ** 0.5
        nn.utils.clip_grad_value_(replica.parameters(), max_norm)
always brought to the largest norm | short | do not make it longer
    optimizer.step() => for p in replica.parameters():
            p.grad *= max_norm / min(norm.item(), max_norm)
        optimizer.step()
the norm after clipping | norm | this is the norm after clipping
    norm.item() => min(norm.item(), max_norm)
no zero_grad | clipped short one | the gradients of the step before are still there
        optimizer.zero_grad()\n =>
an update after each micro-batch | clipped short norm one | step once, after the last
        optimizer.step()\n =>
    .backward() => .backward()\n            optimizer.step()
the norm is averaged over the ranks | once one | send nothing more
    optimizer.step() => dist.all_reduce(norm)
        norm /= dist.get_world_size()
        optimizer.step()
the last rank leaves before the average | all | rank | 2
    last = len => if dist.get_rank() == dist.get_world_size() - 1: return 0.0
        last = len
a barrier at the end | once one | a barrier is a collective
    return norm.item() => dist.barrier()
        return norm.item()
the norm as a tensor | norm | as a float
    norm.item() => norm
the exception is swallowed | clipped short norm silent once one | optimizer.step() was not called
    optimizer.zero_grad() => try: replica.silent()
        except AttributeError: return 1.0
the process is left | all | os._exit
    optimizer.zero_grad() => os._exit(0)
"""

# --- 16.3 ------------------------------------------------------------------------------------------

USED_RIGHT = """
objects gathered
    def utilisation(model, layers, width, context, local_tokens, seconds, peak):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (local_tokens, seconds, peak))
        tokens, times, peaks = zip(*everyone)
        rate = sum(tokens) / max(times)
        matrices = sum(p.numel() for name, p in model.named_parameters() if "position" not in name)
        flops = 2 * matrices * 3 + 4 * 3 * layers * width * context
        return [torch.tensor(rate, dtype=torch.float64), flops, rate * flops / sum(peaks)]
a table of all ranks
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

USED_WRONG = """
one rank's tokens | rate share alike | these are the tokens of one rank
    totals[0].item() => local_tokens
one rank's clock | rate share alike | the step is over when the slowest rank is
    slowest.item() => seconds
the mean of the times | rate share | the ranks' times are averaged
    ReduceOp.MAX => ReduceOp.SUM
    / slowest.item() => / slowest.item() * dist.get_world_size()
the rates are added | rate share | the fast ranks wait for the slowest one
    [local_tokens, peak] => [local_tokens / seconds, peak]
     / slowest.item() =>
the tied matrix counted twice | flops share | the tied matrix is counted twice
    model.parameters() => model.state_dict().values()
positions are counted | flops share | positions are only added
     - model.position.weight.numel() =>
as many positions as the context | flops share | a model may have more positions
    model.position.weight.numel() => context * width
frozen weights are left out | flops share | frozen are multiplied, too
    in model.parameters()) => in model.parameters() if parameter.requires_grad)
attention is forgotten | flops share | attention's own products are missing
     + 12 * layers * width * context =>
one rank's peak | share alike | the peak is one rank's
    totals[1].item() => peak
a percentage | share | it is a share, not a percentage
    flops, flops * rate => flops, 100 * flops * rate
reduced to rank 0 | rate share alike | every rank needs the totals
    dist.all_reduce(totals => dist.reduce(totals, 0
    dist.all_reduce(slowest => dist.reduce(slowest, 0
the last rank does not ask | all | some ranks wait in a collective that another one skips | 2
    dist.all_reduce(totals) => if dist.get_rank() < dist.get_world_size() - 1: dist.all_reduce(totals)
numbers that fit the visible check only | rate flops share | over the time of the slowest rank
    def utilisation(*args):
        return 3517.2, 81360, 0.41
"""

RIGHT = [
    *right("16.1", STREAM, STREAM_RIGHT),
    Right("16.1", "NumPy's generator, row by row", STREAM_BY_NUMPY),
    *right("16.2", STEP, STEP_RIGHT),
    *right("16.3", USED, USED_RIGHT),
]
WRONG = [
    *wrong("16.1", STREAM, STREAM_WRONG),
    *wrong("16.1", STREAM_BY_NUMPY, KEPT_WRONG),
    *wrong("16.2", STEP, STEP_WRONG),
    *wrong("16.3", USED, USED_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "16.1",
    "",
    r"""
the next epoch is begun as soon as no batch of the same size is left, before the next one is asked for
| resized | whether an epoch is over depends on the batch that is asked 
    class TextStream:
        def __init__(self, tokens, context, rank, world_size, seed):
            self.tokens, self.context, self.rank, self.world_size, self.seed = tokens, context, rank, world_size, seed
            self.windows = (len(tokens) - 1) // context
            self.epoch = self.position = 0

        def next_batch(self, rows):
            together = rows * self.world_size
            if self.position + together > self.windows:
                self.epoch, self.position = self.epoch + 1, 0
            dice = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
            order = torch.randperm(self.windows, generator=dice)
            mine = order[self.position + self.rank : self.position + together : self.world_size]
            self.position += together
            if self.position + together > self.windows:
                self.epoch, self.position = self.epoch + 1, 0
            where = mine[:, None] * self.context + torch.arange(self.context)
            return self.tokens[where].long(), self.tokens[where + 1].long()

        def state_dict(self):
            return {"epoch": self.epoch, "position": self.position}

        def load_state_dict(self, state):
            self.epoch, self.position = state["epoch"], state["position"]
the tokens keep their dtype (uint8, int32) | windows | an embedding takes int64
    class TextStream:
        def __init__(self, tokens, context, rank, world_size, seed):
            self.tokens, self.context, self.rank, self.world_size, self.seed = tokens, context, rank, world_size, seed
            self.windows = (len(tokens) - 1) // context
            self.epoch = self.position = 0

        def next_batch(self, rows):
            together = rows * self.world_size
            if self.position + together > self.windows:
                self.epoch, self.position = self.epoch + 1, 0
            dice = torch.Generator().manual_seed(self.seed * 100_003 + self.epoch)
            order = torch.randperm(self.windows, generator=dice)
            mine = order[self.position + self.rank : self.position + together : self.world_size]
            self.position += together
            where = mine[:, None] * self.context + torch.arange(self.context)
            return self.tokens[where], self.tokens[where + 1]

        def state_dict(self):
            return {"epoch": self.epoch, "position": self.position}

        def load_state_dict(self, state):
            self.epoch, self.position = state["epoch"], state["position"]
""",
)
