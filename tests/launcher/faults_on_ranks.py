"""What does the launcher say when a rank fails by itself, before it sends anything wrong?

Programs with one bug each, as people write them. A rank raises, dies, hangs outside every collective, returns a
value that cannot travel, or trains with DDP on its own terms. The line that a good report shows ends in
`# fault:` and the function's name; a function without that mark has no such line. Who is to blame stands in `@fault`,
see `fault_table`; the bugs in what ranks say to each other are in `faults_talking_on_ranks`.
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

from tests.launcher.fault_table import fault

# --- A rank raises ----------------------------------------------------------------------------------


@fault(4, {2}, "mat1 and mat2", code="raised", says=("rank 2 of 4 raised",))
def raises_in_the_middle(rank: int, world_size: int) -> float:
    """Rank 2 alone has a batch of 7 features."""
    features = 7 if rank == 2 else 8
    loss = (torch.ones(4, features) @ torch.ones(8, 1)).sum()  # fault: raises_in_the_middle
    dist.all_reduce(loss)
    return loss.item()


@fault(3, {0, 1, 2}, "KeyError: 'learning_rate'")
def all_raise_the_same(rank: int, world_size: int) -> float:
    """Every rank reads a key that is not set."""
    config = {"lr": 0.1, "steps": 3}
    return config["learning_rate"] / world_size  # fault: all_raise_the_same


class BadSample(Exception):
    def __init__(self, index: int):
        self.index = index

    def __str__(self) -> str:
        return f"sample {self.index} of {self.total} is empty"  # there is no self.total


@fault(2, {1}, "BadSample")
def error_that_cannot_be_printed(rank: int, world_size: int) -> None:
    """The exception's own __str__ raises."""
    if rank == 1:
        raise BadSample(17)  # fault: error_that_cannot_be_printed
    dist.barrier()


class ShapeMismatch(Exception):
    def __init__(self, expected: tuple, found: tuple):
        super().__init__(f"expected {expected}, found {found}")


@fault(3, {0}, r"ShapeMismatch.*expected \(4, 8\)")
def error_that_cannot_be_unpickled(rank: int, world_size: int) -> None:
    """Unpickling the exception calls its constructor with the wrong arguments."""
    if rank == 0:
        raise ShapeMismatch((4, 8), (4, 7))  # fault: error_that_cannot_be_unpickled
    dist.barrier()


@fault(3, {1}, "KeyError: 'label'", says=("caused by KeyError: 'label' RuntimeError: the annotations are damaged",))
def chained_errors(rank: int, world_size: int) -> None:
    """The cause is the missing label, below what was raised."""
    row = {"image": "cat.png"} if rank == 1 else {"image": "cat.png", "label": "3"}
    try:
        label = int(row["label"])
    except KeyError as error:
        raise RuntimeError("the annotations are damaged") from error  # fault: chained_errors
    dist.all_reduce(torch.tensor(label))


@fault(2, {1}, "RuntimeError|MemoryError")
def out_of_memory(rank: int, world_size: int) -> None:
    """Rank 1 asks for 4 petabytes."""
    sequence = 1 << (25 if rank == 1 else 4)
    scores = torch.empty(sequence, sequence)  # fault: out_of_memory
    dist.all_reduce(scores)


@fault(2, {1}, "FileNotFoundError")
def file_missing(rank: int, world_size: int) -> int:
    """Rank 1's shard was never written."""
    here = Path(__file__)
    shard = here.with_name("shard-1.txt") if rank == 1 else here
    text = shard.read_text()  # fault: file_missing
    lines = torch.tensor(len(text.splitlines()))
    dist.all_reduce(lines)
    return lines.item()


@fault(2, {1}, "(?i)cuda")
def no_such_gpu(rank: int, world_size: int) -> None:
    """Rank 1 asks for a GPU that no machine here has."""
    device = "cuda:8" if rank == 1 else "cpu"  # the rank's number on its machine, counted across all machines
    gradients = torch.ones(4).to(device)  # fault: no_such_gpu
    dist.all_reduce(gradients)


@fault(2, {0}, "EOFError|input")
def asks_the_user(rank: int, world_size: int) -> None:
    """Rank 0 asks at a terminal that ranks do not have."""
    if rank == 0 and input("Overwrite the checkpoint? [y/n] ") != "y":  # fault: asks_the_user
        raise SystemExit(1)
    dist.barrier()


@fault(2, {0, 1}, "(?i)twice")
def opens_the_group_twice(rank: int, world_size: int) -> float:
    """The group is open already, on every rank."""
    dist.init_process_group("gloo")  # fault: opens_the_group_twice
    loss = torch.ones(1)
    dist.all_reduce(loss)
    return loss.item()


def flatten(names: list | str) -> list:
    return [leaf for name in names for leaf in flatten(name)]  # fault: recursion_error


@fault(3, {2}, "RecursionError")
def recursion_error(rank: int, world_size: int) -> None:
    """On rank 2 a list holds strings, which nest for ever."""
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


