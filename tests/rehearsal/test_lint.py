"""Each fault is put into a right program and is named on its line; the right programs are silent."""

from collections import Counter
from pathlib import Path

import pytest

from ddp_course.rehearsal.finding import FAULTS
from ddp_course.rehearsal.lint import RULES, lint
from tests.rehearsal.strangers import scripts, verdict

PROGRAM = (Path(__file__).parents[2] / "programs" / "ddp.py").read_text()
SET_EPOCH = "        sampler.set_epoch(epoch)  # 4: a new order in each epoch\n"
TOTAL = "        dist.all_reduce(total)\n"
TRAINER = """
import argparse, os, torch, torch.distributed as dist, numpy as np
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.body(x)

class Rows(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return self.x[i] + self.rng.normal(size=4)

class Trainer:
    def __init__(self, rank, world):
        self.rank = rank
        self.chief = rank == 0
        torch.cuda.set_device(rank)
        self.net = DDP(Net().cuda())
        self.sampler = DistributedSampler(Rows(), num_replicas=world, rank=rank)
        self.loader = DataLoader(Rows(), batch_size=32, sampler=self.sampler, num_workers=2)

    def log(self, text):
        if self.chief:
            print(text)

    def save(self):
        torch.save(self.net.module.state_dict(), "last.pt")

    def fit(self):
        for epoch in range(3):
            self.sampler.set_epoch(epoch)
            seen = torch.zeros(2)
            for i, x in enumerate(self.loader):
                if i % 2 == 0:
                    with self.net.no_sync():
                        loss = self.net(x).mean()
                        loss.backward()
                    continue
                loss = self.net(x).mean()
                loss.backward()
                seen += torch.tensor([loss.item() * len(x), len(x)])
            dist.all_reduce(seen)
            self.log(f"loss {seen[0].item() / seen[1].item()}")
            if self.rank == 0:
                self.save()
            dist.barrier()
            self.net.module.load_state_dict(torch.load("last.pt"))

def run(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    np.random.seed(rank)
    Trainer(rank, world).fit()

if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
"""

ALONE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in rows(rank, dist.get_world_size()):
        net(x).mean().backward()
        optimizer.step()

