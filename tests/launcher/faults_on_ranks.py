"""What does the launcher say when a rank fails by itself, before it sends anything wrong?

Programs with one bug each, as people write them. A rank raises, dies, hangs outside every collective, returns a
value that cannot travel, or trains with DDP on its own terms. The line that a good report shows ends in
`# fault:` and the function's name; a function without that mark has no such line. `fault_table` says who is to
blame; the bugs in what ranks say to each other are in `faults_talking_on_ranks`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

# --- A rank raises ----------------------------------------------------------------------------------


def raises_in_the_middle(rank: int, world_size: int) -> float:
    features = 7 if rank == 2 else 8
    loss = (torch.ones(4, features) @ torch.ones(8, 1)).sum()  # fault: raises_in_the_middle
    dist.all_reduce(loss)
    return loss.item()


def all_raise_the_same(rank: int, world_size: int) -> float:
    config = {"lr": 0.1, "steps": 3}
    return config["learning_rate"] / world_size  # fault: all_raise_the_same


class BadSample(Exception):
    def __init__(self, index: int):
        self.index = index

    def __str__(self) -> str:
        return f"sample {self.index} of {self.total} is empty"  # there is no self.total


def error_that_cannot_be_printed(rank: int, world_size: int) -> None:
    if rank == 1:
        raise BadSample(17)  # fault: error_that_cannot_be_printed
    dist.barrier()


class ShapeMismatch(Exception):
    def __init__(self, expected: tuple, found: tuple):
        super().__init__(f"expected {expected}, found {found}")


def error_that_cannot_be_unpickled(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ShapeMismatch((4, 8), (4, 7))  # fault: error_that_cannot_be_unpickled
    dist.barrier()


def chained_errors(rank: int, world_size: int) -> None:
    row = {"image": "cat.png"} if rank == 1 else {"image": "cat.png", "label": "3"}
    try:
        label = int(row["label"])
    except KeyError as error:
        raise RuntimeError("the annotations are damaged") from error  # fault: chained_errors
    dist.all_reduce(torch.tensor(label))


def out_of_memory(rank: int, world_size: int) -> None:
    sequence = 1 << (25 if rank == 1 else 4)
    scores = torch.empty(sequence, sequence)  # fault: out_of_memory
    dist.all_reduce(scores)


def file_missing(rank: int, world_size: int) -> int:
    here = Path(__file__)
    shard = here.with_name("shard-1.txt") if rank == 1 else here
    text = shard.read_text()  # fault: file_missing
    lines = torch.tensor(len(text.splitlines()))
    dist.all_reduce(lines)
    return lines.item()


def no_such_gpu(rank: int, world_size: int) -> None:
    device = "cuda:8" if rank == 1 else "cpu"  # the rank's number on its machine, counted across all machines
    gradients = torch.ones(4).to(device)  # fault: no_such_gpu
    dist.all_reduce(gradients)


def asks_the_user(rank: int, world_size: int) -> None:
    if rank == 0 and input("Overwrite the checkpoint? [y/n] ") != "y":  # fault: asks_the_user
        raise SystemExit(1)
    dist.barrier()


def opens_the_group_twice(rank: int, world_size: int) -> float:
    dist.init_process_group("gloo")  # fault: opens_the_group_twice
    loss = torch.ones(1)
    dist.all_reduce(loss)
    return loss.item()


def flatten(names: list | str) -> list:
    return [leaf for name in names for leaf in flatten(name)]  # fault: recursion_error


def recursion_error(rank: int, world_size: int) -> None:
    names = flatten(["cat", "dog"] if rank == 2 else [[], []])  # each character of a string is a string
    dist.all_reduce(torch.tensor(len(names)))


class Images(Dataset):
    """Eight images; a worker of rank 1 finds the fifth damaged."""

    def __init__(self, rank: int):
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        pixels = list(range(3 if self.rank == 1 and index == 5 else 4))
        return torch.tensor([pixels[0], pixels[3]])  # fault: loader_worker_raises


def loader(data: Dataset) -> DataLoader:
    # Forked: a worker of another kind imports torch first, for longer than these ranks may take.
    return DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")


def loader_worker_raises(rank: int, world_size: int) -> None:
    for batch in loader(Images(rank)):
        dist.all_reduce(batch)


# --- A rank dies ------------------------------------------------------------------------------------


class GreedyImages(Images):
    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does when memory runs out
        return torch.ones(2)


def loader_worker_dies(rank: int, world_size: int) -> None:
    for batch in loader(GreedyImages(rank)):  # the error comes by a signal: here, or from inside the all_reduce
        dist.all_reduce(batch)


def exits_early(rank: int, world_size: int) -> None:
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 2:  # this rank's loss is low enough
            sys.exit()  # fault: exits_early


def quits(rank: int, world_size: int) -> None:
    if rank == 0:
        print("usage: train.py CONFIG")
        quit()  # fault: quits
    dist.barrier()


def leaves_by_os_exit(rank: int, world_size: int) -> None:
    if rank == 2:
        os._exit(0)
    dist.barrier()


def killed_for_memory(rank: int, world_size: int) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def terminated(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    dist.all_reduce(torch.ones(4))


def bad_pointer(rank: int, world_size: int) -> None:
    if rank == 1:
        ctypes.string_at(0)  # fault: bad_pointer
    dist.all_reduce(torch.ones(4))


def aborts(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()  # fault: aborts
    dist.barrier()


def depth(node: list) -> int:
    return 1 + max(map(depth, node), default=0)  # fault: recursion_to_death


def recursion_to_death(rank: int, world_size: int) -> None:
    node: list = []
    if rank == 1:
        node.append(node)  # a tree that contains itself
        sys.setrecursionlimit(10**7)
    levels = torch.tensor(depth(node))
    dist.all_reduce(levels)


# --- A rank hangs outside every collective ------------------------------------------------------------


def threads_deadlock(rank: int, world_size: int) -> None:
    queue_lock, log_lock, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def log() -> None:
        with log_lock:
            both.wait()
            with queue_lock:
                pass

    if rank == 1:
        threading.Thread(target=log, daemon=True).start()
        with queue_lock:
            both.wait()
            with log_lock:  # fault: threads_deadlock
                pass
    dist.all_reduce(torch.ones(4))


def loops_for_ever(rank: int, world_size: int) -> None:
    step = 0
    while rank == 0 and step != 10:  # fault: loops_for_ever
        step += 3
    dist.barrier()


def pattern_that_backtracks(rank: int, world_size: int) -> None:
    line = "a" * 60 + ("!" if rank == 1 else "")
    found = re.fullmatch(r"(a+)+", line)  # fault: pattern_that_backtracks
    dist.all_reduce(torch.tensor(found is not None).int())


def sleeps(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(3600)  # fault: sleeps
    dist.all_reduce(torch.ones(4))


def waits_for_its_queue(rank: int, world_size: int) -> None:
    batches: queue.Queue = queue.Queue()
    for index in range(1 if rank == 2 else 2):  # the thread that loads has ended early
        batches.put(torch.ones(4) * index)
    for _ in range(2):
        batch = batches.get()  # fault: waits_for_its_queue
        dist.all_reduce(batch)


class StuckImages(Images):
    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 5:
            time.sleep(3600)  # a file system that does not answer
        return torch.ones(2)


def waits_for_its_loader(rank: int, world_size: int) -> None:
    for batch in loader(StuckImages(rank)):  # fault: waits_for_its_loader
        dist.all_reduce(batch)


def waits_for_another_process(rank: int, world_size: int) -> None:
    episodes: multiprocessing.Queue = multiprocessing.Queue()
    if rank == 0:
        episodes.get()  # fault: waits_for_another_process
    dist.barrier()


# --- A result that cannot travel ----------------------------------------------------------------------


def returns_a_generator(rank: int, world_size: int):
    losses = [torch.ones(1) for _ in range(3)]
    for loss in losses:
        dist.all_reduce(loss)
    return (loss.item() for loss in losses) if rank == 1 else [loss.item() for loss in losses]


def open_log(path: str) -> object:
    return open(path)  # on the machine that unpickles


class Log:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return open_log, (self.path,)


def returns_what_cannot_be_unpickled(rank: int, world_size: int) -> object:
    dist.barrier()
    return Log("/proc/1/no-such-log") if rank == 1 else None


class Connection:
    def __setstate__(self, state: dict) -> None:
        time.sleep(3600)  # connects again, to a server that is gone

    def __getstate__(self) -> dict:
        return {"host": "metrics"}


def returns_what_unpickles_for_an_hour(rank: int, world_size: int) -> object:
    dist.barrier()
    return Connection() if rank == 1 else None


# --- DDP ----------------------------------------------------------------------------------------------


def ddp_uneven_batches(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    data = TensorDataset(torch.ones((16, 16, 12)[rank], 4))
    for (x,) in DataLoader(data, batch_size=4):
        model(x).sum().backward()  # fault: ddp_uneven_batches


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        hidden = self.body(x)
        return self.head(hidden) + self.extra(hidden) if with_extra else self.head(hidden)


def ddp_unused_parameter(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(TwoHeads())
    for _ in range(2):
        loss = model(torch.ones(2, 4), with_extra=rank != 1).sum()  # fault: ddp_unused_parameter
        loss.backward()


def ddp_skips_backward(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    for step in range(3):
        x = torch.full((2, 4), float("nan") if rank == 1 and step == 1 else 1.0)
        loss = model(x).sum()
        if torch.isfinite(loss):
            loss.backward()  # fault: ddp_skips_backward


def ddp_two_backwards(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    for _ in range(2 if rank == 2 else 1):  # parts of a batch, whose gradients are to be added
        model(torch.ones(2, 4)).sum().backward()  # fault: ddp_two_backwards


def ddp_validates_on_rank_0(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        model(torch.rand(8, 4)).sum().backward()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.rand(8, 4))  # fault: ddp_validates_on_rank_0
    dist.barrier()


def ddp_other_model(rank: int, world_size: int) -> None:
    layers = [nn.Linear(4, 4) for _ in range(3 if rank == 1 else 2)]
    model = DistributedDataParallel(nn.Sequential(*layers))  # fault: ddp_other_model
    model(torch.ones(2, 4)).sum().backward()


def ddp_other_shapes(rank: int, world_size: int) -> None:
    classes = 11 if rank == 2 else 10  # as many as this rank's shard of the data holds
    model = DistributedDataParallel(nn.Linear(4, classes))  # fault: ddp_other_shapes
    model(torch.ones(2, 4)).sum().backward()


# --- Nothing is wrong -----------------------------------------------------------------------------------


def slow_but_in_time(rank: int, world_size: int) -> float:
    if rank == 1:
        time.sleep(3)  # a first batch takes its time; the others wait, and the limit is twice that
    loss = torch.tensor(float(rank))
    dist.all_reduce(loss)
    return loss.item()


def slow_while_nobody_waits(rank: int, world_size: int) -> float:
    time.sleep(3)  # longer than a collective may wait, but no rank is in one
    loss = torch.tensor(float(rank))
    dist.all_reduce(loss)
    return loss.item()


def all_recover_together(rank: int, world_size: int) -> float:
    total = 0.0
    for step in range(3):
        try:
            value = 1 / (step - 1) + rank
        except ZeroDivisionError:
            value = 0.0
        tensor = torch.tensor(value)
        dist.all_reduce(tensor)
        total += tensor.item()
    return total