@fault(2, {1}, "IndexError")
def loader_worker_raises(rank: int, world_size: int) -> None:
    """A damaged image in rank 1's loader process."""
    for batch in loader(Images(rank)):
        dist.all_reduce(batch)


# --- A rank dies ------------------------------------------------------------------------------------


class GreedyImages(Images):
    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 5:
            os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does when memory runs out
        return torch.ones(2)


@fault(2, {1}, "DataLoader worker")
def loader_worker_dies(rank: int, world_size: int) -> None:
    """Rank 1's loader process is killed."""
    for batch in loader(GreedyImages(rank)):  # the error comes by a signal: here, or from inside the all_reduce
        dist.all_reduce(batch)


@fault(3, {1}, "SystemExit|sys.exit|exit", code="raised", says=("rank 1 of 3 raised SystemExit",))
def exits_early(rank: int, world_size: int) -> None:
    """Rank 1 leaves its loop by sys.exit()."""
    for step in range(4):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and step == 2:  # this rank's loss is low enough
            sys.exit()  # fault: exits_early


@fault(2, {0}, "SystemExit|quit|exit")
def quits(rank: int, world_size: int) -> None:
    """Rank 0 quits as a script would."""
    if rank == 0:
        print("usage: train.py CONFIG")
        quit()  # fault: quits
    dist.barrier()


@fault(3, {2}, "(?i)exit|died", code="died", says=("rank 2 of 3 died: it ended itself with exit status 0",))
def leaves_by_os_exit(rank: int, world_size: int) -> None:
    """Rank 2 is gone, with status 0 and no message."""
    if rank == 2:
        os._exit(0)
    dist.barrier()


@fault(3, {2}, "SIGKILL", code="died", says=("rank 2 of 3 died: killed by SIGKILL",))
def killed_for_memory(rank: int, world_size: int) -> None:
    """Rank 2 is killed, as when memory runs out."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


@fault(2, {0}, "SIGTERM", code="died", says=("rank 0 of 2 died: killed by SIGTERM",))
def terminated(rank: int, world_size: int) -> None:
    """Rank 0 is ended by a signal, as by a scheduler."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    dist.all_reduce(torch.ones(4))


@fault(2, {1}, "SIGSEGV", code="died", says=("rank 1 of 2 died: killed by SIGSEGV",))
def bad_pointer(rank: int, world_size: int) -> None:
    """Rank 1 reads at address 0."""
    if rank == 1:
        ctypes.string_at(0)  # fault: bad_pointer
    dist.all_reduce(torch.ones(4))


@fault(3, {1}, "SIGABRT")
def aborts(rank: int, world_size: int) -> None:
    """Rank 1 aborts, as C++ does on an uncaught exception."""
    if rank == 1:
        os.abort()  # fault: aborts
    dist.barrier()


def depth(node: list) -> int:
    return 1 + max(map(depth, node), default=0)  # fault: recursion_to_death


@fault(2, {1}, "SIGSEGV|RecursionError")
def recursion_to_death(rank: int, world_size: int) -> None:
    """Rank 1's recursion is deeper than its stack."""
    node: list = []
    if rank == 1:
        node.append(node)  # a tree that contains itself
        sys.setrecursionlimit(10**7)
    levels = torch.tensor(depth(node))
    dist.all_reduce(levels)


# --- A rank hangs outside every collective ------------------------------------------------------------


@fault(3, {1}, "all_reduce")
def threads_deadlock(rank: int, world_size: int) -> None:
    """Two threads of rank 1 take two locks in opposite order."""
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


@fault(3, {0}, "barrier", code="absent", says=("rank 0 never entered barrier #1; the others waited 2 s",))
def loops_for_ever(rank: int, world_size: int) -> None:
    """Rank 0 steps over the number that would end its loop."""
    step = 0
    while rank == 0 and step != 10:  # fault: loops_for_ever
        step += 3
    dist.barrier()


@fault(2, {1}, "all_reduce", code="absent", says=("rank 1 did not answer",))
def pattern_that_backtracks(rank: int, world_size: int) -> None:
    """Rank 1 is in C and never gives up the GIL."""
    line = "a" * 60 + ("!" if rank == 1 else "")
    found = re.fullmatch(r"(a+)+", line)  # fault: pattern_that_backtracks
    dist.all_reduce(torch.tensor(found is not None).int())


@fault(3, {1}, "all_reduce")
def sleeps(rank: int, world_size: int) -> None:
    """Rank 1 sleeps for an hour."""
    if rank == 1:
        time.sleep(3600)  # fault: sleeps
    dist.all_reduce(torch.ones(4))


@fault(3, {2}, "all_reduce")
def waits_for_its_queue(rank: int, world_size: int) -> None:
    """Nothing fills rank 2's queue a second time."""
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


@fault(2, {1}, "all_reduce")
def waits_for_its_loader(rank: int, world_size: int) -> None:
    """A loader process of rank 1 never answers."""
    for batch in loader(StuckImages(rank)):  # fault: waits_for_its_loader
        dist.all_reduce(batch)


