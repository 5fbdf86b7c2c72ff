"""The reduced mean weighs every row alike, however the rows are spread over the ranks."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_course.metrics import SLOTS, MeanMetrics, each_rank, fingerprint, mean_over_ranks

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
ROWS = ([1.0, 2.0, 3.0, 10.0], [7.0], [])  # of three ranks


# --- Without ranks ---------------------------------------------------------------------------------


def reduced(rows_by_rank: list[list[float]]) -> dict[str, float]:
    """What `reduce` returns on rank 0, the messages of the ranks added up here instead of by a collective."""
    messages, world_size = [], len(rows_by_rank)
    for rank, rows in enumerate(rows_by_rank):
        metrics = MeanMetrics("value", "square")
        for row in rows:
            metrics.add(1, value=row, square=torch.tensor([row * row], dtype=torch.float64))
        messages.append(metrics._pack(rank, world_size, CPU))
    return MeanMetrics("value", "square")._unpack(sum(messages).tolist(), 0, world_size)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 5)), min_size=1, max_size=40),
    st.integers(1, 6),
)
def test_any_split_of_the_rows_gives_the_mean_of_all_rows(rows_and_owners, world_size):
    split = [[row for row, owner in rows_and_owners if owner % world_size == rank] for rank in range(world_size)]
    rows = [row for row, _ in rows_and_owners]
    found = reduced(split)
    size = max(map(abs, rows))
    assert found["value"] == pytest.approx(math.fsum(rows) / len(rows), rel=1e-12, abs=1e-12 * size)
    assert found["square"] == pytest.approx(math.fsum(row * row for row in rows) / len(rows), rel=1e-12)


def test_values_may_be_sums_or_rows_and_rows_may_be_a_mask():
    metrics = MeanMetrics("loss", "right")
    metrics.add(3, loss=6.0, right=torch.tensor([True, False, True]))
    mask = torch.tensor([1, 1, 0])
    metrics.add(mask, loss=torch.tensor([1.0, 3.0, 9.0]) * mask)  # a padded batch: 2 rows
    means = metrics._unpack(metrics._pack(0, 1, CPU).tolist(), 0, 1)
    assert means == {"loss": (6 + 1 + 3) / 5, "right": 2 / 3}


def test_small_losses_still_count_when_the_sum_is_large():
    metrics = MeanMetrics("loss")
    metrics.add(1, loss=torch.tensor(2.0**24))
    for _ in range(16):
        metrics.add(1, loss=torch.tensor(1.0))  # in float32, 2**24 + 1 is 2**24
    assert metrics._unpack(metrics._pack(0, 1, CPU).tolist(), 0, 1) == {"loss": (2**24 + 16) / 17}


class Operations(TorchDispatchMode):
    """Writes down which operations reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_adding_never_reads_from_the_device():
    metrics, loss, right_N = MeanMetrics("loss", "right"), torch.tensor(0.5), torch.tensor([True, False, True])
    with Operations() as seen:
        loss.item()
    assert seen.names == ["_local_scalar_dense"]  # on a GPU: wait until it has done all that it was told
    with Operations() as seen:
        for _ in range(2):
            metrics.add(torch.tensor([1, 1, 0]), loss=loss)
            metrics.add(3, right=right_N)
    assert "sum" in seen.names and "_local_scalar_dense" not in seen.names
    assert [total.dtype for total in metrics._sums.values()] == [torch.float64] * 2


def test_adding_keeps_no_graph():
    metrics = MeanMetrics("loss")
    metrics.add(1, loss=torch.ones((), requires_grad=True) * 2)
    assert not metrics._sums["loss"].requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that can be waited for")
