"""The answer bank of lesson 05: samplers, an evaluation, and going on in mid-epoch.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong

IMPORTS = """
import os
import random
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
"""

# --- 05.1 ------------------------------------------------------------------------------------------

DEAL = """
class MySampler:
    def __init__(self, length, world_size, rank, seed=0, drop_last=False):
        self.length, self.world_size, self.rank = length, world_size, rank
        self.seed, self.drop_last, self.epoch = seed, drop_last, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        extra = 0 if self.drop_last else self.world_size - 1
        return (self.length + extra) // self.world_size

    def order(self):
        chance = torch.Generator()
        chance.manual_seed(self.seed * 7919 + self.epoch)
        return torch.randperm(self.length, generator=chance).tolist()

    def __iter__(self):
        order = self.order()
        total = len(self) * self.world_size
        padded = (order * (total // len(order) + 1))[:total]
        return iter(padded[self.rank::self.world_size])
"""

DEAL_RIGHT = """
blocks, with Python's generator
    class MySampler(torch.utils.data.Sampler):
        def __init__(self, length, world_size, rank, seed, drop_last):
            self.n, self.w, self.r, self.seed, self.drop = length, world_size, rank, seed, drop_last
            self.share = length // world_size if drop_last else -(-length // world_size)
            self.set_epoch(0)

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return self.share

        def __iter__(self):
            order = list(range(self.n))
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
            for place in range(self.r * self.share, (self.r + 1) * self.share):
                yield order[place % self.n]
NumPy's numbers
    class MySampler:
        def __init__(self, length, world_size, rank, seed=0, drop_last=False):
            rest = length % world_size
            total = length - rest if drop_last or not rest else length - rest + world_size
            self.length, self.seed, self.epoch = length, seed, 0
            self.places = np.arange(rank, total, world_size) % length

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return self.places.size

        def __iter__(self):
            return iter(np.random.default_rng([self.seed, self.epoch]).permutation(self.length)[self.places])
"""

DEAL_WRONG = r"""
len of the dataset | even few drop | a DataLoader asks len() for its number of steps
    return (self.length + extra) // self.world_size => return self.length
    total = len(self) * => extra = 0 if self.drop_last else self.world_size - 1
            total = (self.length + extra) // self.world_size *
padded before the shuffle | all drop | the order is padded before it is shuffled
    torch.randperm(self.length, generator=chance).tolist() => [i % self.length
                for i in torch.randperm(len(self) * self.world_size, generator=chance).tolist()]
set_epoch without effect | epochs | set_epoch has no effect on the order
     + self.epoch) => )
a seed for each rank | all few drop | the ranks' shards overlap
     + self.epoch) =>  + self.epoch + 31 * self.rank)
the process's own generator | all epochs seed few drop | shuffle with a generator of your own
            chance = torch.Generator()\n        chance.manual_seed(self.seed * 7919 + self.epoch)\n =>
    , generator=chance =>
not shuffled | epochs seed | shuffle the indices
    torch.randperm(self.length, generator=chance).tolist() => list(range(self.length))
no padding | even few | some ranks have a sample more
    padded = (order * (total // len(order) + 1))[:total] => padded = order[:total]
always drops | even all few | the rest is dropped, but drop_last is False
    0 if self.drop_last else self.world_size - 1 => 0
not shuffled before the first call | epochs seed | before the first call of set_epoch the epoch is 0
    seed, drop_last, 0 => seed, drop_last, None
            chance = =>         if self.epoch is None:
                return list(range(self.length))
            chance =
multiplied by a seed of 0 | epochs | set_epoch has no effect on the order
    self.seed * 7919 + self.epoch => self.seed * (self.epoch + 1)
the seed of epoch 0 alone | seed | does not use the seed in each epoch
    self.seed * 7919 + self.epoch => self.epoch or 7919 * self.seed
the end of the order comes twice | all drop | padding repeats, or drop_last leaves out, another part of the order
    + 1))[:total] => + 1))[-total:]
