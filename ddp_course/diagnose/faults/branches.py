"""What goes wrong in an `if rank == 0:`?

Some work is one rank's alone: a line in the log, a file. The trap is a collective inside of it. The other ranks
never take the branch, so rank 0 waits in there alone; or the others' next collective is paired with it, which is
worse. The rule: decide on the rank what is done, never what is called together.

Read next: `loops.py`, where it is not a branch that differs but the length of the loop.
"""

from __future__ import annotations

import io

import torch
import torch.distributed as dist

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, watch


def validate_on_rank_0() -> Diagnosis:
    def validate(model):
        right_of_all = torch.tensor([7.0, 10.0])  # right answers, and answers
        dist.all_reduce(right_of_all)
        return right_of_all

    def train(rank, world_size):
        model = torch.nn.Linear(4, 2)
        if rank == 0:
            validate(model)  # and in there is a collective

    return watch(train, world_size=3)


def validate_on_every_rank() -> Diagnosis:
    def validate(model):
        right_of_all = torch.tensor([7.0, 10.0])
        dist.all_reduce(right_of_all)
        return right_of_all

    def train(rank, world_size):
        model = torch.nn.Linear(4, 2)
        right, answers = validate(model)  # each rank its shard
        if rank == 0:
            print(f"accuracy {right / answers:.0%}")

    return watch(train, world_size=3)


def save_on_rank_0() -> Diagnosis:
    def save(model):
        torch.save(model.state_dict(), io.BytesIO())  # the disk
        # So that nobody reads half a file:
        dist.barrier()

    def train(rank, world_size):
        model = torch.nn.Linear(4, 2)
        if rank == 0:
            save(model)

    return watch(train, world_size=3)


def save_together() -> Diagnosis:
    def save(model, rank):
        if rank == 0:
            torch.save(model.state_dict(), io.BytesIO())
        dist.barrier()

    def train(rank, world_size):
        model = torch.nn.Linear(4, 2)
        save(model, rank)

    return watch(train, world_size=3)


def raise_on_one_rank() -> Diagnosis:
    def train(rank, world_size):
        labels = [3, 1, None if rank == 1 else 4]
        for label in labels:
            if label is None:
                raise ValueError("sample 17 has no label")
            dist.all_reduce(torch.tensor([float(label)]))

    return watch(train, world_size=3)


def look_before_training() -> Diagnosis:
    def train(rank, world_size):
        labels = [3, 1, None if rank == 1 else 4]
        for label in labels:
            weight = 0.0 if label is None else 1.0  # a sample that is left out still has its turn
            dist.all_reduce(torch.tensor([weight * (label or 0), weight]))

    return watch(train, world_size=3)


FAULTS = (
    Fault(
        name="rank0-only-validation",
        title="Only rank 0 validates, and validation talks",
        symptom="Training stops dead at the first validation. Rank 0 is busy, the others wait or have gone on.",
        cause="`if rank == 0: validate(model)` was meant to save work. Inside is a collective: a metric summed over "
        "ranks, SyncBatchNorm, or DDP's forward pass, which broadcasts buffers.",
        cure="Validate on every rank, each its shard, and sum. Or give rank 0 the bare model, replica.module, with no "
        "collective in it, and let the others wait at a barrier after it.",
        met_at="https://github.com/pytorch/pytorch/issues/54059",
        provoke=validate_on_rank_0,
        fix=validate_on_every_rank,
    ),
    Fault(
        name="rank0-only-save",
        title="Only rank 0 saves, and saving has a barrier in it",
        symptom="The checkpoint is written, whole, and then nothing happens any more.",
        cause="The barrier that protects readers stands inside the branch of rank 0, so rank 0 alone comes to it.",
        cure="Call save on every rank. Inside, rank 0 writes, and all meet at the barrier.",
        met_at="https://github.com/alan-turing-institute/autocast/pull/386",
        provoke=save_on_rank_0,
        fix=save_together,
    ),
    Fault(
        name="one-rank-raises",
        title="One rank raises while the others wait for it",
        symptom="All ranks fail. Most of them complain of a closed connection or of a timeout.",
        cause="One rank met an error of its own, such as a broken sample. The others noticed only that it no longer "
        "came, and what they say hides the reason.",
        cure="Read the rank that failed first, for a reason of its own, and fix that. Never catch an exception around "
        "a collective and go on.",
        met_at="https://github.com/Megvii-BaseDetection/YOLOX/issues/702",
        provoke=raise_on_one_rank,
        fix=look_before_training,
    ),
)