def test_adding_does_not_wait_for_the_gpu():
    metrics, values = MeanMetrics("loss"), torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.add(4, loss=values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_names_are_checked_where_they_are_written():
    for names in ((), ("loss", "loss"), tuple(f"m{i}" for i in range(SLOTS + 1))):
        with pytest.raises(ValueError, match=f"expected 1 to {SLOTS} different names"):
            MeanMetrics(*names)
    with pytest.raises(ValueError, match=r"\['los'\] were not declared; this MeanMetrics has \['loss'\]"):
        MeanMetrics("loss").add(1, los=1.0)


def test_a_fingerprint_tells_lists_apart_and_survives_a_float64():
    prints = [fingerprint(names) for names in (["a", "b"], ["ab"], ["a"], ["b"], ["b", "a"])]
    assert len(set(prints)) == 5
    assert all(int(float(one)) == one for one in prints)


# --- Three ranks -----------------------------------------------------------------------------------


def mean_of_mine(rank: int) -> MeanMetrics:
    metrics = MeanMetrics("loss", "large")
    for row in ROWS[rank]:
        metrics.add(1, loss=row, large=torch.tensor(row > 2))
    return metrics


def on_three_ranks(rank: int, world_size: int) -> dict:
    report = {"mean": mean_over_ranks(sum(ROWS[rank]), len(ROWS[rank]), CPU)}
    report["of_tensor"] = mean_over_ranks(torch.tensor(float(rank)), 1, CPU)
    report["large"] = mean_over_ranks(2.0**24 + rank, 1, CPU)
    try:
        mean_over_ranks(0.0, 0, CPU)
    except ValueError as error:
        report["nothing"] = str(error)

    for key, options in {"all": {}, "to 0": {"dst": 0}, "to 2": {"dst": 2}}.items():
        with warnings.catch_warnings(), CommDebugMode() as talk:
            metrics = mean_of_mine(rank)
            report[key] = metrics.reduce(**options)
        report[f"talk {key}"] = {str(operation): count for operation, count in talk.get_comm_counts().items()}
    metrics.add(1, loss=float(rank), large=0)
    report["again"] = metrics.reduce()
    report["slowest"] = each_rank(0.25 * rank)
    report["disagree"] = disagreements(rank)
    report["nan"] = nan_on_some(rank)
    return report


def disagreements(rank: int) -> dict:
    report = {}
    names = ("loss", "accuracy") if rank != 1 else ("loss", "accurracy", "lr")
    for key, options in {"all": {}, "to 0": {"dst": 0}}.items():
        metrics = MeanMetrics(*names)
        metrics.add(1, loss=1.0)
        try:
            report[key] = metrics.reduce(**options)
        except RuntimeError as error:
            report[key] = str(error)
    order = MeanMetrics(*(("a", "b") if rank else ("b", "a")))
    order.add(1, a=1.0, b=3.0)
    report["other order"] = order.reduce()
    for key, call in {"empty": lambda: MeanMetrics("loss").reduce(), "dst": lambda: order.reduce(dst=3)}.items():
        try:
            call()
        except ValueError as error:
            report[key] = str(error)
    return report


def nan_on_some(rank: int) -> dict:
    metrics = MeanMetrics("fine", "nan", "inf")
    metrics.add(1, fine=float(rank), nan=torch.tensor(float("nan" if rank == 1 else 0)), inf=math.inf if rank else 0.0)
    means = metrics.reduce()
    found = metrics.not_finite
    metrics.add(1, fine=1.0, nan=1.0, inf=1.0)
    metrics.reduce(dst=0)  # the other ranks get no means, and have nothing left of those before
    return {"means": means, "found": found, "later": metrics.not_finite}


@pytest.fixture(scope="module")
def reports(ranks) -> list[dict]:
    return ranks(3).run(on_three_ranks, limit_s=60)


def test_mean_weighs_rows_and_not_ranks(reports):
    assert [report["mean"] for report in reports] == [4.6] * 3  # 23 in 5 rows; the mean of the ranks' means is 5.5
    assert [report["of_tensor"] for report in reports] == [1.0] * 3
    assert reports[0]["large"] == 2.0**24 + 1  # float32 has no such number next to 2**24


def test_no_row_at_all_is_an_error_on_every_rank(reports):
    assert all("no rank has a row" in report["nothing"] for report in reports)
    assert [report["disagree"]["empty"] for report in reports] == [
        "there is no mean of ['loss']: no rank has a row; look at the size of the dataset"
    ] * 3


def test_many_means_come_to_every_rank_or_to_one_by_one_collective(reports):
    means = {"loss": 4.6, "large": 3 / 5}
    assert [report["all"] for report in reports] == [means] * 3
    assert [report["to 0"] for report in reports] == [means, None, None]
    assert [report["to 2"] for report in reports] == [None, None, means]
    for report in reports:
        assert report["talk all"] == {"c10d.allreduce_": 1}
        assert report["talk to 0"] == report["talk to 2"] == {"c10d.reduce_": 1}
        assert report["again"] == {"loss": 1.0, "large": 0.0}  # nothing of the last round is left
        assert report["slowest"] == [0.0, 0.25, 0.5]


def test_other_names_on_one_rank_are_found_and_the_rank_is_named(reports):
    told = [report["disagree"] for report in reports]
    tail = "; declare the same metrics on every rank"
    seen_by_0 = "rank 0: expected every rank to reduce ['accuracy', 'loss'], but other names came from rank 1" + tail
    assert [each["all"] for each in told] == [
        seen_by_0,
        "rank 1: expected every rank to reduce ['accurracy', 'loss', 'lr'], but other names came from rank 0, 2" + tail,
        seen_by_0.replace("rank 0: ", "rank 2: "),
    ]
    assert [each["to 0"] for each in told] == [seen_by_0, None, None]
    assert [each["other order"] for each in told] == [{"a": 1.0, "b": 3.0}] * 3
    assert told[1]["dst"] == "rank 1: dst=3 is not in the group; its ranks are 0 to 2"


def test_a_nan_stays_a_nan_and_the_ranks_that_brought_it_are_named(reports):
    for report in reports:
        means = report["nan"]["means"]
        assert means["fine"] == 1.0 and math.isnan(means["nan"]) and means["inf"] == math.inf
        assert report["nan"]["found"] == {"nan": [1], "inf": [1, 2]}
        assert report["nan"]["later"] == {}
