"""What goes wrong, in silence, with the rows that each rank sees and the mean over them?

A rank sees its own rows only. Whether they are also another rank's, whether they come in the same order again, and
whether the mean over all of them is right, no rank can tell by itself. Nothing stops, and the loss falls.

Each program here has one broken part; the rest of the training, and the part that fixes it, are `tiny_training`'s.

Read next: `silent_files.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course.diagnose.faults.fault import Diagnosis, Fault
from ddp_course.diagnose.faults.tiny_training import TEST_ROWS, TRAIN_ROWS, healthy, train, watch_training


def draw_all_rows_on_every_rank() -> Diagnosis:
    def rows(rank, world_size):
        return DataLoader(TRAIN_ROWS, batch_size=16, shuffle=True)

    return watch_training(partial(train, rows=rows))


def never_tell_the_epoch() -> Diagnosis:
    def begin_epoch(loader, epoch):
        pass  # the sampler still believes that this is epoch 0

    return watch_training(partial(train, begin_epoch=begin_epoch))


def pad_the_evaluation() -> Diagnosis:
    def test_rows(rank, world_size):  # 31 rows on 2 ranks: DistributedSampler makes them 32
        return DataLoader(TEST_ROWS, batch_size=8, sampler=DistributedSampler(TEST_ROWS, world_size, rank))

    return watch_training(partial(train, test_rows=test_rows))


def average_the_means() -> Diagnosis:
    def mean(loss_sum, rows):  # the ranks have 16 and 15 rows
        own_mean = torch.tensor(loss_sum / rows, dtype=torch.float64)
        dist.all_reduce(own_mean)
        return own_mean.item() / dist.get_world_size()

    return watch_training(partial(train, mean=mean))


FAULTS = (
    Fault(
        name="missing-sampler",
        title="Every rank trains on all rows",
        symptom="With W ranks an epoch takes as long as with one. The loss falls as usual.",
        cause="The loader has no DistributedSampler, so each rank draws every row. With one seed the ranks even draw "
        "the same batches, and their averaged gradient is the one that each had by itself.",
        cure="Give the loader a DistributedSampler, and leave shuffle out: the sampler shuffles.",
        met_at="https://github.com/innnky/so-vits-svc/issues/70",
        provoke=draw_all_rows_on_every_rank,
        fix=healthy("rows"),
    ),
    Fault(
        name="missing-set-epoch",
        title="Every epoch has the same order",
        symptom="None in the first epoch. Later the loss repeats its bumps at the same steps, and the model may end "
        "a little worse.",
        cause="DistributedSampler shuffles by seed and epoch. It is not told the epoch, so it shuffles as in epoch 0.",
        cure="Call sampler.set_epoch(epoch) before each epoch, on every rank.",
        met_at="https://github.com/pytorch/pytorch/issues/31771",
        provoke=never_tell_the_epoch,
        fix=healthy("begin_epoch"),
    ),
    Fault(
        name="padded-evaluation",
        title="The evaluation counts some rows twice",
        symptom="The accuracy changes a little with the number of ranks, though the model is the same.",
        cause="DistributedSampler makes all shards equally long by repeating rows, or with drop_last by leaving some "
        "out. In training that does no harm; here these rows count double, or not at all.",
        cure="Give each rank an exact shard, also if one is a row longer, and evaluate the bare model: DDP's forward "
        "would wait for a rank that has no batch left.",
        met_at="https://github.com/pytorch/pytorch/issues/25162",
        provoke=pad_the_evaluation,
        fix=healthy("test_rows"),
    ),
    Fault(
        name="mean-of-means",
        title="The loss is the mean of the ranks' means",
        symptom="The reported loss is near the true one, and changes with the number of ranks and the batch size.",
        cause="Each rank, or each batch, counts the same, whether it has many rows or few.",
        cure="Add up sums and counts over the ranks, and divide once, at the end.",
        met_at="https://github.com/pytorch/torchtitan/pull/4167",
        provoke=average_the_means,
        fix=healthy("mean"),
    ),
)
