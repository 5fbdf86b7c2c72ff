"""What else do people file about DDP? An old argument, a backward within a backward, rows and means quietly wrong.

The first two stop the program with words that are pasted into search engines every day. The other four say nothing:
each is shown by comparing the ranks with one process that sees everything.

Read next: `silent.py`, more that says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_course.diagnose.faults.fault import Diagnosis, Fault, started, watch
from ddp_course.diagnose.recognise import recognise

# --- Loud ------------------------------------------------------------------------------------------

ASKS = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int)\np.parse_args()\n"
READS = "import os\nprint('local rank', int(os.environ['LOCAL_RANK']))\n"


def _started(module: str, program: str) -> Diagnosis:
    begin = time.monotonic()
    status, [said] = started(program, module=module)
    found = recognise(said) if status else Diagnosis(None, None, said.strip())
    return replace(found, seconds=time.monotonic() - begin)


def start_as_years_ago() -> Diagnosis:
    return _started("torch.distributed.launch", ASKS)


def start_as_today() -> Diagnosis:
    return _started("torch.distributed.run", READS)


class Twice(nn.Module):
    """One layer, used twice, each time recomputed in the backward pass."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return checkpoint(self.layer, once, use_reentrant=self.reentrant)


def _recomputed(reentrant: bool) -> Callable:
    def program(rank, world_size):
        replica = DistributedDataParallel(Twice(reentrant), find_unused_parameters=True)
        replica(torch.ones(2, 4, requires_grad=True)).sum().backward()

    return program


def recompute_by_a_backward_of_its_own() -> Diagnosis:
    return watch(_recomputed(True), world_size=2)


def recompute_in_the_same_backward() -> Diagnosis:
    return watch(_recomputed(False), world_size=2)


# --- Silent ----------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """The numbers 0 to 15; `part` picks those of one rank and one worker."""

    def __init__(self, part: Callable[[], tuple[int, int]]):
        self.part = part

    def __iter__(self):
        first, step = self.part()
        return iter(range(first, 16, step))


def _streamed(own: bool) -> Callable:
    def program(rank, world_size):
        def part():
            worker = get_worker_info()
            index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
            return (rank * workers + index, world_size * workers) if own else (0, 1)

        return [row for batch in DataLoader(Stream(part), batch_size=4) for row in batch.tolist()]

    return program


def _each_row_once(rows: list[list[int]]) -> Diagnosis:
    drawn = [row for own in rows for row in own]
    said = f"{len(rows)} ranks drew {len(drawn)} rows, {len(set(drawn))} of them different"
    return Diagnosis("iterable-duplicates" if len(set(drawn)) < len(drawn) else None, None, said)


def read_the_whole_stream() -> Diagnosis:
    return watch(_streamed(False), world_size=2, check=_each_row_once)


def read_ones_part_of_the_stream() -> Diagnosis:
    return watch(_streamed(True), world_size=2, check=_each_row_once)


def _augmented(seed: Callable[[int], int]) -> Callable:
    def program(rank, world_size):
        np.random.seed(seed(rank))  # numpy's own generator, which torch.manual_seed does not touch
        return [round(float(np.random.uniform(-1, 1)), 6) for _ in range(4)]

    return program


def _draw_differently(shifts: list[list[float]]) -> Diagnosis:
    same = shifts[0] == shifts[1]
    said = f"the ranks shift their first pictures by {shifts[0][0]} and {shifts[1][0]}"
    return Diagnosis("same-augmentation" if same else None, None, said)


def seed_all_ranks_alike() -> Diagnosis:
    return watch(_augmented(lambda rank: 0), world_size=2, check=_draw_differently)


def seed_each_rank_by_its_number() -> Diagnosis:
    return watch(_augmented(lambda rank: 1000 + rank), world_size=2, check=_draw_differently)


def contrast(picture_ND: torch.Tensor, text_ND: torch.Tensor) -> torch.Tensor:
    """Return how badly each picture finds its own text among all, by dot products."""
    return F.cross_entropy(picture_ND @ text_ND.T, torch.arange(len(text_ND)))


def _contrasted(gather: Callable) -> Callable:
    def program(rank, world_size):
        generator = torch.Generator().manual_seed(0)
        x_ND = torch.randn(2 * world_size, 3, generator=generator)
        weight = torch.eye(3, requires_grad=True)
        mine_ND = x_ND[2 * rank : 2 * rank + 2] @ weight
        all_ND = torch.cat(gather(mine_ND))
        contrast(all_ND, all_ND).backward()
        dist.all_reduce(weight.grad)
        weight.grad /= world_size  # as DistributedDataParallel does
        alone = torch.eye(3, requires_grad=True)
        contrast(x_ND @ alone, x_ND @ alone).backward()
        return (weight.grad.norm() / alone.grad.norm()).item()

    return program


def _as_one_process(ratios: list[float]) -> Diagnosis:
    said = f"the gradient is {ratios[0]:.2f} times that of one process on all rows"
    return Diagnosis(None if abs(ratios[0] - 1) < 1e-4 else "all-gather-gradient", None, said)


def _gathered_as_numbers(own_ND: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(own_ND) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own_ND.detach())
    parts[dist.get_rank()] = own_ND  # this rank's part alone has a history
    return parts


