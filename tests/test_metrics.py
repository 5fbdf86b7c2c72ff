"""The reduced mean weighs every row alike, however the rows are spread over the ranks."""

import pytest
import torch

from ddp_course import launch
from ddp_course.metrics import mean_over_ranks

pytestmark = pytest.mark.timeout(120)

ROWS = ([1.0, 2.0, 3.0, 10.0], [7.0], [])  # of three ranks


def on_three_ranks(rank: int, world_size: int) -> dict:
    device = torch.device("cpu")
    report = {"mean": mean_over_ranks(sum(ROWS[rank]), len(ROWS[rank]), device)}
    report["of_tensor"] = mean_over_ranks(torch.tensor(float(rank)), 1, device)
    report["large"] = mean_over_ranks(2.0**24 + rank, 1, device)
    try:
        mean_over_ranks(0.0, 0, device)
    except ValueError as error:
        report["nothing"] = str(error)
    return report


@pytest.fixture(scope="module")
def reports() -> list[dict]:
    return launch(on_three_ranks, 3, backend="gloo", start_method="forkserver", quiet=True, limit_s=60)


def test_mean_weighs_rows_and_not_ranks(reports):
    rows = [row for rank in ROWS for row in rank]
    mean_of_means = (4.0 + 7.0) / 2
    assert [report["mean"] for report in reports] == [sum(rows) / len(rows)] * 3 == [4.6] * 3
    assert mean_of_means != 4.6


def test_a_total_may_be_a_tensor(reports):
    assert [report["of_tensor"] for report in reports] == [1.0] * 3


def test_large_sums_keep_their_last_digit(reports):
    assert reports[0]["large"] == 2.0**24 + 1  # float32 has no such number next to 2**24


def test_no_row_at_all_is_an_error_on_every_rank(reports):
    assert all("no rank has a row" in report["nothing"] for report in reports)
