"""Is each moment counted in its part, and do real ranks of each kind come back with numbers that hang together?"""

import time

import pytest
import torch
from torch import nn

from ddp_course.launcher import RankError
from ddp_course.scaling.cores import core_order, cores_note
from ddp_course.scaling.efficiency import BACKWARD, DATA, EXPOSED, FORWARD, OPTIMIZER, PARTS
from ddp_course.scaling.link import Link
from ddp_course.scaling.measure import LastGradient, Steps, TimedStep, Workload, measure_scaling, summarised

TINY = {"hidden": 16, "batch": 8}
SETTINGS = {"repeats": 2, "steps": 2, "warmup": 1}
LONG_S = 0.05


# --- Where a moment is counted ---------------------------------------------------------------------


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(LONG_S)
        return gradient


class Slow(nn.Module):
    """A layer that takes its time where it is told to; "after": once the last gradient is there, as DDP's waiting."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.layer = where, nn.Linear(3, 2)
        if where == "after":
            self.layer.weight.register_post_accumulate_grad_hook(
                lambda param: torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(LONG_S))
            )

    def forward(self, x):
        if self.where == "forward":
            time.sleep(LONG_S)
        out = self.layer(x)
        return SlowBackward.apply(out) if self.where == "backward" else out


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(LONG_S)
        return super().step(closure)


def batches(slow: bool):
    while True:
        time.sleep(LONG_S * slow)
        yield torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("where, part", [
    ("data", DATA), ("forward", FORWARD), ("backward", BACKWARD), ("after", EXPOSED), ("optimizer", OPTIMIZER),
])  # fmt: skip
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_moment_is_counted_in_its_part(where, part, accumulation):
    model = Slow(where)
    optimizer = (SlowSGD if where == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    last = LastGradient(model)
    step = TimedStep(model, last, optimizer, accumulation)
    stream = batches(where == "data")
    step(stream)
    began = time.monotonic()
    seconds, ready = step(stream)
    whole = time.monotonic() - began
    passes = 1 if where == "optimizer" else accumulation
    assert seconds[part] >= passes * LONG_S
    assert sum(seconds.values()) <= whole and began <= ready <= began + whole
    # A part that was given another's time would have all of it.
    assert sum(seconds[other] for other in PARTS if other != part) <= whole - passes * LONG_S
    last.close()
    assert not model.layer.bias._post_accumulate_grad_hooks


def test_waiting_for_the_slowest_rank_is_told_from_sending():
    def steps(exposed: float, ready: float) -> Steps:
        return Steps(8, [dict.fromkeys(PARTS, 1.0) | {EXPOSED: exposed}], [ready])

    sample = summarised([steps(5.0, 10.0), steps(2.0, 13.0)])  # the second has its gradients 3 s later
    assert sample.rows == 16 and sample.seconds[EXPOSED] == 3.5 and sample.step_s == 7.5
    assert sample.waiting_s == 1.5  # mean of 3 and 0
    assert summarised([steps(0.5, 10.0), steps(2.0, 13.0)]).waiting_s == 0.25  # never more than stood still


class PoolOnPaper:
    """Answers as ranks would, and notes in which order they are asked."""

    asked: list[tuple[int, int]] = []  # world size, rows of a rank

    def __init__(self, world_size: int, **settings):
        self.world_size = world_size

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, function, args, limit_s):
        workload, batch, steps, warmup, cores = args
        self.asked.append((self.world_size, batch))
        return [Steps(batch, [dict.fromkeys(PARTS, 0.1 * self.world_size)] * steps, [0.0] * steps)] * self.world_size


def test_the_world_sizes_take_turns_and_the_next_round_goes_the_other_way_round(monkeypatch):
    monkeypatch.setattr("ddp_course.scaling.measure.RankPool", PoolOnPaper)
    monkeypatch.setattr(PoolOnPaper, "asked", [])
    scaling = measure_scaling((4, 1, 2), Workload(batch=8), mode="strong", repeats=3)
    assert PoolOnPaper.asked == [(1, 8), (2, 4), (4, 2), (4, 2), (2, 4), (1, 8), (1, 8), (2, 4), (4, 2)]
    assert scaling.efficiency(4).value == pytest.approx(1 / 16)  # four times the step, in place of a quarter


# --- On ranks --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("workload, mode", [
    (Workload(**TINY), "weak"),
    (Workload(**TINY, replica="course", accumulation=2), "strong"),
    (Workload(**TINY, replica="naive"), "weak"),
    (Workload(**TINY, replica="course", link=Link("slow one", 0.02, 1e9)), "weak"),
], ids=["torch", "course, strong", "naive", "link"])  # fmt: skip
def test_real_ranks(workload, mode):
    scaling = measure_scaling((2, 1), workload, mode=mode, **SETTINGS)
    assert scaling.world_sizes == [1, 2] and scaling.mode == mode
    per_step = 8 * workload.accumulation
    assert [s.rows for s in scaling.samples[1]] == [per_step] * 2
    assert [s.rows for s in scaling.samples[2]] == [per_step * (1 if mode == "strong" else 2)] * 2
    assert all(seconds > 0 for size in (1, 2) for seconds in scaling.split(size).values())
    assert 0 <= scaling.waiting_s(2) <= scaling.split(2)[EXPOSED]
    assert sum(scaling.split(2).values()) == pytest.approx(scaling.step_s(2))
    assert len(scaling.notes) == 3 and "bare module" in scaling.notes[2]
    if workload.link:
        # A ring of two sends two messages; in a model of one bucket nothing hides them.
        assert scaling.split(2)[EXPOSED] >= 0.04 - 0.001
        assert "simulated link (slow one)" in " ".join(scaling.table().split())


@pytest.mark.timeout(120)
def test_a_batch_larger_than_a_ranks_rows_is_refused_by_the_ranks():
    with pytest.raises(RankError, match="does not fit into the"):
        measure_scaling((1, 2), Workload(hidden=16, batch=1000), **SETTINGS)


@pytest.mark.parametrize("change, sentence", [
    ({"world_sizes": ()}, "from 1 on"),
    ({"mode": "medium"}, "weak, strong"),
    ({"repeats": 1}, "two runs"),
    ({"world_sizes": (1, 3), "mode": "strong", "workload": Workload(batch=64)}, "cannot be divided among 3"),
])  # fmt: skip
def test_wrong_arguments_start_no_rank(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        measure_scaling(**change)


def test_wrong_workloads():
    with pytest.raises(ValueError, match="torch, course, naive"):
        Workload(replica="best")
    with pytest.raises(ValueError, match="batch=0"):
        Workload(batch=0)
    with pytest.raises(ValueError, match="needs buckets"):
        Workload(replica="naive", link=Link("any", 0.0, 1.0))


# --- Cores -----------------------------------------------------------------------------------------


def test_halves_of_a_core_come_last():
    assert core_order({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 7: "7"}) == [0, 1, 7, 4, 5]


def test_too_few_cores_are_said(monkeypatch):
    monkeypatch.setattr("ddp_course.scaling.cores.usable_cores", lambda: 2)
    assert cores_note(4) == (
        "4 ranks share 2 cores, with one thread each: at most 50% of the rate of 4 cores can be reached"
    )
