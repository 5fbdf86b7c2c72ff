"""The answer bank of lesson 05: samplers, an evaluation, and going on in mid-epoch.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import os
import random
import numpy as np
import torch
import torch.distributed as dist
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

DEAL_IN_BLOCKS = """
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
"""

DEAL_WITH_NUMPY = """
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

ACCURACY_IN_BLOCKS = """
def accuracy(rank, world_size, predict, x, y):
    pieces, labels = x.tensor_split(world_size), y.tensor_split(world_size)
    right = torch.zeros(1)
    if len(pieces[rank]):
        right += (predict(pieces[rank]) == labels[rank]).sum()
    everyone = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(everyone, right)
    return torch.cat(everyone).sum() / len(x)
"""

ACCURACY_ON_RANK_0 = """
def accuracy(rank, world_size, predict, x, y):
    right = torch.tensor(0.0)
    if rank < len(x):
        right += (predict(x[rank::world_size]) == y[rank::world_size]).sum()
    dist.reduce(right, dst=0)
    result = [np.float32(right / len(x))]
    dist.broadcast_object_list(result, src=0)
    return result[0]
"""

ACCURACY_PADDED = """
def accuracy(rank, world_size, predict, x, y):
    order = list(range(len(x)))
    while len(order) % world_size:
        order += order[:world_size - len(order) % world_size]
    mine = order[rank::world_size]
    right = (predict(x[mine]) == y[mine]).sum()
    counts = torch.tensor([float(right), float(len(mine))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
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

RESUME_LISTED = """
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

RIGHT = [
    Right("05.1", "every world_size-th entry", DEAL),
    Right("05.1", "blocks, with Python's generator", DEAL_IN_BLOCKS),
    Right("05.1", "NumPy's numbers", DEAL_WITH_NUMPY),
    Right("05.2", "row by row", ACCURACY),
    Right("05.2", "blocks, gathered", ACCURACY_IN_BLOCKS),
    Right("05.2", "divided on rank 0, sent as an object", ACCURACY_ON_RANK_0),
    Right("05.3", "a place that moves", RESUME),
    Right("05.3", "a list of what is left", RESUME_LISTED),
]

TORCHS = """
from torch.utils.data import DistributedSampler

class MySampler(DistributedSampler):
    def __init__(self, length, world_size, rank, seed=0, drop_last=False):
        super().__init__(range(length), world_size, rank, seed=seed, drop_last=drop_last)
"""

