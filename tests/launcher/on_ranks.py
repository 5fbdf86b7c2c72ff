"""Functions that the launch tests run on ranks. Ranks import this file, so it imports little."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.waiting import wait_for


def add_ranks(rank, world_size, start=0.0):
    x = torch.full((3,), start + rank)
    dist.all_reduce(x)
    return x.tolist()


def talk(rank, world_size, lines=2):
    for i in range(lines):
        print(f"line {i} of {rank}")
    os.write(2, f"raw bytes of {rank}\n".encode())


def place(rank, world_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ.get(name) for name in names} | {"up": dist.is_initialized()}


def own_group(rank, world_size):
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def groups_one_after_another(rank, world_size, folder):
    """Groups of some of the ranks, which have other numbers in them, each with calls of its own size."""
    sums = []
    for size, members in enumerate([(0, 1), (0, 1, 2), (1, 2), (0, 1), (0, 1, 2), (0, 2)], start=1):
        if rank in members:
            here = members.index(rank)
            dist.init_process_group("gloo", f"file://{folder}/{size}", rank=here, world_size=len(members))
            total = torch.ones(size)
            dist.all_reduce(total)
            dist.destroy_process_group()
            sums.append(total.sum().item())
    return sums


def threads(rank, world_size):
    return torch.get_num_threads()


def raise_on_one(rank, world_size):
    print("last words of", rank)
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        raise KeyError("missing weight")
    dist.all_reduce(torch.ones(2))


def raise_on_all(rank, world_size):
    raise ValueError(f"same on all {world_size}")


def raise_on_one_in_step(rank, world_size):
    dist.barrier()
    if rank == 1:
        raise ValueError("only me")


def skip_third(rank, world_size):
    x = torch.ones(1000)
    for step in range(4):
        if rank == 2 and step == 2:
            return  # never enters the third
        dist.all_reduce(x)


def loop_forever(rank, world_size):
    while rank == 1:
        pass


def wait_forever(rank, world_size, folder):
    """Say who is here, then wait: rank 0 in a collective, the others in their own code."""
    with open(f"{folder}/{rank}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pid")
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter
    time.sleep(600)


def start_a_child(rank, world_size):
    import subprocess

    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def listening(rank, world_size):
    """Return the addresses on which this rank listens while the group is up and in use."""
    import psutil

    dist.all_reduce(torch.ones(1))
    found = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    return found


def train_ddp(rank, world_size, steps=2):
    """Train a little and return with the DDP model alive, as programs do."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(4, 8) * (rank + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    globals()["kept"] = model  # alive when the interpreter ends
    return [p.sum().item() for p in model.parameters()]


def collectives(rank, world_size):
    """Enter a known list of collectives and return what the recorder says about them."""
    from ddp_course.launcher.interception import mark, recorded

    since = mark()
    dist.all_reduce(torch.ones(10))
    dist.broadcast(torch.ones(2, 3, dtype=torch.float64), 0)
    work = dist.all_reduce(torch.ones(5), async_op=True)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
    work.wait()
    group = dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    return [(c.number, c.op, c.dtype, c.sizes, c.n_bytes, c.group != "") for c in recorded(since)]


def in_flight(rank, world_size):
    """Rank 0 enters a collective without the others and looks at its record meanwhile."""
    from ddp_course.launcher.interception import mark, recorded

    since = mark()
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        before = recorded(since)[-1].finished
    dist.barrier(group=dist.new_group([0, 1]))
    if rank != 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        before = None
    work.wait()
    dist.barrier()
    return before, recorded(since)[0].finished


def what_is_kept(rank, world_size):
    """For each collective: is it noted as finished, and are its tensors gone, before the next one."""
    from ddp_course.launcher.interception import recorded

    found = {}
    for op in (dist.reduce_scatter_tensor, dist.all_gather_into_tensor):
        small, large = torch.ones(2), torch.ones(4)
        op(*((small, large) if op is dist.reduce_scatter_tensor else (large, small)))
        call, patience = recorded()[-1], 500
        while patience and {tensor._use_count() for tensor in (small, large)} != {1}:
            time.sleep(0.01)  # gloo's own thread lets go a moment after the call is complete
            patience -= 1
        found[call.op] = call.finished, patience > 0
    return found


def end_group_after_an_error(rank, world_size, folder):
    """Rank 1 never comes, and ends its group. Whoever loses it does the same; returns what the others are told."""
    dist.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=world_size)
    (Path(folder) / f"connected-{rank}").touch()
    try:
        if rank != 1:
            dist.all_reduce(torch.ones(1000))
        else:  # who ends its group while others still connect to it breaks their init_process_group
            wait_for(lambda: len(list(Path(folder).glob("connected-*"))) == world_size, lambda: True, "all connected")
    except RuntimeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


def slow_but_in_time(rank, world_size, pause_s):
    for _ in range(4):
        if rank == 1:
            time.sleep(pause_s)
        dist.all_reduce(torch.ones(1))
    return rank


def leave_a_group_open(rank, world_size):
    dist.init_process_group("gloo")
    dist.barrier()  # else rank 0 may cut off those that still connect
    if rank == 0:
        dist.destroy_process_group()
    return rank
