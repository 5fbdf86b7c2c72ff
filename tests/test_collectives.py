"""Ring and tree give the sums of dist.all_reduce, the same bits on every rank, and send what the formulas say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil, log2
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_course import collectives

pytestmark = pytest.mark.timeout(120)

DTYPES = ("float32", "float64", "int64", "bfloat16")
WAYS = ("ring_all_reduce", "tree_all_reduce")
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-13}  # another order of adding


def sizes_for(world_size: int) -> list[int]:
    return sorted({0, 1, max(0, world_size - 1), world_size, world_size + 1, 1000, 100_000})


# --- On ranks ----------------------------------------------------------------------------------------


@contextmanager
def spied_sends() -> Iterator[list[tuple[int, int]]]:
    """Every message that this rank hands to a process group, by whatever call: (rank in the group, bytes)."""
    seen: list[tuple[int, int]] = []
    send = dist.ProcessGroup.send

    def spy(group, tensors, peer, *rest):
        seen.extend((peer, tensor.nbytes) for tensor in tensors)
        return send(group, tensors, peer, *rest)

    with mock.patch.object(dist.ProcessGroup, "send", spy):  # gives back the method, not only its function
        yield seen


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, (numel,), generator=generator, dtype=dtype)


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def same_sum(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not theirs.dtype.is_floating_point:
        return torch.equal(ours, theirs)
    tolerance = TOLERANCE[theirs.dtype]
    return torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def check_one(way: str, ours: torch.Tensor, group: dist.ProcessGroup | None = None) -> dict:
    theirs = ours.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(theirs, group=group)
    with spied_sends() as sends:
        returned = getattr(collectives, way)(ours, group)
    return {"same": same_sum(ours, theirs), "bits": bits(ours), "returned": returned, "sends": sends}


def every_size_and_dtype(rank: int, world_size: int) -> dict:
    return {
        (way, numel, dtype): check_one(way, values(rank, numel, getattr(torch, dtype)))
        for way in WAYS
        for numel in sizes_for(world_size)
        for dtype in DTYPES
    }


def awkward_tensors(rank: int, world_size: int) -> dict:
    """Shapes, strides, autograd, subgroups, and mistakes; on four ranks."""
    tensors = {
        "number": torch.tensor(rank + 1.5),
        "matrix": values(rank, 35, torch.float32).view(5, 7),
        "transposed": values(rank, 35, torch.float32).view(5, 7).t(),
        "every other": values(rank, 21, torch.int64)[::2],
        "other strides on odd ranks": values(rank, 36, torch.float32).view(6, 6),
        "parameter": torch.nn.Parameter(values(rank, 9, torch.float32)),
    }
    if rank % 2:
        tensors["other strides on odd ranks"] = tensors["other strides on odd ranks"].t()
    report = {(way, name): check_one(way, tensor.clone()) for way in WAYS for name, tensor in tensors.items()}
    parameter = tensors["parameter"]
    parameter_report = check_one("ring_all_reduce", parameter)
    report["leaf"] = (parameter_report["same"], parameter.requires_grad, parameter.grad_fn)
    upper = dist.new_group([1, 2, 3])
    report["errors"] = [refused(collectives.ring_reduce_scatter, [torch.ones(1)] * 3)]
    report["errors"].append(refused(collectives.tree_all_reduce, torch.eye(2).to_sparse()))
    for way in WAYS:
        if rank in (1, 2, 3):
            report[way, "subgroup"] = check_one(way, values(rank, 10, torch.float64), upper)
        else:
            report["errors"].append(refused(getattr(collectives, way), torch.ones(1), upper))
    return report


def refused(call, *args) -> str:
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "was not refused"


def halves(rank: int, world_size: int) -> dict:
    """The two halves alone, beside torch's, on two ranks with uneven chunks."""
    mine = values(rank, 5, torch.float64)
    chunks = mine.clone().tensor_split(world_size)
    summed = mine.clone()
    dist.all_reduce(summed)
    collectives.ring_reduce_scatter(chunks)
    right_sum = torch.equal(chunks[rank], summed.tensor_split(world_size)[rank])
    own_only = [torch.full_like(chunk, -1.0) for chunk in torch.empty(5).tensor_split(world_size)]
    own_only[rank].fill_(rank + 1.0)
    collectives.ring_all_gather(own_only)
    return {"sum": right_sum, "gathered": torch.cat(own_only).tolist()}


def big_messages(rank: int, world_size: int) -> bool:
    """8 MB a chunk: more than sockets buffer, so whoever waits too early waits for ever."""
    tensor = torch.full((4_000_000,), float(rank))
    for way in WAYS:
        getattr(collectives, way)(tensor)
    return bool((tensor == 2.0).all())  # 0 + 1, then 1 + 1


