"""Do replicas stay equal, to each other, to torch's DDP, and to one process on the whole batch?"""

from __future__ import annotations

import re

import pytest
import torch

from ddp_course import RankError, launch
from tests.parallel import replicas_on_ranks as on_ranks

TOLERANCE = 1e-10  # in float64: ranks add the same numbers in another order than one process does


def on(world_size: int, function, *args, timeout_s: float = 30.0):
    return launch(function, world_size, args=args, start_method="forkserver", timeout_s=timeout_s, quiet=True)


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert list(a) == list(b)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, torch.Tensor]]:
    """Each case trained by one process on the whole batch, without any wrapper."""
    return {case: on_ranks.train_case(0, 1, case, "alone") for case in on_ranks.MODELS}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_after_20_steps_every_way_has_the_parameters_of_one_process(world_size, alone):
    found = on(world_size, on_ranks.train_all, list(on_ranks.MODELS), on_ranks.WAYS)
    for case in on_ranks.MODELS:
        # BatchNorm sees the rows of its rank only, so there torch's DDP is the measure, and rank 0's buffers are.
        expected = alone[case] if case != "batchnorm" else found[0][case, "torch"]
        for rank in range(world_size):
            for way in on_ranks.WAYS:
                assert furthest(found[rank][case, way], found[0][case, way]) == 0 or case == "batchnorm"
            if case == "batchnorm":
                expected = found[rank][case, "torch"]
            for way in on_ranks.WAYS:
                assert furthest(found[rank][case, way], expected) < TOLERANCE, (case, way, rank)
    never = found[0]["unused", "bucketed"]["never.weight"]
    torch.manual_seed(0)
    assert torch.equal(never, on_ranks.Unused().double().never.weight)  # no weight decay without a gradient


@pytest.mark.timeout(60)
def test_accumulated_passes_are_averaged_as_in_torch():
    found = on(2, on_ranks.accumulate_all, ["bucketed", "bucketed, own gradients", "torch", "naive"])
    for rank in range(2):
        for way in found[rank]:
            assert furthest(found[rank][way], found[0]["torch"]) < TOLERANCE, way
    assert furthest(found[0]["torch"], on_ranks.train_case(0, 1, "plain", "alone")) > 1e-3  # the passes counted


@pytest.mark.timeout(60)
def test_the_first_all_reduce_starts_while_backward_is_still_running_and_none_inside_no_sync(two_ranks):
    for quiet, events, sizes in two_ranks.run(on_ranks.events_of_a_step):
        assert quiet == ["first layer begins"]
        assert sizes == [4, 16, 4, 16, 4, 16]  # bias and weight of last, middle and first
        reached = events.index("first layer begins")
        before, after = events[:reached], events[reached + 1 :]
        assert before == ["all_reduce 4", "all_reduce 16"] * 2
        assert after == ["all_reduce 4", "all_reduce 16"]


@pytest.mark.timeout(60)
def test_properties(two_ranks):
    for found in two_ranks.run(on_ranks.properties):
        assert found["same names"] and found["two forwards"] and found["views"]
        assert found["large"] == [True, True, True]
        assert found["activations computed twice"]
        assert found["dtypes"] == [("torch.bfloat16", 20), ("torch.float32", 20)]
        assert found["mixed bias"] == [[1.5] * 4, True]
        own, shared = found["buffers"]
        assert own in ([0.0, 0.0], [pytest.approx(0.1)] * 2)
        assert shared == [0.0, 0.0]  # rank 0 saw zeros only


@pytest.mark.timeout(60)
def test_mistakes_are_named(two_ranks):
    for said in two_ranks.run(on_ranks.refusals):
        assert said["nothing to train"].startswith("ValueError: the module has no parameter that requires a gradient")
        assert "sparse=False" in said["sparse"]
        assert said["second hook"].startswith("RuntimeError: a communication hook is registered already")
        assert said["dropped"] == "no error"
        assert "weight got two gradients before the first was averaged" in said["two gradients"]
        for mistake in ("unused", "unused, once more", "unused, naive"):
            named = set(re.findall(r"(\w+)\.(?:weight|bias)", said[mistake]))
            assert "no gradient for" in said[mistake] and "find_unused_parameters=True" in said[mistake]
            assert named == {"never", "second", "some"}, said[mistake]


@pytest.mark.timeout(60)
def test_a_rank_that_skips_backward_is_named():
    with pytest.raises(RankError) as caught:
        on(3, on_ranks.skip_backward, timeout_s=2)
    assert caught.value.kind == "hung" and caught.value.rank == 1
    assert "rank 1 never entered all_reduce" in str(caught.value)


@pytest.mark.timeout(60)
def test_another_model_is_refused_before_anything_is_sent():
    with pytest.raises(
        RankError, match=r"the models differ: rank 0 has layers.0.weight \(16, 6\) torch.float32, rank 1"
    ):
        on(2, on_ranks.other_class_of_model)
