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
    assert furthest(alone["accumulated"], alone["plain"]) > 1e-3  # the passes counted


@pytest.mark.timeout(60)
def test_each_dtype_has_its_buckets_and_gradients_lie_in_them(two_ranks):
    for sizes, views in two_ranks.run(on_ranks.buckets_of_two_dtypes):
        assert sizes == [("torch.bfloat16", 20), ("torch.float32", 20)]
        assert views


@pytest.mark.timeout(60)
def test_large_gradients_are_those_of_torch(two_ranks):
    assert two_ranks.run(on_ranks.large_gradients) == [[True] * 3] * 2


@pytest.mark.timeout(60)
def test_mistakes_are_named_on_every_rank(two_ranks):
    for said in two_ranks.run(on_ranks.refusals):
        assert "rank 0 has weight (2, 4) torch.float32, rank 1 has weight (3, 4) torch.float32" in said["shape"]
        assert "rank 0 has nothing, rank 1 has 1.weight (2, 2) torch.float32" in said["one more"]
        one = "weight (2, 2) torch.float32"
        assert f"rank 0 has {one}, rank 1 has {one}, frozen" in said["frozen"]
        assert "rank 0 has running_mean (2,) torch.float32, a buffer, rank 1 has nothing" in said["buffer"]
        assert "the models differ: rank 0 has 0.weight (16, 6) torch.float32, rank 1" in said["another class"]
        assert said["none"] == "no error"
        assert all("build the model identically" in said[name] for name in ("shape", "one more", "frozen", "buffer"))
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
    assert caught.value.code == "absent" and caught.value.rank == 1
    assert "rank 1 never entered all_reduce" in str(caught.value)


@pytest.mark.timeout(60)
def test_broadcast_gives_all_tensors_of_the_source_whatever_their_strides(two_ranks):
    before, after = zip(*two_ranks.run(on_ranks.broadcast_all), strict=True)
    assert not torch.equal(before[0]["0.weight"], before[1]["0.weight"])
    for name, tensor in before[1].items():
        assert torch.equal(after[0][name], tensor) and torch.equal(after[1][name], tensor), name
    assert after[0]["1.running_mean"].tolist() == [1.0] * 8
