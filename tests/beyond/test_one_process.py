"""Is the run that all others are compared with the one it should be, and do they repeat it on a single rank too?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_course import launch
from ddp_course.beyond import fully_sharded, one_process, pipeline, sharded_optimizer
from ddp_course.beyond.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.beyond.strategies_on_ranks import TOLERANCE, alone, network, off_by, rows, trained
from tests.refusals import message_of

STRATEGIES = ("sharded_optimizer", "fully_sharded", "tensor_parallel", "pipeline")


def test_one_process_trains_a_copy_and_counts_its_bytes():
    model = network()
    found = one_process.train_steps(model, *rows(), steps=3)
    n_bytes, tensors = sum(p.nbytes for p in model.parameters()), len(list(model.parameters()))
    assert found.held == {"parameters": n_bytes, "gradients": n_bytes, "state": 2 * n_bytes + 4 * tensors}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), network().parameters(), strict=True))
    assert list(found.losses) == sorted(found.losses, reverse=True)


def test_shares_of_rows():
    x = torch.arange(6)
    assert torch.cat([one_process.my_rows(x, rank, 3) for rank in range(3)]).equal(x)
    with pytest.raises(ValueError, match="rank 1: 6 rows cannot be shared equally by 4 ranks"):
        one_process.my_rows(x, 1, 4)


def complaints(rank: int, world_size: int) -> list[str]:
    return [
        message_of(lambda: fully_sharded.train_steps(rank, world_size, network(), *rows(25))),
        message_of(lambda: sharded_optimizer.train_steps(rank, world_size, network(), *rows(25))),
        message_of(lambda: pipeline.train_steps(rank, world_size, network(), *rows(24), micro_batches=7)),
        message_of(lambda: ColumnParallelLinear(nn.Linear(12, 5))),
        message_of(lambda: RowParallelLinear(nn.Linear(7, 12))),
    ]


@pytest.mark.timeout(60)
def test_what_cannot_be_shared_is_refused(ranks):
    found = ranks.run(complaints)
    shared = f"cannot be shared equally by {len(found)} ranks"
    for rank, said in enumerate(found):
        expected = [f"25 rows {shared}"] * 2 + ["24 rows cannot be cut into 7 equal micro-batches"]
        expected += [f"5 output features {shared}", f"7 input features {shared}"]
        for sentence, start in zip(said, expected, strict=True):
            assert sentence.startswith(f"ValueError: rank {rank}: {start}")


def every_strategy(rank: int, world_size: int) -> dict[str, one_process.Trained]:
    return {name: trained(rank, world_size, name, {}) for name in STRATEGIES}


@pytest.mark.timeout(120)
def test_a_single_rank_is_one_process():
    expected = alone()
    (found,) = launch(every_strategy, 1, start_method="forkserver", timeout_s=30, quiet=True)
    for name, one in found.items():
        assert off_by(one, expected) < TOLERANCE, name
        assert one.held == expected.held, name
