"""One call on fresh ranks: results, prints, environment, and mistakes in the call itself."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, lru_cache, partial, singledispatch

import pytest
import torch
from torch.autograd.function import once_differentiable

from ddp_course import groups, launch
from ddp_course.launcher import processes
from tests.launcher import on_ranks

pytestmark = pytest.mark.timeout(120)

quietly = partial(launch, start_method="forkserver", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_results_come_back_by_rank(start_method, capsys):
    assert launch(on_ranks.add_ranks, 3, args=(10.0,), start_method=start_method) == [[33.0] * 3] * 3
    assert capsys.readouterr().out == "3 ranks on cpu, gloo\n"


def test_prints_come_whole_and_in_rank_order(capsys):
    launch(on_ranks.talk, 3, start_method="forkserver")
    lines = [f"rank {r} | {text} {r}" for r in range(3) for text in ("line 0 of", "line 1 of", "raw bytes of")]
    assert capsys.readouterr().out.splitlines() == ["3 ranks on cpu, gloo", *lines]


def test_quiet_prints_nothing(capsys):
    quietly(on_ranks.talk, 1)
    assert capsys.readouterr().out == ""


def test_functions_and_classes_without_a_module_travel():
    class Box:
        def __init__(self, value):
            self.value = value

    answers = launch(lambda rank, world_size, k: Box(torch.ones(2) * rank * k), 2, (3,), start_method="forkserver")
    assert [box.value.tolist() for box in answers] == [[0.0, 0.0], [3.0, 3.0]]


def test_cached_properties_and_functions_by_type_travel():
    class Box:
        @cached_property
        def contents(self):
            return size({"rows": [1, 2, 3]})

    @singledispatch
    def size(value):
        return 1

    @size.register(dict)
    def _(value):
        return 10 + sum(map(size, value.values()))

    @size.register(list)
    def _(value):
        return 100 * len(value)

    assert quietly(lambda rank, world_size: Box().contents + size(rank), 2) == [311, 311]


def test_a_function_of_autograd_travels_under_torchs_own_decorator():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable  # which uses a module that cannot be imported
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    def slope(rank, world_size):
        x = torch.tensor(3.0 + rank, requires_grad=True)
        Square.apply(x).backward()
        return x.grad.item()

    assert quietly(slope, 2) == [6.0, 8.0]


def test_a_function_that_sets_the_compiler_travels_where_the_compiler_was_imported():
    import torch._dynamo

    def with_another_setting(rank, world_size):
        torch._dynamo.config.optimize_ddp = False
        return torch._dynamo.config.optimize_ddp, torch._dynamo.config.__name__

    assert quietly(with_another_setting, 1) == [(False, "torch._dynamo.config")]
    assert torch._dynamo.config.optimize_ddp


def test_functions_under_a_cache_travel_and_still_have_one():
    @lru_cache(maxsize=5)
    def square(number):
        return number * number

    assert quietly(lambda rank, world_size: (square(3 + rank), square(3 + rank), square.cache_info()), 2) == [
        (9, 9, (1, 1, 5, 1)),
        (16, 16, (1, 1, 5, 1)),
    ]


def test_environment_is_what_torchrun_would_set(monkeypatch):
    monkeypatch.setenv("SET_LATE", "after the fork server started")
    places = launch(on_ranks.place, 2, start_method="forkserver", init=False, quiet=True)
    assert [(p["RANK"], p["LOCAL_RANK"], p["WORLD_SIZE"], p["LOCAL_WORLD_SIZE"]) for p in places] == [
        ("0", "0", "2", "2"),
        ("1", "1", "2", "2"),
    ]
    assert all(p["MASTER_ADDR"] == "127.0.0.1" and p["up"] is False for p in places)
    late = quietly(lambda r, w: __import__("os").environ["SET_LATE"], 1)
    assert late == ["after the fork server started"]


def gone_later(rank, world_size):
    return "GONE_LATER" in os.environ


def in_a_child():
    """Whether ranks have a variable before and after it is removed, and what they add up; by a new fork server."""
    os.environ["GONE_LATER"] = "known to the fork server"
    before = quietly(gone_later, 1)
    del os.environ["GONE_LATER"]
    return before + quietly(gone_later, 1), quietly(on_ranks.add_ranks, 2)


@pytest.mark.slow
def test_a_child_launches_too_and_a_variable_that_was_removed_is_not_in_its_ranks():
    # A child of multiprocessing has its fork server's socket in the folder of its parent's: it takes nothing away.
    here = quietly(on_ranks.add_ranks, 2)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        assert child.submit(in_a_child).result() == ([True, False], here)
    assert quietly(on_ranks.add_ranks, 2) == here == [[1.0] * 3] * 2


def test_function_may_open_its_own_group_from_the_environment():
    assert quietly(on_ranks.own_group, 3, init=False) == [3.0] * 3


def test_some_ranks_may_open_groups_that_have_the_name_of_an_earlier_one(tmp_path):
    answers = quietly(on_ranks.groups_one_after_another, 3, args=(str(tmp_path),), init=False)
    assert answers == [[2.0, 6.0, 8.0, 15.0, 12.0], [2.0, 6.0, 6.0, 8.0, 15.0], [6.0, 6.0, 15.0, 12.0]]


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_group_that_the_function_leaves_open_on_some_ranks_is_no_trouble(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(5):
        answers = quietly(on_ranks.leave_a_group_open, 3, init=False)
        assert answers == [0, 1, 2]
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]


@pytest.mark.parametrize("rendezvous", ["file", "env"])
def test_both_rendezvous(rendezvous):
    assert quietly(on_ranks.add_ranks, 2, rendezvous=rendezvous)[1] == [1.0] * 3


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(groups, "usable_cores", lambda: 6)
    assert quietly(on_ranks.threads, 2) == [3, 3]


lock = threading.Lock()


def uses_lock(rank, world_size):
    with lock:
        return rank


def only_rank(rank):
    return rank


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (lambda f: (only_rank, 2), TypeError, "only_rank(rank) is called as only_rank(rank, world_size)"),
        (lambda f: (on_ranks.add_ranks, 0), ValueError, "world_size=0: a job has at least one rank"),
        (lambda f: (on_ranks.add_ranks, -1), ValueError, "world_size=-1"),
        (lambda f: (on_ranks.add_ranks, 2.0), TypeError, "whole number of ranks, not 2.0"),
        (lambda f: (on_ranks.add_ranks, True), TypeError, "not True"),
        (lambda f: ("add_ranks", 2), TypeError, "must be a function"),
        (lambda f: (on_ranks.add_ranks, 2, 5), TypeError, "args=(value,)"),
        (lambda f: (on_ranks.add_ranks, 2, (1, 2)), TypeError, "add_ranks(rank, world_size, int, int)"),
        (lambda f: (lambda r, w: f.read(), 2), TypeError, "open file"),
        (lambda f: (on_ranks.add_ranks, 2, (f,)), TypeError, "args[0]"),
    ],
)
def test_a_wrong_call_is_one_sentence_before_any_rank_starts(arguments, error, says, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("a rank was started"))
    with open(tmp_path / "data.txt", "w+") as file, pytest.raises(error) as caught:
        launch(*arguments(file))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value._render_traceback_() == [f"{error.__name__}: {caught.value}"]


def test_a_lock_is_named():
    with pytest.raises(TypeError, match=r"uses_lock cannot travel .*\(in lock\); open files, locks"):
        launch_as_from_a_cell(uses_lock)


def launch_as_from_a_cell(fn):
    """A function of `__main__` travels by value, with what it refers to."""
    import cloudpickle

    module = __import__(fn.__module__, fromlist=["_"])
    cloudpickle.register_pickle_by_value(module)
    try:
        return quietly(fn, 1)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"start_method": "fork"}, "use 'spawn' or 'forkserver'"),
        ({"rendezvous": "tcp"}, "groups.join_group"),
        ({"timeout_s": 0}, "must be more than 0 s"),
        ({"timeout_s": "3"}, "timeout_s must be a number of seconds, not '3'"),
        ({"limit_s": "x"}, "limit_s must be a number of seconds, not 'x'"),
        ({"limit_s": -1}, "limit_s=-1: the time that a call may take, or None must be more than 0 s"),
        ({"world_size": 100_000}, "world_size=100000: a rank is a process of about 100 MB, so this machine holds"),
        ({"backend": "mpi"}, "backend='mpi' is unknown"),
    ],
)
def test_a_wrong_setting_is_named(settings, says):
    with pytest.raises((ValueError, TypeError), match=says):
        launch(on_ranks.add_ranks, **{"world_size": 2} | settings)


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="this host has 64 GPUs")
def test_more_nccl_ranks_than_gpus():
    with pytest.raises(ValueError, match=rf"64 ranks on this host, {torch.cuda.device_count()} GPUs found"):
        launch(on_ranks.add_ranks, 64, backend="nccl")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_after_cuda_was_used_in_the_parent():
    torch.ones(1, device="cuda").sum().item()
    count = torch.cuda.device_count()

    def on_gpu(rank, world_size):
        from ddp_course.groups import my_device

        x = torch.ones(3, device=my_device())
        torch.distributed.all_reduce(x)
        return str(x.device), x

    for start_method in ("spawn", "forkserver"):
        answers = launch(on_gpu, count, start_method=start_method, quiet=True)
        assert [device for device, _ in answers] == [f"cuda:{rank}" for rank in range(count)]
        assert [(x.device.type, x.tolist()) for _, x in answers] == [("cpu", [float(count)] * 3)] * count
