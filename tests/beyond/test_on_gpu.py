"""Do the strategies train on GPUs, over NCCL, what one process trains?"""

from __future__ import annotations

import pytest

from ddp_course import launch
from ddp_course.groups import choose_backend
from tests.beyond.strategies_on_ranks import alone, off_by, trained

WAYS = [
    ("sharded_optimizer", {"by": "course"}),
    ("sharded_optimizer", {"by": "torch"}),
    ("fully_sharded", {}),
    ("tensor_parallel", {"by": "course"}),
    ("tensor_parallel", {"by": "torch"}),
    ("pipeline", {"schedule": "gpipe"}),
    ("pipeline", {"schedule": "1f1b"}),
    ("pipeline", {"by": "torch"}),
]


@pytest.mark.gpu
@pytest.mark.skipif(
    choose_backend(2) != "nccl", reason="needs two GPUs; or one, NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1"
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "options"), WAYS)
def test_training_over_nccl_is_that_of_one_process(strategy, options):
    expected = alone()
    for one in launch(trained, 2, args=(strategy, options), backend="nccl", timeout_s=60, quiet=True):
        assert off_by(one, expected) < 1e-9