main()
"""
STACKED = """    @torch.no_grad()
    def evaluate(self):
        means = [self.net(x).mean() for x in self.loader]
        mean = torch.stack(means).mean()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def save(self)"""

# ruff: noqa: E501  (a row a line reads better)
# What is changed in which program; the fault that is then named, and a piece of the line it is named on.
SPOILT = [
    (PROGRAM, [(SET_EPOCH, "")], "missing-set-epoch", "DistributedSampler("),
    (PROGRAM, [(", sampler=sampler", ", shuffle=True")], "same-rows", "shuffle=True"),
    (PROGRAM, [(TOTAL, f"        if rank == 0:\n    {TOTAL}")], "collective-under-rank-0", "all_reduce(total)"),
    (PROGRAM, [("if rank == 0:  # 5: one rank prints", "if True:")], "prints-by-every-rank", "print(f"),
    (PROGRAM, [("if rank == 0:  # 6", "if True:  # 6")], "unguarded-save", "torch.save("),
    (PROGRAM, [("            dist.barrier()\n", "            torch.load(options.checkpoint)\n")], "early-load", "torch.load"),
    (PROGRAM, [(TOTAL, f'{TOTAL}        open("log.txt", "a").write("x")\n')], "file-by-every-rank", "log.txt"),
    (PROGRAM, [("            optimizer.step()", "            for p in model.parameters():\n                p.grad /= world_size\n            optimizer.step()")], "averaged-twice", "p.grad /="),
    (TRAINER, [("            self.sampler.set_epoch(epoch)\n", "")], "missing-set-epoch", "DistributedSampler("),
    (TRAINER, [("            if self.rank == 0:\n                self.save()", "            self.save()")], "unguarded-save", "torch.save("),
    (TRAINER, [("            dist.barrier()\n", "")], "early-load", "torch.load"),
    (TRAINER, [("        if self.chief:\n            print(text)", "        print(text)")], "prints-by-every-rank", "print(text)"),
    (TRAINER, [("            dist.all_reduce(seen)\n", "")], "loss-not-reduced", "loss.item()"),
    (TRAINER, [("            dist.all_reduce(seen)\n", "            if self.chief:\n                dist.all_reduce(seen)\n")], "collective-under-rank-0", "all_reduce(seen)"),
    (TRAINER, [("        torch.cuda.set_device(rank)\n", "")], "cuda-without-device", ".cuda()"),
    (TRAINER, [('if __name__ == "__main__":\n    mp', "mp")], "no-main-guard", "mp.spawn"),
    (TRAINER, [("DDP(Net().cuda())", "DDP(Net().cuda(), find_unused_parameters=True)")], "find-unused-without-need", "DDP("),
    (TRAINER, [("                    with self.net.no_sync():\n                        loss = self.net(x).mean()\n", "                    loss = self.net(x).mean()\n                    with self.net.no_sync():\n")], "forward-outside-no-sync", "with self.net"),
    (TRAINER, [("np.random.seed(rank)", "np.random.seed(0)"), ("self.rng.normal", "np.random.normal")], "same-augmentation", "normal"),
    (TRAINER, [("seen[0].item() / seen[1].item()", "mean"), ("dist.all_reduce(seen)", "mean = seen[0] / seen[1]\n            dist.all_reduce(mean)\n            mean /= dist.get_world_size()")], "mean-of-means", "mean = seen"),
    (TRAINER, [("def run(", 'p = argparse.ArgumentParser()\np.add_argument("--local_rank", type=int)\n\ndef run(')], "local-rank-argument", "--local_rank"),
    (TRAINER, [("self.net.module.state_dict()", "self.net.state_dict()"), ('torch.load("last.pt"))', 'torch.load("last.pt"), strict=False)')], "module-prefix", "strict=False"),
    (TRAINER, [("            self.sampler.set_epoch(epoch)\n", "            self.sampler.set_epoch(epoch)\n            logging.info('epoch')\n"), ("class Net", "logging.basicConfig(level=20)\n\nclass Net")], "prints-by-every-rank", "basicConfig"),
    (TRAINER, [("                loss = self.net(x).mean()\n                loss.backward()\n                seen", "                loss = self.net.module(x).mean()\n                loss.backward()\n                seen")], "past-the-replica", "self.net.module(x)"),
    (TRAINER, [("                loss = self.net(x).mean()\n                loss.backward()\n                seen", "                with self.net.no_sync():\n                    loss = self.net(x).mean()\n                    loss.backward()\n                seen"), ("self.net = DDP(Net().cuda())", "self.net = DDP(Net().cuda())\n        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)")], "not-averaged", "with self.net.no_sync()"),
    (ALONE, [], "not-averaged", "SGD(net.parameters()"),
    (ALONE, [("seed(0)", "seed(rank)"), ("        optimizer.step()", "        for p in net.parameters():\n            dist.all_reduce(p.grad)\n        optimizer.step()")], "different-start", "manual_seed(rank)"),
    (ALONE, [("net = torch", "net = DDP(torch"), ("4, 4)", "4, 4))"), ("    optimizer =", "    state = torch.load('last.pt')\n    first = state['epoch']\n    net.module.load_state_dict(state['net'])\n    optimizer =")], "inexact-resume", "load_state_dict"),
    (TRAINER, [("dist.all_reduce(seen)", "self.evaluate()\n            dist.all_reduce(seen)"), ("    def save(self)", STACKED)], "mean-of-means", "torch.stack(means)"),
    (TRAINER, [("def run(", "criterion = torch.nn.CrossEntropyLoss(ignore_index=0)\n\n\ndef tell(net, x, y):\n    loss = criterion(net(x), y)\n    return loss.item() * y.size(0)\n\n\ndef run("), ("loss.item() * len(x)", "loss.item()")], "mean-of-means", "y.size(0)"),
    (TRAINER, [("torch.nn.Linear(4, 4)", "torch.nn.BatchNorm1d(4)"), ("batch_size=32", "batch_size=2")], "local-batchnorm", "BatchNorm1d"),
    (TRAINER, [(", num_workers=2", ""), ("        return self.x[i]", "        time.sleep(0.01)\n        return self.x[i]")], "slow-loading", "sleep"),  # fmt: skip
]  # fmt: skip


@pytest.mark.parametrize(("program", "edits", "fault", "line"), SPOILT, ids=[row[2] for row in SPOILT])
def test_a_fault_is_named_on_its_line(program, edits, fault, line):
    for old, new in edits:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    found = lint(program)
    assert {each.fault for each in found} == {fault}
    assert line in program.splitlines()[found[0].line - 1]


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "programs").glob("*.py")), ids=lambda path: path.stem
)
def test_the_plain_programs_are_clean(path):
    assert lint(path.read_text()) == []


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "right").glob("*.py")), ids=lambda path: path.stem)
def test_right_programs_of_many_styles_are_left_alone(path):
    assert lint(path.read_text()) == []


def test_the_trainer_is_clean():
    assert lint(TRAINER) == []


RIGHT = {
    "an early return": "def save(m):\n    if dist.get_rank() != 0:\n        return\n    torch.save(m, 'a.pt')\n",
    "a file for each rank": "rank = dist.get_rank()\ntorch.save({}, f'shard-{rank}.pt')\n",
    "and": "if step % 10 == 0 and is_main_process():\n    torch.save({}, 'a.pt')\n",
    "both branches": "if dist.get_rank() == 0:\n    dist.barrier()\nelse:\n    dist.barrier()\n",
    "a group of its own": "if dist.get_rank() == 0:\n    dist.all_reduce(x, group=alone)\n",
    "prints that name the rank": "for i in range(3):\n    print(f'[{rank}] {i}')\n",
    "a local rank with a default": "p.add_argument('--local_rank', default=int(os.environ['LOCAL_RANK']))\n",
    "a test of the world's size": "if world_size > 1:\n    dist.all_reduce(x)\n",
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_named(name):
    assert lint(f"import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n{RIGHT[name]}") == []


def test_a_program_without_ranks_is_left_alone():
    assert lint("import torch\ntorch.save({}, 'a.pt')\nfor i in range(3):\n    print(i)\n") == []


def test_every_rule_has_words_and_every_line_fits():
    assert set(RULES) <= set(FAULTS)
    for program, edits, *_ in SPOILT:
        for old, new in edits:
            program = program.replace(old, new)
        shown = [line for each in lint(program) for line in each.show("train.py").splitlines()]
        assert len(shown) >= 3 and max(map(len, shown)) <= 100


def test_of_strangers_scripts_no_right_one_is_blamed_and_most_faults_show_in_the_text():
    found = Counter(verdict(script, lint(script["text"])) for script in scripts() if script["in_text"])
    assert found["false alarm"] == 0 and found["left alone"] == 14
    assert found["named"] + found["named elsewhere"] >= 29 and found["missed"] <= 6