# --- Ring and tree against torch ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_sums_bits_and_messages_for_every_size_and_dtype(ranks, world_size):
    by_rank = ranks(world_size).run(every_size_and_dtype, limit_s=90)
    for (way, numel, dtype), first in by_rank[0].items():
        case, element = f"{way}, {numel} x {dtype}", getattr(torch, dtype).itemsize
        mine = [report[way, numel, dtype] for report in by_rank]
        assert all(found["same"] for found in mine), case
        assert {found["bits"] for found in mine} == {first["bits"]}, f"{case}: ranks differ"
        for rank, found in enumerate(mine):
            sent = sum(n_bytes for _, n_bytes in found["sends"])
            assert sent == found["returned"] == elements_sent(way, numel, rank, world_size) * element, f"{case}, {rank}"
            assert all(n_bytes for _, n_bytes in found["sends"]), f"{case}: an empty message"
            if way == "ring_all_reduce":
                assert {peer for peer, _ in found["sends"]} <= {(rank + 1) % world_size}
                assert all(n_bytes <= ceil(numel / world_size) * element for _, n_bytes in found["sends"])
        assert sum(found["returned"] for found in mine) == 2 * (world_size - 1) * numel * element


def test_shapes_strides_parameters_subgroups_and_mistakes(ranks):
    by_rank = ranks(4).run(awkward_tensors, limit_s=90)
    for key in [key for key in by_rank[1] if isinstance(key, tuple)]:
        mine = [report[key] for report in by_rank if key in report]
        assert all(found["same"] for found in mine), key
        assert len({found["bits"] for found in mine}) == 1, key
        assert len(mine) == (3 if key[1] == "subgroup" else 4)
    # In the group of ranks 1, 2 and 3, rank 3 is number 2, and its right neighbour number 0.
    assert {peer for peer, _ in by_rank[3]["ring_all_reduce", "subgroup"]["sends"]} == {0}
    assert [by_rank[rank]["tree_all_reduce", "subgroup"]["returned"] for rank in (1, 2, 3)] == [160, 80, 80]
    assert all(report["leaf"] == (True, True, None) for report in by_rank)
    assert "rank 0: one chunk per rank is needed, 4; found 3 chunks" in by_rank[0]["errors"][0]
    assert "found layout torch.sparse_coo: call to_dense() first" in by_rank[0]["errors"][1]
    assert by_rank[0]["errors"][2:] == ["rank 0 is not in this group: only its members may call its collectives"] * 2


def test_two_ranks_the_halves_and_big_messages(two_ranks):
    assert two_ranks.run(halves) == [{"sum": True, "gathered": [1.0, 1.0, 1.0, 2.0, 2.0]}] * 2
    assert two_ranks.run(big_messages) == [True] * 2


def elements_sent(way: str, numel: int, rank: int, world_size: int) -> int:
    """In a ring, all chunks but the rank's own, then all but its neighbour's; in a tree all, once up and once down."""
    if way == "ring_all_reduce":
        sizes = [len(chunk) for chunk in torch.empty(numel).tensor_split(world_size)]
        return 2 * numel - sizes[rank] - sizes[(rank + 1) % world_size]
    parent, children = collectives.tree_family(rank, world_size)
    return ((parent is not None) + len(children)) * numel


# --- Pure parts --------------------------------------------------------------------------------------

worlds = st.integers(1, 40)


@given(worlds)
def test_the_tree_joins_all_ranks_and_parents_know_their_children(world_size):
    families = [collectives.tree_family(rank, world_size) for rank in range(world_size)]
    for rank, (parent, children) in enumerate(families):
        assert all(families[child][0] == rank for child in children)
        assert (parent is None) == (rank == 0)
        assert parent is None or (rank in families[parent][1] and parent < rank)
    assert sum(len(children) for _, children in families) == world_size - 1


def finish_of_tree(world_size: int, message_s: float) -> float:
    """Play the tree's messages, one at a time on each rank, and return when the last has arrived."""
    families = [collectives.tree_family(rank, world_size) for rank in range(world_size)]
    free = [0.0] * world_size
    for rank in reversed(range(world_size)):  # children before parents
        for child in families[rank][1]:
            free[rank] = free[child] = max(free[rank], free[child]) + message_s
    for rank in range(world_size):
        for child in reversed(families[rank][1]):
            free[rank] = free[child] = max(free[rank], free[child]) + message_s
    return max(free)


@given(st.integers(1, 200))
def test_the_time_of_a_tree_is_that_of_its_messages_played(world_size):
    played = finish_of_tree(world_size, message_s=2.0 + 100 / 50)
    assert played == pytest.approx(collectives.tree_seconds(100, world_size, latency_s=2.0, bytes_per_s=50))
    assert world_size == 1 or played == 4.0 * 2 * ceil(log2(world_size))


def test_ring_time_counts_every_step_and_one_chunk_in_each():
    assert collectives.ring_seconds(1200, 4, latency_s=1.0, bytes_per_s=100) == 6 * (1.0 + 300 / 100)
    assert collectives.ring_seconds(1200, 1, latency_s=1.0, bytes_per_s=100) == 0.0


@given(st.integers(1, 2000), st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_below_the_crossover_the_tree_wins_and_above_it_the_ring(world_size, latency_s, bytes_per_s):
    payload = collectives.crossover_bytes(world_size, latency_s, bytes_per_s)

    def ring_over_tree(payload_bytes):
        link = (world_size, latency_s, bytes_per_s)
        return collectives.ring_seconds(payload_bytes, *link) / collectives.tree_seconds(payload_bytes, *link)

    if world_size <= 3:
        assert payload == 0.0
    else:
        assert ring_over_tree(payload) == pytest.approx(1.0)
        assert ring_over_tree(payload / 2) > 1.0 > ring_over_tree(payload * 2)