WRONG = [
    # 05.1
    Wrong(
        "05.1",
        "set_epoch without effect",
        DEAL.replace(" + self.epoch)", ")"),
        ("epochs",),
        "set_epoch has no effect on the order",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "a seed for each rank",
        DEAL.replace(" + self.epoch)", " + self.epoch + 31 * self.rank)"),
        ("all", "few", "drop"),
        "the ranks' shards overlap",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "the process's own generator",
        DEAL.replace(
            "        chance = torch.Generator()\n        chance.manual_seed(self.seed * 7919 + self.epoch)\n", ""
        ).replace(", generator=chance", ""),
        ("all", "epochs", "seed", "few", "drop"),
        "shuffle with a generator of your own",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "not shuffled",
        DEAL.replace("torch.randperm(self.length, generator=chance).tolist()", "list(range(self.length))"),
        ("epochs", "seed"),
        "shuffle the indices",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "no padding",
        DEAL.replace("padded = (order * (total // len(order) + 1))[:total]", "padded = order[:total]"),
        ("even", "few"),
        "some ranks have a sample more",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "always drops",
        DEAL.replace("0 if self.drop_last else self.world_size - 1", "0"),
        ("even", "all", "few"),
        "the rest is dropped, but drop_last is False",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "never drops",
        DEAL.replace("0 if self.drop_last else self.world_size - 1", "self.world_size - 1"),
        ("drop",),
        "with drop_last the end of the order is left out",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "padded once only",
        DEAL.replace(
            "(order * (total // len(order) + 1))[:total]",
            "order[:total] + order[:total - len(order)] * (total > len(order))",
        ),
        ("few",),
        "again and again if need be",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "len of the dataset",
        DEAL.replace("return (self.length + extra) // self.world_size", "return self.length").replace(
            "len(self) * self.world_size",
            "(self.length + (0 if self.drop_last else self.world_size - 1)) // self.world_size * self.world_size",
        ),
        ("even", "few", "drop"),
        "a DataLoader asks len() for its number of steps",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "shuffled within the shard",
        DEAL.replace("order = self.order()", "order = list(range(self.length))").replace(
            "return iter(padded[self.rank::self.world_size])",
            "mine = padded[self.rank::self.world_size]\n"
            "        random.Random(f'{self.seed}/{self.epoch}').shuffle(mine)\n        return iter(mine)",
        ),
        ("epochs",),
        "each rank shuffles within its own shard",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "everything on every rank",
        DEAL.replace("padded[self.rank::self.world_size]", "order"),
        ("even", "all", "epochs", "few", "drop"),
        "every rank gets everything",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "the rank is not used",
        DEAL.replace("padded[self.rank::", "padded[0::"),
        ("all", "few", "drop"),
        "the rank is not used",
    ),  # fmt: skip
    Wrong(
        "05.1",
        "one sample pads all",
        DEAL.replace("(order * (total // len(order) + 1))[:total]", "(order + order[:1] * total)[:total]"),
        ("all", "few"),
        "or padding repeats one sample only",
    ),  # fmt: skip
    Wrong("05.1", "torch's own", TORCHS, ALL, "this exercise is to write what it does"),
    Wrong(
        "05.1",
        "never ends",
        DEAL.replace(
            "        order = self.order()\n", "        while True:\n            pass\n        order = self.order()\n"
        ),
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),  # fmt: skip
    Wrong(
        "05.1",
        "padded before the shuffle",
        DEAL.replace(
            "torch.randperm(self.length, generator=chance).tolist()",
            "[i % self.length for i in torch.randperm(len(self) * self.world_size, generator=chance).tolist()]",
        ),
        ("all", "drop"),
        "the order is padded before it is shuffled",
    ),
    # 05.2
    Wrong("05.2", "padded evaluation", ACCURACY_PADDED, ("uneven", "few", "once"), "the shards are padded"),
    Wrong(
        "05.2",
        "mean of the ranks' accuracies",
        ACCURACY.replace(
            "counts = torch.tensor([right, len(rows)])", "counts = torch.tensor([right / max(1, len(rows)), 1.0])"
        ),
        ("uneven", "few"),
        "this is the mean of the ranks' accuracies",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "its own rows only",
        ACCURACY.replace("    dist.all_reduce(counts)\n", ""),
        ("even", "uneven", "few"),
        "this is the accuracy of the rank's own rows",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "everyone evaluates everything",
        "def accuracy(rank, world_size, predict, x, y):\n    return (predict(x) == y).float().mean()\n",
        ("once", "shared"),
        "every rank evaluates everything",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "rank 0 evaluates everything",
        "def accuracy(rank, world_size, predict, x, y):\n    right = torch.zeros(())\n    if rank == 0:\n"
        "        right += (predict(x) == y).float().mean()\n    dist.broadcast(right, src=0)\n    return right\n",
        ("shared",),
        "the work is not shared",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "the rest is lost",
        ACCURACY.replace(
            "range(rank, len(x), world_size)", "range(rank, len(x) - len(x) % world_size, world_size)"
        ).replace("counts[0] / counts[1]", "counts[0] / counts[1].clamp(min=1)"),
        ("uneven", "few", "once"),
        "the rest that does not divide is lost",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "number of right answers",
        ACCURACY.replace("(counts[0] / counts[1])", "counts[0]"),
        ("even", "uneven", "few"),
        "this is the number of right answers",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "rows of one rank",
        ACCURACY.replace("counts[0] / counts[1]", "counts[0] / max(1, len(rows))"),
        ("even", "uneven", "few"),
        "divided by the rows of one rank",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "a rank without rows stays away",
        ACCURACY.replace("    right = 0\n", "    if not rows:\n        return 0.0\n    right = 0\n"),
        ("few", "once", "shared"),
        "one without rows must take part in it, too",
        limit_s=3.0,
    ),  # fmt: skip
    Wrong(
        "05.2",
        "0 / 0 caught",
        ACCURACY.replace(
            "counts = torch.tensor([right, len(rows)])",
            "try:\n        mine = right / len(rows)\n    except ZeroDivisionError:\n        mine = 0.0\n"
            "    counts = torch.tensor([mine, 1.0])",
        ),
        ("uneven", "few"),
        "this is the mean of the ranks' accuracies",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "the result on rank 0 alone",
        ACCURACY_ON_RANK_0.replace("    dist.broadcast_object_list(result, src=0)\n", "").replace(
            "return result[0]", "return result[0] if rank == 0 else None"
        ),
        ("even", "uneven", "few"),
        "reduce has one receiver",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "a number of ranks known by heart",
        ACCURACY.replace("range(rank, len(x), world_size)", "range(rank, len(x), 4)"),
        ("even", "uneven", "once"),
        "some rows are predicted by nobody",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "os._exit",
        ACCURACY.replace("    right = 0\n", "    os._exit(1)\n    right = 0\n"),
        ALL,
        "the function ends its process",
    ),  # fmt: skip
    Wrong(
        "05.2",
        "a hard-coded value",
        "def accuracy(rank, world_size, predict, x, y):\n    predict(x[rank::world_size])\n    return 0.5\n",
        ("even", "uneven", "few"),
        "add up right answers and rows",
    ),  # fmt: skip
    # 05.3
    Wrong(
        "05.3",
        "begins anew",
        RESUME.replace('state["epoch"], state["taken"], 0', 'state["epoch"], 0, 0'),
        ("stopped", "resized"),
        "the epoch began anew",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "counts what the loader asked for",
        RESUME.replace(
            "            yield order[place]\n",
            "            self.base += self.world_size\n            yield order[place]\n",
        ).replace("self.mine += rows", "pass"),
        ("stopped", "resized", "state"),
        "what a loader has read ahead was not trained on",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "counts its own rows only",
        RESUME.replace("self.base + self.mine * self.world_size}", "self.base + self.mine}"),
        ("stopped", "resized"),
        "each step of every rank moves it by world_size",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "a position for this number of ranks",
        RESUME.replace('"taken": self.base + self.mine * self.world_size', '"taken": self.base + self.mine').replace(
            "place = self.base +", "place = self.base * self.world_size +"
        ),
        ("resized",),
        "so that it means the same for another number of them",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "the epoch is not saved",
        RESUME.replace('self.epoch, self.base, self.mine = state["epoch"]', "self.epoch, self.base, self.mine = 0"),
        ("stopped", "resized"),
        "save the epoch in the state",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "padding",
        RESUME.replace(
            "        place = self.base",
            "        order += order[:-self.length % self.world_size]\n        place = self.base",
        ).replace("place < self.length", "place < len(order)"),
        ("whole", "stopped", "resized", "next"),
        "no padding, nothing dropped",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "all that is left, in the state",
        RESUME_LISTED.replace(
            '{"where": [self.epoch, self.start]}', '{"where": [self.epoch, self.start], "left": self.left.tolist()}'
        ),
        ("state",),
        "a list grows with the data set",
    ),
    Wrong(
        "05.3",
        "the rank in the state",
        RESUME.replace('return {"epoch"', 'return {"rank": self.rank, "epoch"'),
        ("state",),
        "nothing in it may depend on the rank",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "set_epoch keeps the position",
        RESUME.replace("        self.epoch, self.base, self.mine = epoch, 0, 0", "        self.epoch = epoch"),
        ("next",),
        "the position goes back to 0",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "not shuffled",
        RESUME.replace("        random.Random(1000 * self.seed + self.epoch).shuffle(order)\n", ""),
        ("whole", "next"),
        "shuffle as in 05.1",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "one order for all epochs",
        RESUME.replace("1000 * self.seed + self.epoch", "self.seed"),
        ("next",),
        "set_epoch has no effect on the order",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "the first run is forgotten",
        RESUME.replace('"taken": self.base + self.mine', '"taken": self.mine'),
        ("resized",),
        "the second state forgets the first run",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "tensors in the state",
        RESUME.replace('"epoch": self.epoch,', '"epoch": torch.tensor(self.epoch),'),
        ALL,
        "the state is saved as plain data",
    ),  # fmt: skip
    Wrong(
        "05.3",
        "the course's own",
        "from ddp_course.data.sampler import ShardSampler\n"
        "class Resumable(ShardSampler):\n    def __init__(self, length, world_size, rank, seed=0):\n"
        "        super().__init__(length, world_size, rank, seed=seed, streaming=True)\n",
        ALL,
        "this exercise is to write what it does",
    ),  # fmt: skip
]
