"""What makes W ranks slower or less good than they should be, though every number is right?

Three settings that were right for one process are not for several: as many threads as there are cores, BatchNorm over
the rows at hand, and the learning rate. None of them is an error, so nothing says so.

A larger batch with the same rate is not wrong in itself. W ranks with the same local batch do exactly what one process
does on a batch W times as large: `rates_compared` shows it, to the last digits. But that is another training than the
one whose rate was found good, with 1/W of its steps.

Read next: `training_checks.py`, the tool that tells all of this apart.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.diagnose.faults.fault import Diagnosis, Fault
from ddp_course.diagnose.faults.tiny_training import (
    LOCAL_BATCH,
    REFERENCE,
    healthy,
    made_up_rows,
    train,
    watch_training,
)
from ddp_course.groups import usable_cores


def take_all_cores_on_every_rank() -> Diagnosis:
    def threads(world_size):
        torch.set_num_threads(max(2, usable_cores()))  # what torch does by itself in a process alone

    return watch_training(partial(train, threads=threads))


def normalise_by_own_rows() -> Diagnosis:
    def synchronise(model):
        return model  # nn.BatchNorm1d as it was built

    return watch_training(partial(train, synchronise=synchronise))


def keep_the_rate() -> Diagnosis:
    def program(rank, world_size, folder):
        return train(rank, world_size, folder, rate=lambda world_size: REFERENCE.lr)

    return watch_training(program, world_size=4, harm=what_the_rates_did)


X_NF, LABEL_N = made_up_rows(256, seed=3).tensors  # divisible by every global batch here, so no step is shorter


def rates_compared(rank: int, world_size: int) -> dict[str, float]:
    """Train one small network in four ways for an epoch, on the same rows from the same first weights.

    Returns:
        The loss over all rows, by name. "reference" is one process with the local batch and the reference's rate;
        "ranks", all ranks with that local batch and that rate; "one process", the same on the global batch; "scaled",
        all ranks with W times the rate. And "difference", the largest between a weight of "ranks" and of "one process".
    Collective: DDP's, in two trainings; the other two are each rank's own.
    """
    global_batch, lr = LOCAL_BATCH * world_size, REFERENCE.lr
    reference, whole = (_trained(0, 1, batch, lr) for batch in (LOCAL_BATCH, global_batch))
    ranks, scaled = (_trained(rank, world_size, global_batch, rate) for rate in (lr, lr * world_size))
    pairs = zip(ranks.parameters(), whole.parameters(), strict=True)
    named = {"reference": reference, "ranks": ranks, "one process": whole, "scaled": scaled}
    losses = {name: F.cross_entropy(model(X_NF.double()), LABEL_N).item() for name, model in named.items()}
    return {**losses, "difference": max((a - b).abs().max().item() for a, b in pairs)}


def _trained(rank: int, world_size: int, global_batch: int, lr: float) -> nn.Module:
    """Train the network of one seed for an epoch, on this rank's every W-th row of each global batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    replica = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for start in range(0, len(LABEL_N), global_batch):
        mine = slice(start + rank, start + global_batch, world_size)
        optimizer.zero_grad()
        F.cross_entropy(replica(X_NF[mine].double()), LABEL_N[mine]).backward()
        optimizer.step()
    return model


def what_the_rates_did(rank: int, world_size: int, folder: Path) -> str:
    """Say what one epoch came to in each way.

    Collective: see `rates_compared`.
    """
    loss = rates_compared(rank, world_size)
    return (
        f"Loss after one epoch: {loss['reference']:.3f} by the reference, {loss['ranks']:.3f} by {world_size} ranks "
        f"with its rate, the same {loss['one process']:.3f} by one process on their global batch, and "
        f"{loss['scaled']:.3f} by {world_size} ranks with {world_size} times the rate."
    )


FAULTS = (
    Fault(
        name="too-many-threads",
        title="Every rank takes all cores",
        symptom="Two ranks on one host are slower than one. All cores are busy, and much of it is waiting.",
        cause="torch computes with one thread for each core. W ranks on a host then have W times as many threads as "
        "there are cores, and the threads of an operation wait for the one that was put aside.",
        cure="torch.set_num_threads(cores // ranks on this host), or OMP_NUM_THREADS before the ranks start. torchrun "
        "sets it to 1 when nobody has.",
        met_at="https://github.com/pytorch/pytorch/issues/22260",
        provoke=take_all_cores_on_every_rank,
        fix=healthy("threads"),
    ),
    Fault(
        name="batchnorm-drift",
        title="BatchNorm follows each rank's own rows",
        symptom="The ranks disagree about the accuracy of what should be one model, and it is lower with small local "
        "batches.",
        cause="A plain BatchNorm takes mean and variance of the local batch. DDP copies rank 0's running statistics to "
        "all before each forward pass, so the file holds those of 1/W of the rows, and after the last step each rank "
        "has its own.",
        cure="Convert the model to SyncBatchNorm before DDP wraps it. Where local batches are large, plain BatchNorm "
        "may stay: then share the statistics before evaluating.",
        met_at="https://github.com/pytorch/pytorch/issues/13711",
        provoke=normalise_by_own_rows,
        fix=healthy("synchronise"),
    ),
    Fault(
        name="lr-not-scaled",
        title="More ranks, the same learning rate",
        symptom="Each epoch is faster, and learns less: after as many epochs the loss is higher than one process had.",
        cause="With the same local batch, W ranks have W times the global batch and take 1/W of the steps. The "
        "averaged gradient is not larger, only less noisy. At the same rate the weights come about 1/W as far.",
        cure="As a rule of thumb W times the rate, for SGD, with a warm-up, and not without end: from some batch on it "
        "fails, and for Adam many take the square root. Or keep the global batch. Either way compare with the "
        "reference.",
        met_at="https://github.com/Lightning-AI/pytorch-lightning/issues/3706",
        provoke=keep_the_rate,
        fix=healthy("rate", world_size=4, harm=what_the_rates_did),
    ),
)
