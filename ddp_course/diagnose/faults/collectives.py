"""What happens when ranks do not call the same collectives?

A collective is a promise among ranks: each makes the same call, in the same order, with the same shape. The
ranks do not check it. Whoever keeps the promise waits for whoever broke it, until the time limit, and what the
waiting rank then says is only that time is up. Three ways of breaking it follow.

Left out on purpose: branches on the rank, the usual reason for all three; `branches.py` has them.
Read next: `branches.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, watch


def skip_a_collective() -> Diagnosis:
    def train(rank, world_size):
        gradient = torch.ones(1000)
        for step in range(4):
            if rank == 1 and step == 2:
                continue  # a bad batch: there is nothing to average
            dist.all_reduce(gradient)

    return watch(train, world_size=3)


def join_every_collective() -> Diagnosis:
    def train(rank, world_size):
        gradient = torch.ones(1000)
        for step in range(4):
            if rank == 1 and step == 2:
                gradient.zero_()  # a bad batch adds nothing, but this rank still comes
            dist.all_reduce(gradient)

    return watch(train, world_size=3)


def swap_collectives() -> Diagnosis:
    def log(rank, world_size):
        loss, step = torch.ones(1), torch.ones(1)
        calls = [lambda: dist.all_reduce(loss), lambda: dist.broadcast(step, src=0)]
        for call in reversed(calls) if rank == 1 else calls:  # a set or a dict built elsewhere does this unseen
            call()

    return watch(log, world_size=3)


def keep_the_order() -> Diagnosis:
    def log(rank, world_size):
        loss, step = torch.ones(1), torch.ones(1)
        dist.all_reduce(loss)
        dist.broadcast(step, src=0)

    return watch(log, world_size=3)


def bring_another_shape() -> Diagnosis:
    def gather_losses(rank, world_size):
        losses = torch.ones(3 if rank == 1 else 4)  # the last shard is one batch shorter
        dist.all_reduce(losses)

    return watch(gather_losses, world_size=3)


def bring_one_shape() -> Diagnosis:
    def gather_losses(rank, world_size):
        losses = torch.ones(3 if rank == 1 else 4)
        total = torch.tensor([losses.sum(), len(losses)])  # sum and count: two numbers, whatever the shard
        dist.all_reduce(total)

    return watch(gather_losses, world_size=3)


FAULTS = (
    Fault(
        name="skipped-collective",
        title="One rank leaves a collective out",
        symptom="Every rank but one stands still, with the CPU or the GPU busy waiting, until the time limit.",
        cause="A `continue`, an early return or an exception that was caught took one rank past a collective. Its next "
        "call was then paired with the others' previous one, so the hang shows later than the mistake.",
        cure="Let every rank make every call: a rank without data brings zeros. Decide together, by a collective, when "
        "something is to be left out.",
        met_at="https://github.com/weecology/DeepForest/issues/1407",
        provoke=skip_a_collective,
        fix=join_every_collective,
    ),
    Fault(
        name="collective-order",
        title="Ranks call the same collectives in another order",
        symptom="All ranks stand still, each in a collective, and each in another one.",
        cause="Collectives are paired by their order, not by their name. Here one rank takes two of them the other way "
        "round, as happens when the order comes from a set, a dict or the files of a folder.",
        cure="Sort whatever decides the order, by a key that is equal on all ranks.",
        met_at="https://github.com/Lightning-AI/pytorch-lightning/issues/19106",
        provoke=swap_collectives,
        fix=keep_the_order,
    ),
    Fault(
        name="collective-shape",
        title="Ranks bring tensors of different shapes",
        symptom="gloo ends one rank's process without a traceback; NCCL hangs, or returns numbers that mix the two.",
        cause="One rank's tensor has another size, most often because its shard, its vocabulary or its model differs.",
        cure="Bring a shape that cannot depend on the shard: sum and count instead of a list, or padding and a mask, "
        "or exchange the sizes first.",
        met_at="https://github.com/pytorch/pytorch/issues/78022",
        provoke=bring_another_shape,
        fix=bring_one_shape,
    ),
)