def gather_numbers_without_history() -> Diagnosis:
    return watch(_contrasted(_gathered_as_numbers), world_size=2, check=_as_one_process)


def gather_with_history() -> Diagnosis:
    return watch(_contrasted(all_gather), world_size=2, check=_as_one_process)


LENGTHS = ((5, 1), (3, 3))  # words of the two sentences that each of two ranks has, one in each micro-batch


def _accumulated(by_words: bool) -> Callable:
    def program(rank, world_size):
        losses = [[float(10 * r + i + 1) for i in range(2)] for r in range(world_size)]  # of one word of each sentence
        weight = torch.ones((), requires_grad=True)
        words = torch.tensor(float(sum(LENGTHS[rank])))
        dist.all_reduce(words)
        for loss, length in zip(losses[rank], LENGTHS[rank], strict=True):
            total = weight * loss * length
            (total * world_size / words if by_words else total / length / 2).backward()
        dist.all_reduce(weight.grad)
        whole = sum(
            own * n for row, lengths in zip(losses, LENGTHS, strict=True) for own, n in zip(row, lengths, strict=True)
        )
        return [weight.grad.item() / world_size, whole / words.item()]

    return program


def _each_word_counts_once(found: list[list[float]]) -> Diagnosis:
    own, whole = found[0]
    said = f"the gradient is {own:.3f}, and {whole:.3f} where each word counts once"
    return Diagnosis(None if abs(own - whole) < 1e-4 else "padded-accumulation", None, said)


def let_each_micro_batch_count_once() -> Diagnosis:
    return watch(_accumulated(False), world_size=2, check=_each_word_counts_once)


def let_each_word_count_once() -> Diagnosis:
    return watch(_accumulated(True), world_size=2, check=_each_word_counts_once)


FAULTS = (
    Fault(
        name="local-rank-argument",
        title="An older program wants --local_rank",
        symptom='"unrecognized arguments: --local-rank=0", or a local rank that is always None.',
        cause="torch.distributed.launch passes the local rank as an argument, and since torch 2.0 it spells it "
        "--local-rank. torchrun passes none.",
        cure='Start it by torchrun, and read int(os.environ["LOCAL_RANK"]).',
        met_at="https://github.com/huggingface/pytorch-image-models/issues/1724",
        provoke=start_as_years_ago,
        fix=start_as_today,
    ),
    Fault(
        name="marked-ready-twice",
        title="A parameter has its gradient twice in one backward pass",
        symptom='"Expected to mark a variable ready only once", on every rank.',
        cause="Reentrant checkpointing runs a backward pass of its own for each use of a layer. DDP, which looks for "
        "unused parameters, takes the first gradient for the whole; then a second comes.",
        cure="checkpoint(…, use_reentrant=False); or static_graph=True, with which DDP counts first.",
        met_at="https://github.com/microsoft/FocalNet/issues/4",
        provoke=recompute_by_a_backward_of_its_own,
        fix=recompute_in_the_same_backward,
    ),
    Fault(
        name="iterable-duplicates",
        title="A stream gives every rank the same rows",
        symptom="With W ranks an epoch takes as long as with one, and the loss falls as usual.",
        cause="An IterableDataset has no sampler. Each rank, and each worker of a rank, begins at the first row.",
        cure="Yield rows rank · workers + worker, and then every (world_size · workers)-th.",
        met_at="https://github.com/huggingface/datasets/issues/5360",
        provoke=read_the_whole_stream,
        fix=read_ones_part_of_the_stream,
    ),
    Fault(
        name="same-augmentation",
        title="All ranks draw the same random numbers",
        symptom="None. The network sees less variety than it seems to.",
        cause="Every rank sets numpy's generator to one seed, so the n-th picture of each rank is shifted alike.",
        cure="Seed with 1000 * seed + rank (seed + rank meets itself in other runs: lesson 19), and workers by "
        "worker_init_fn from torch.initial_seed().",
        met_at="https://github.com/huggingface/transformers/issues/37932",
        provoke=seed_all_ranks_alike,
        fix=seed_each_rank_by_its_number,
    ),
    Fault(
        name="all-gather-gradient",
        title="The gradient ends at all_gather",
        symptom="None. A contrastive loss falls more slowly with more ranks.",
        cause="dist.all_gather returns numbers without a history, so each rank's loss reaches its own rows only. Where "
        "every rank takes the loss of all rows, the mean over W ranks is 1/W of the gradient.",
        cure="torch.distributed.nn.functional.all_gather, whose backward sends each rank its part. Newer torch "
        "calls it deprecated and names torch.distributed._functional_collectives.all_gather_single.",
        met_at="https://github.com/huggingface/accelerate/issues/1154",
        provoke=gather_numbers_without_history,
        fix=gather_with_history,
    ),
    Fault(
        name="padded-accumulation",
        title="Short sentences count more than long ones",
        symptom="The loss differs a little from that of one large batch, and nobody knows why.",
        cause="Each micro-batch is divided by its own number of words, and each rank's mean counts the same, "
        "whatever padding they hold.",
        cure="Divide sums by the number of words of the whole global batch, which one all_reduce counts.",
        met_at="https://github.com/huggingface/transformers/issues/34191",
        provoke=let_each_micro_batch_count_once,
        fix=let_each_word_count_once,
    ),
)