a rest of none is dropped | drop | the ranks divide the length here
    padded = => padded = order[: -(self.length % self.world_size)] if self.drop_last else
never drops | drop | with drop_last the end of the order is left out
    0 if self.drop_last else self.world_size - 1 => self.world_size - 1
padded once only | few | again and again if need be
    (order * (total // len(order) + 1))[:total] => order[:total] + order[:total - len(order)] * (total > len(order))
shuffled within the shard | epochs | each rank shuffles within its own shard
    order = self.order() => order = list(range(self.length))
    return iter(padded[self.rank::self.world_size]) => mine = padded[self.rank::self.world_size]
            random.Random(f'{self.seed}/{self.epoch}').shuffle(mine)
            return iter(mine)
everything on every rank | even all epochs few drop | every rank gets everything
    padded[self.rank::self.world_size] => order
the rank is not used | all few drop | the rank is not used
    padded[self.rank:: => padded[0::
one sample pads all | all few | or padding repeats one sample only
    (order * (total // len(order) + 1))[:total] => (order + order[:1] * total)[:total]
torch's own | all | this exercise is to write what it does
    from torch.utils.data import DistributedSampler

    class MySampler(DistributedSampler):
        def __init__(self, length, world_size, rank, seed=0, drop_last=False):
            super().__init__(range(length), world_size, rank, seed=seed, drop_last=drop_last)
never ends | all | an endless loop | 1
            order = self.order()\n =>         while True:
                pass
            order = self.order()\n
"""

# --- 05.2 ------------------------------------------------------------------------------------------

ACCURACY = """
def accuracy(rank, world_size, predict, x, y):
    rows = range(rank, len(x), world_size)
    right = 0
    for row in rows:
        right += int(predict(x[row:row + 1])[0] == y[row])
    counts = torch.tensor([right, len(rows)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
"""

ACCURACY_RIGHT = """
divided on rank 0, sent as an object
    def accuracy(rank, world_size, predict, x, y):
        right = torch.tensor(0.0)
        if rank < len(x):
            right += (predict(x[rank::world_size]) == y[rank::world_size]).sum()
        dist.reduce(right, dst=0)
        result = [np.float32(right / len(x))]
        dist.broadcast_object_list(result, src=0)
        return result[0]
all_gather_into_tensor
    dist.all_reduce(counts) => table = counts.repeat(world_size)
        dist.all_gather_into_tensor(table, counts)
        counts = table.view(world_size, 2).sum(0)
functional collectives
    dist.all_reduce(counts) => counts = funcol.all_reduce(counts, "sum", dist.group.WORLD)
coalesced calls
    dist.all_reduce(counts) => with dist._coalescing_manager():
            dist.all_reduce(counts[:1])
            dist.all_reduce(counts[1:])
blocks, gathered
    def accuracy(rank, world_size, predict, x, y):
        pieces, labels = x.tensor_split(world_size), y.tensor_split(world_size)
        right = torch.zeros(1)
        if len(pieces[rank]):
            right += (predict(pieces[rank]) == labels[rank]).sum()
        everyone = [torch.zeros(1) for _ in range(world_size)]
        dist.all_gather(everyone, right)
        return torch.cat(everyone).sum() / len(x)
"""

ACCURACY_WRONG = r"""
the result on rank 0 alone | even uneven few | reduce has one receiver
    dist.all_reduce(counts) => dist.reduce(counts, dst=0)
    return (counts[0] / counts[1]).item() => return (counts[0] / counts[1]).item() if rank == 0 else None
padded evaluation | uneven few once | the shards are padded
    def accuracy(rank, world_size, predict, x, y):
        order = list(range(len(x)))
        while len(order) % world_size:
            order += order[:world_size - len(order) % world_size]
        mine = order[rank::world_size]
        right = (predict(x[mine]) == y[mine]).sum()
        counts = torch.tensor([float(right), float(len(mine))])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()
mean of the ranks' accuracies | uneven few | this is the mean of the ranks' accuracies
    counts = torch.tensor([right, len(rows)]) => counts = torch.tensor([right / max(1, len(rows)), 1.0])
its own rows only | even uneven few | this is the accuracy of the rank's own rows
        dist.all_reduce(counts)\n =>
everyone evaluates everything | once shared | every rank evaluates everything
    def accuracy(rank, world_size, predict, x, y):
        return (predict(x) == y).float().mean()
blocks of equal size, the last ones short | shared | the work is not shared
    def accuracy(rank, world_size, predict, x, y):
        per_rank = -(-len(x) // world_size)
        rows, labels = (part[rank * per_rank : (rank + 1) * per_rank] for part in (x, y))
        counts = torch.zeros(2, dtype=torch.float64)
        if len(rows):
            counts[0], counts[1] = (predict(rows) == labels).sum(), len(rows)
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()
rank 0 evaluates everything | shared | the work is not shared
    def accuracy(rank, world_size, predict, x, y):
        right = torch.zeros(())
        if rank == 0:
            right += (predict(x) == y).float().mean()
        dist.broadcast(right, src=0)
        return right
the rest is lost | uneven few once | the rest that does not divide is lost
    range(rank, len(x), world_size) => range(rank, len(x) - len(x) % world_size, world_size)
    counts[0] / counts[1] => counts[0] / counts[1].clamp(min=1)
counted in float16 | uneven | float16 can count to 2048
    torch.tensor([right, len(rows)]) => torch.tensor([right, len(rows)], dtype=torch.float16)
    (counts[0] / counts[1]).item() => counts[0].item() / counts[1].item()
number of right answers | even uneven few | this is the number of right answers
    (counts[0] / counts[1]) => counts[0]
rows of one rank | even uneven few | divided by the rows of one rank
    counts[0] / counts[1] => counts[0] / max(1, len(rows))
a rank without rows stays away | few once shared | one without rows must take part in it, too | 3
        right = 0\n =>     if not rows:
            return 0.0
        right = 0\n
0 / 0 caught | uneven few | this is the mean of the ranks' accuracies
    counts = torch.tensor([right, len(rows)]) => try:
            mine = right / len(rows)
        except ZeroDivisionError:
            mine = 0.0
        counts = torch.tensor([mine, 1.0])
a number of ranks known by heart | even uneven once | some rows are predicted by nobody
    range(rank, len(x), world_size) => range(rank, len(x), 4)
os._exit | all | the function ends its process
        right = 0\n =>     os._exit(1)\n    right = 0\n
a hard-coded value | even uneven few | add up right answers and rows
    def accuracy(rank, world_size, predict, x, y):
        predict(x[rank::world_size])
        return 0.5
"""

# --- 05.3 ------------------------------------------------------------------------------------------

RESUME = """
class Resumable:
    def __init__(self, length, world_size, rank, seed=0):
        self.length, self.world_size, self.rank, self.seed = length, world_size, rank, seed
        self.epoch, self.base, self.mine = 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch, self.base, self.mine = epoch, 0, 0

    def __iter__(self):
        order = list(range(self.length))
        random.Random(1000 * self.seed + self.epoch).shuffle(order)
        place = self.base + self.mine * self.world_size + self.rank
        while place < self.length:
            yield order[place]
            place += self.world_size

    def advance(self, rows):
        self.mine += rows

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.base + self.mine * self.world_size}

    def load_state_dict(self, state):
        self.epoch, self.base, self.mine = state["epoch"], state["taken"], 0
"""

RESUME_RIGHT = """
a list of what is left
    class Resumable:
        def __init__(self, length, world_size, rank, seed=0):
            self.settings = length, world_size, rank, seed
            self.set_epoch(0)

        def set_epoch(self, epoch):
            self.load_state_dict({"where": [epoch, 0]})

        def load_state_dict(self, state):
            length, _, _, seed = self.settings
            self.epoch, self.start = state["where"]
            chance = torch.Generator().manual_seed(seed + 1009 * self.epoch)
            self.left = torch.randperm(length, generator=chance)[self.start:]

        def __iter__(self):
            _, world_size, rank, _ = self.settings
            yield from self.left[rank::world_size].tolist()

        def advance(self, rows):
            self.start += rows * self.settings[1]

        def state_dict(self):
            return {"where": [self.epoch, self.start]}
"""

RESUME_WRONG = r"""
all that is left, in the state | state | a list grows with the data set
    return {"epoch": self.epoch, => return {"left": list(range(self.base, self.length)), "epoch": self.epoch,
begins again | stopped resized | the epoch began again
    state["epoch"], state["taken"], 0 => state["epoch"], 0, 0
counts what the loader asked for | stopped resized state | what a loader has read ahead was not trained on
                yield order[place]\n =>             self.base += self.world_size
                yield order[place]\n
    self.mine += rows => pass
counts its own rows only | stopped resized | each step of every rank moves it by world_size
    self.base + self.mine * self.world_size} => self.base + self.mine}
a position for this number of ranks | resized | so that it means the same for another number of them
    "taken": self.base + self.mine * self.world_size => "taken": self.base + self.mine
    place = self.base + => place = self.base * self.world_size +
the epoch is not saved | stopped resized | save the epoch in the state
    self.epoch, self.base, self.mine = state["epoch"] => self.epoch, self.base, self.mine = 0
padding | whole stopped resized next | no padding, nothing dropped
            place = self.base =>         order += order[:-self.length % self.world_size]
            place = self.base
    place < self.length => place < len(order)
the rank in the state | state | nothing in it may depend on the rank
    return {"epoch" => return {"rank": self.rank, "epoch"
set_epoch keeps the position | next | the position goes back to 0
            self.epoch, self.base, self.mine = epoch, 0, 0 =>         self.epoch = epoch
the epoch that runs is not begun again | next | also that which was interrupted
            self.epoch, self.base, self.mine = epoch, 0, 0 =>         if epoch != self.epoch:
                self.epoch, self.base, self.mine = epoch, 0, 0
an epoch that has ended begins again | stopped | the epoch began again
    place = self.base => place = self.base % self.length
every batch is as large as the first | stopped resized | by world_size * rows
    self.mine += rows => self.size = vars(self).get("size", rows)
            self.mine += self.size
the state goes on changing | state | which nothing changes afterwards
    self.mine += rows => self.mine += rows
            self.state_dict()
    return {"epoch": self.epoch, "taken": self.base + self.mine * self.world_size} =>
            found = vars(self).setdefault("found", {})
            found.update(epoch=self.epoch, taken=self.base + self.mine * self.world_size)
            return found
not shuffled | whole next | shuffle as in 05.1
            random.Random(1000 * self.seed + self.epoch).shuffle(order)\n =>
one order for all epochs | next | set_epoch has no effect on the order
    1000 * self.seed + self.epoch => self.seed
the first run is forgotten | resized | the second state forgets the first run
    "taken": self.base + self.mine => "taken": self.mine
tensors in the state | all | the state is saved as plain data
    "epoch": self.epoch, => "epoch": torch.tensor(self.epoch),
the course's own | all | this exercise is to write what it does
    from ddp_course.data.sampler import ShardSampler
    class Resumable(ShardSampler):
        def __init__(self, length, world_size, rank, seed=0):
            super().__init__(length, world_size, rank, seed=seed, streaming=True)
"""

RIGHT = [
    Right("05.1", "every world_size-th entry", DEAL),
    *right("05.1", DEAL, DEAL_RIGHT),
    Right("05.2", "row by row", ACCURACY),
    *right("05.2", ACCURACY, ACCURACY_RIGHT),
    Right("05.3", "a place that moves", RESUME),
    *right("05.3", RESUME, RESUME_RIGHT),
]

WRONG = [
    *wrong("05.1", DEAL, DEAL_WRONG),
    *wrong("05.2", ACCURACY, ACCURACY_WRONG),
    *wrong("05.3", RESUME, RESUME_WRONG),
]
