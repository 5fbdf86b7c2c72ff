"""Is SyncBatchNorm on shards what BatchNorm is on the whole batch, gradients included?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_course import launch
from ddp_course.groups import choose_backend
from ddp_course.parallel import SyncBatchNorm
from ddp_course.parallel.syncbn import combine, local_statistics
from tests.parallel import syncbn_on_ranks as on_ranks

TOLERANCE = 1e-10
OPTIONS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
DIVISIONS = {1: [(8,)], 2: [(4, 4), (7, 1), (6, 0)], 3: [(4, 4, 4), (5, 2, 1), (0, 3, 3)]}


def on(world_size: int, function, *args):
    return launch(function, world_size, args=args, start_method="forkserver", timeout_s=30, quiet=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_layer_is_batchnorm_on_the_whole_batch(world_size):
    cases = [(sizes, shape, {}) for sizes in DIVISIONS[world_size] for shape in [(), (5,), (2, 3), (2, 2, 2)]]
    cases += [(sizes, (2, 2), options) for sizes in DIVISIONS[world_size] for options in OPTIONS]
    for found in on(world_size, on_ranks.off_by_all, cases):
        for case, differences in zip(cases, found, strict=True):
            assert max(differences.values()) < TOLERANCE, (case, differences)
            assert {"output", "input gradient", "eval"} <= set(differences)


@pytest.mark.timeout(60)
def test_collectives_digits_and_mistakes(two_ranks):
    sixteen = 1e4 + torch.arange(16, dtype=torch.float64) / 16
    expected = 0.9 + 0.1 * sixteen.var().item()
    for found in two_ranks.run(on_ranks.facts):
        assert found["training"] == [("all_gather", False), ("all_reduce", True)]
        assert found["no_grad and eval"] == ["all_gather"]
        assert found["group of one"]
        assert found["variance"] == pytest.approx(expected, rel=1e-3)
        assert found["bfloat16"] == ("torch.bfloat16", True)
        assert "1 value per channel: its variance needs two" in found["one value"]
        assert "expected (N, 3, ...), found (4, 5)" in found["channels"]
        assert "SyncBatchNorm expected input tensor to be on GPU" in found["torch's own"]
        assert "once_differentiable" in found["second derivative"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0), st.integers(0, 1000))
def test_statistics_of_parts_combine_to_those_of_the_whole(sizes, seed):
    x_NC = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 7
    mean_C, var_C, count = combine(torch.stack([local_statistics(part) for part in x_NC.split(sizes)]))
    assert count == sum(sizes)
    torch.testing.assert_close(mean_C, x_NC.mean(0))
    torch.testing.assert_close(var_C, x_NC.var(0, correction=0))


def test_convert_keeps_the_tensors_and_the_names():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.SyncBatchNorm(4))).eval()
    before = dict(model.state_dict(keep_vars=True))
    converted = SyncBatchNorm.convert(model)
    assert [type(layer).__name__ for layer in converted.modules() if layer.__class__.__module__.startswith("ddp")] == [
        "SyncBatchNorm"
    ] * 2
    after = dict(converted.state_dict(keep_vars=True))
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert not converted[1].training
    single = SyncBatchNorm.convert(nn.BatchNorm1d(5, eps=1e-3, momentum=None))
    assert isinstance(single, SyncBatchNorm) and (single.eps, single.momentum) == (1e-3, None)
    single.load_state_dict(nn.SyncBatchNorm(5).state_dict())
    nn.BatchNorm1d(5).load_state_dict(single.state_dict())


def test_convert_finds_a_layer_under_every_name_and_keeps_it_one_layer():
    model, norm = nn.Module(), nn.BatchNorm1d(3)
    model.first = model.second = norm
    model.inner = nn.Sequential(norm)
    converted = SyncBatchNorm.convert(model)
    assert converted.first is converted.second is converted.inner[0] and isinstance(converted.first, SyncBatchNorm)


def test_convert_gives_layers_that_are_ours_another_group_if_one_is_named():
    one, other = object(), object()
    model = nn.Sequential(SyncBatchNorm(2, process_group=one), nn.BatchNorm1d(2))
    assert [layer.process_group for layer in SyncBatchNorm.convert(model, other)] == [other, other]
    assert [layer.process_group for layer in SyncBatchNorm.convert(model)] == [other, other]


def test_convert_refuses_a_layer_without_channels():
    with pytest.raises(ValueError, match="LazyBatchNorm1d has no channels yet: pass a batch"):
        SyncBatchNorm.convert(nn.Sequential(nn.LazyBatchNorm1d()))


@pytest.mark.gpu
@pytest.mark.skipif(choose_backend(2) != "nccl", reason="torch's SyncBatchNorm needs NCCL for two ranks")
def test_torchs_own_agrees_on_gpus():
    for differences in on(2, on_ranks.off_torchs_own):
        assert max(differences.values()) < 1e-4