@fault(3, {0}, "barrier")
def waits_for_another_process(rank: int, world_size: int) -> None:
    """Rank 0 waits for a process that was never started."""
    episodes: multiprocessing.Queue = multiprocessing.Queue()
    if rank == 0:
        episodes.get()  # fault: waits_for_another_process
    dist.barrier()


# --- A result that cannot travel ----------------------------------------------------------------------


@fault(2, {1}, "(?i)generator", code="result", says=("returned a generator that cannot travel",))
def returns_a_generator(rank: int, world_size: int):
    """A generator cannot be pickled."""
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


@fault(2, {1}, "(?i)result|pickl|travel", code="result", says=("FileNotFoundError",))
def returns_what_cannot_be_unpickled(rank: int, world_size: int) -> object:
    """The result opens, where it is unpickled, a file that is not there."""
    dist.barrier()
    return Log("/proc/1/no-such-log") if rank == 1 else None


class Connection:
    def __setstate__(self, state: dict) -> None:
        time.sleep(3600)  # connects again, to a server that is gone

    def __getstate__(self) -> dict:
        return {"host": "metrics"}


@fault(2, {1}, "(?i)result|Connection")
def returns_what_unpickles_for_an_hour(rank: int, world_size: int) -> object:
    """The result sleeps while the launcher unpickles it."""
    dist.barrier()
    return Connection() if rank == 1 else None


# --- DDP ----------------------------------------------------------------------------------------------


@fault(3, {2}, "all_reduce|backward")
def ddp_uneven_batches(rank: int, world_size: int) -> None:
    """Rank 2 has three batches, the rest have four."""
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


@fault(2, {1}, "(?i)unused|reduction")
def ddp_unused_parameter(rank: int, world_size: int) -> None:
    """Rank 1 leaves one head out of its loss."""
    model = DistributedDataParallel(TwoHeads())
    for _ in range(2):
        loss = model(torch.ones(2, 4), with_extra=rank != 1).sum()  # fault: ddp_unused_parameter
        loss.backward()


@fault(2, {1}, "all_reduce|backward")
def ddp_skips_backward(rank: int, world_size: int) -> None:
    """Rank 1 skips one backward, after a loss of NaN."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    for step in range(3):
        x = torch.full((2, 4), float("nan") if rank == 1 and step == 1 else 1.0)
        loss = model(x).sum()
        if torch.isfinite(loss):
            loss.backward()  # fault: ddp_skips_backward


@fault(3, {2}, "all_reduce|backward")
def ddp_two_backwards(rank: int, world_size: int) -> None:
    """Rank 2 takes its batch in two parts."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    for _ in range(2 if rank == 2 else 1):  # parts of a batch, whose gradients are to be added
        model(torch.ones(2, 4)).sum().backward()  # fault: ddp_two_backwards


@fault(3, {0}, "broadcast")
def ddp_validates_on_rank_0(rank: int, world_size: int) -> None:
    """A forward through DDP broadcasts the buffers, and only rank 0 validates."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        model(torch.rand(8, 4)).sum().backward()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.rand(8, 4))  # fault: ddp_validates_on_rank_0
    dist.barrier()


@fault(3, {1}, "(?i)param")
def ddp_other_model(rank: int, world_size: int) -> None:
    """Rank 1's model has a layer more."""
    layers = [nn.Linear(4, 4) for _ in range(3 if rank == 1 else 2)]
    model = DistributedDataParallel(nn.Sequential(*layers))  # fault: ddp_other_model
    model(torch.ones(2, 4)).sum().backward()


@fault(3, {2}, "(?i)param")
def ddp_other_shapes(rank: int, world_size: int) -> None:
    """Rank 2's model has a class more."""
    classes = 11 if rank == 2 else 10  # as many as this rank's shard of the data holds
    model = DistributedDataParallel(nn.Linear(4, classes))  # fault: ddp_other_shapes
    model(torch.ones(2, 4)).sum().backward()


# --- Nothing is wrong -----------------------------------------------------------------------------------


@fault(2, set(), returns=[1.0, 1.0], timeout_s=6.0)
def slow_but_in_time(rank: int, world_size: int) -> float:
    """Rank 1 is slow, and comes within the limit."""
    if rank == 1:
        time.sleep(3)  # a first batch takes its time; the others wait, and the limit is twice that
    loss = torch.tensor(float(rank))
    dist.all_reduce(loss)
    return loss.item()


@fault(2, set(), returns=[1.0, 1.0])
def slow_while_nobody_waits(rank: int, world_size: int) -> float:
    """Every rank computes for longer than a collective may wait, outside of any."""
    time.sleep(3)  # longer than a collective may wait, but no rank is in one
    loss = torch.tensor(float(rank))
    dist.all_reduce(loss)
    return loss.item()


@fault(3, set(), returns=[6.0, 6.0, 6.0])
def all_recover_together(rank: int, world_size: int) -> float:
    """Every rank catches the same error in the same step, and all stay in step."""
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
