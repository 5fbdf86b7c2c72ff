"""What goes wrong inside the training loop?

DDP hides its collectives in forward and backward. So a loop that is longer on one rank, a layer that one rank's
batch does not use, and a rank that is merely slow all reach the other ranks as waiting.

Read next: `meeting.py`, for jobs that do not even begin.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, watch
from ddp_course.diagnose.straggler import find_straggler
from ddp_course.launcher.interception import mark, recorded


def slow_one_rank_down() -> Diagnosis:
    def train(rank, world_size):
        begin = mark()
        for _ in range(10):
            time.sleep(0.06 if rank == 2 else 0.02)  # the batch; rank 2 reads from a slower disk
            dist.all_reduce(torch.ones(1000))
        return recorded(begin)

    return watch(train, world_size=3, check=find_straggler)


def even_out_the_work() -> Diagnosis:
    def train(rank, world_size):
        begin = mark()
        for _ in range(10):
            time.sleep(0.04)
            dist.all_reduce(torch.ones(1000))
        return recorded(begin)

    return watch(train, world_size=3, check=find_straggler)


class TwoHeads(nn.Module):
    """A trunk, and a second head that only batches with boxes need."""

    def __init__(self):
        super().__init__()
        self.trunk, self.labels, self.boxes = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, with_boxes: bool) -> torch.Tensor:
        features = self.trunk(x)
        loss = self.labels(features).sum()
        return loss + self.boxes(features).sum() if with_boxes else loss


def leave_a_layer_unused() -> Diagnosis:
    def train(rank, world_size):
        model = DDP(TwoHeads())
        boxes = rank != 1  # there are none in rank 1's batches
        for _ in range(2):
            model(torch.ones(8, 4), with_boxes=boxes).backward()

    return watch(train, world_size=2)


def look_for_unused_layers() -> Diagnosis:
    def train(rank, world_size):
        model = DDP(TwoHeads(), find_unused_parameters=True)
        boxes = rank != 1
        for _ in range(2):
            model(torch.ones(8, 4), with_boxes=boxes).backward()

    return watch(train, world_size=2)


def run_out_of_batches() -> Diagnosis:
    def train(rank, world_size):
        model = DDP(nn.Linear(4, 1))
        batches = [torch.ones(8, 4)] * (3 if rank == 1 else 5)
        for batch in batches:
            model(batch).sum().backward()

    return watch(train, world_size=3)


def join_the_others() -> Diagnosis:
    def train(rank, world_size):
        model = DDP(nn.Linear(4, 1))
        batches = [torch.ones(8, 4)] * (3 if rank == 1 else 5)
        with Join([model]):  # who is done answers the others' collectives until all are
            for batch in batches:
                model(batch).sum().backward()

    return watch(train, world_size=3)


FAULTS = (
    Fault(
        name="straggler",
        title="One rank is slow, so all are",
        symptom="Nothing fails. All ranks show the same, poor, throughput, and most GPUs are idle between steps.",
        cause="Each step ends with a collective, so each step takes as long as its slowest rank: a slow disk, a hot "
        "GPU, a shard of long samples, a neighbour on the machine.",
        cure="Find who comes last to the collectives; step times do not show it, for they are equal. Then even out the "
        "work, fix that machine, or replace it.",
        met_at="https://github.com/horovod/horovod/issues/867",
        provoke=slow_one_rank_down,
        fix=even_out_the_work,
    ),
    Fault(
        name="unused-parameters",
        title="A layer takes no part in the loss",
        symptom="The first step works, the second raises 'Expected to have finished reduction in the prior iteration'; "
        "or the other ranks hang in backward.",
        cause="DDP averages a bucket when all its gradients are there. A layer that a batch does not use gets none, so "
        "its bucket never leaves this rank.",
        cure="Use every parameter in every forward pass, add the unused output times zero, freeze what is not trained, "
        "or pay for DDP(model, find_unused_parameters=True), which walks the graph in every step.",
        met_at="https://github.com/pytorch/pytorch/issues/43259",
        provoke=leave_a_layer_unused,
        fix=look_for_unused_layers,
    ),
    Fault(
        name="uneven-inputs",
        title="One rank has fewer batches than the others",
        symptom="The hang comes near the end of the epoch, in backward. One rank has already left the loop.",
        cause="The shards have different lengths: files handed out by hand, samples that were filtered, an iterable "
        "dataset. Each batch means collectives, so the rank that is done is missed in the next ones.",
        cure="Shards of one length (DistributedSampler pads or drops), or torch's Join, in which a rank that is done "
        "answers the others' collectives.",
        met_at="https://github.com/pytorch/pytorch/issues/38174",
        provoke=run_out_of_batches,
        fix=join_the_others,
    ),
)
