"""Is the bucketed replica held to its limit, and a replica that averages nothing refused?"""

import pytest
from torch import nn

from benchmarks import ddp


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)


def planted():
    rows = {row.key: row for row in ddp.COMPARISON.rows(2)}
    ddp.COMPARISON.fill(rows, "wide", [dict.fromkeys(ddp.WAYS, [2.0, 4.0]) | {"bucketed": [2.0, 5.0]}])
    return list(rows.values())


def test_the_limit_is_for_the_median_of_the_bucketed_replica_and_what_was_not_measured_is_neither():
    verdicts = {target.what: (target.measured, target.holds) for target in ddp.targets(planted())}
    assert verdicts["BucketedDDP / torch's DDP, wide, 2 ranks"] == (pytest.approx(1.125), False)
    assert verdicts["BucketedDDP / torch's DDP, deep, 2 ranks"] == (None, None)


def test_a_replica_with_other_parameters_is_refused():
    one, other = (Wrapped() for _ in range(2))
    other.load_state_dict(one.state_dict())
    ddp.refuse_other_parameters(0, "naive", one, other)
    other.module.bias.data[1] += 0.5
    with pytest.raises(RuntimeError, match=r"rank 1: naive has another bias than torch's DDP, off by 0.5"):
        ddp.refuse_other_parameters(1, "naive", one, other)
