"""Each check, on planted notes: what must be found, with its rank and numbers, and what only looks like it."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DistributedSampler

from ddp_course.diagnose.training_checks import look
from ddp_course.diagnose.training_facts import Load, NotedMean, RankFacts, Reference, Write


def ranks(world_size, **same):
    return [RankFacts(rank=rank, **same) for rank in range(world_size)]


def only(everyone):
    """Return the one thing that is found, or None."""
    found = look(everyone)
    assert len(found) <= 1, [str(finding) for finding in found]
    return found[0] if found else None


def drawn(rows, world_size, **options):
    """Return what DistributedSampler gives to each rank of a set of `rows` rows, for two epochs."""
    samplers = [DistributedSampler(range(rows), world_size, rank, **options) for rank in range(world_size)]
    everyone = ranks(world_size)
    for epoch in range(2):
        for facts, sampler in zip(everyone, samplers, strict=True):
            sampler.set_epoch(epoch)
            facts.epochs.append(list(sampler))
    return everyone


def test_ranks_about_which_nothing_was_noted_are_well():
    assert look(ranks(1)) == look(ranks(3)) == []


# --- Rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_with_torchs_padding_are_well(world_size, shuffle):
    assert only(drawn(101, world_size, shuffle=shuffle)) is None


def test_all_rows_on_every_rank_are_found_in_the_same_order_and_in_another():
    shuffled = random.Random(0).sample(range(90), 90)
    for orders in ([shuffled] * 3, [random.Random(rank).sample(range(90), 90) for rank in range(3)]):
        everyone = [replace(facts, epochs=[order]) for facts, order in zip(ranks(3), orders, strict=True)]
        found = only(everyone)
        assert (found.fault, found.rank) == ("missing-sampler", None)
        assert found.numbers == {"drawn": 270, "distinct": 90, "shard": 30} and "takes 3 times" in found.evidence


def test_one_shared_row_more_than_padding_needs_is_found():
    even, odd = list(range(0, 20, 2)), list(range(1, 20, 2))
    assert only([RankFacts(rank=0, epochs=[even]), RankFacts(rank=1, epochs=[[*odd, 0]])]) is None
    found = only([RankFacts(rank=0, epochs=[even]), RankFacts(rank=1, epochs=[[*odd, 0, 2]])])
    assert found.numbers == {"drawn": 22, "distinct": 20, "shard": 10}


def test_rows_that_a_rank_itself_draws_twice_are_drawn_with_replacement_on_purpose():
    with_replacement = [random.Random(rank).choices(range(40), k=40) for rank in range(2)]
    assert only([replace(f, epochs=[rows]) for f, rows in zip(ranks(2), with_replacement, strict=True)]) is None


def test_the_same_shuffled_order_is_found_and_names_the_rank_if_it_is_one():
    everyone = drawn(100, 2)
    everyone[1].epochs[1] = everyone[1].epochs[0]
    found = look(everyone)  # rank 1 then also holds rows that rank 0 drew in this epoch
    assert [f.fault for f in found] == ["missing-sampler", "missing-set-epoch"]
    assert found[1].rank == 1 and "rank 1 drew 50 rows in the same" in found[1].evidence
    for facts in everyone:
        facts.epochs[1] = facts.epochs[0][:30]  # left early
    assert (only(everyone).fault, only(everyone).rank) == ("missing-set-epoch", None)


def test_two_orders_of_a_few_rows_may_be_equal_by_chance():
    assert only(ranks(1, epochs=[[3, 1, 2], [3, 1, 2]])) is None


def evaluated(*rows_of_ranks, size=None):
    return [RankFacts(rank=rank, evaluated=list(rows), evaluation_size=size) for rank, rows in enumerate(rows_of_ranks)]


def test_a_row_that_counts_twice_or_not_at_all_is_found():
    found = only(evaluated([0, 2, 4], [1, 3, 0], size=5))
    assert (found.fault, found.rank, found.numbers) == ("padded-evaluation", None, {"repeated": 1, "left_out": 0})
    assert "1 row counted more often than the others (row 0)" in found.evidence
    found = only(evaluated([0, 2], [1, 3], size=5))
    assert found.numbers == {"repeated": 0, "left_out": 1} and "1 row of 5 left out" in found.evidence


def test_each_row_once_or_all_rows_on_all_ranks_or_on_rank_0_alone_is_right():
    assert only(evaluated([0, 2, 4], [1, 3], size=5)) is None
    assert only(evaluated(range(5), range(5), size=5)) is None
    assert only(evaluated(range(5), [], size=5)) is None
    assert only(evaluated([10, 30], [20])) is None  # of a subset, whose size is not known


# --- Numbers ---------------------------------------------------------------------------------------


def mean(total, rows, reported, batch_means=0.0, batches=1):
    return NotedMean(total, rows, batch_means, batches, reported)


def with_means(*means):
    return [RankFacts(rank=rank, means={"loss": noted}) for rank, noted in enumerate(means)]


def test_the_mean_of_ranks_means_and_that_of_batches_means_are_told_apart():
    found = only(with_means(mean(30.0, 10, 2.0), mean(5.0, 5, 2.0)))  # 35 / 15, not (3 + 1) / 2
    assert (found.fault, found.rank) == ("mean-of-means", None) and "mean of the ranks' means" in found.evidence
    assert found.numbers == {"reported": 2.0, "right": pytest.approx(35 / 15)}
    found = only(with_means(mean(30.0, 10, 3.5, batch_means=6.0, batches=2), mean(5.0, 5, None, 4.5, 1)))
    assert (found.fault, found.rank) == ("mean-of-means", 0) and "mean of the batches' means" in found.evidence


def test_sum_over_count_is_right_also_in_float32_and_on_one_rank_only():
    right = torch.tensor(35 / 15, dtype=torch.float32).item()
    assert only(with_means(mean(30.0, 10, right), mean(5.0, 5, None))) is None
    assert only(with_means(mean(30.0, 10, 3.0 * (10 / 15)), mean(0.0, 5, None))) is None
    assert only(with_means(mean(6.0, 3, 2.0), NotedMean(0.0, 0, 0.0, 0, 2.0))) is None  # a rank without rows
    assert only(with_means(mean(30.0, 10, 2.0), mean(10.0, 10, 2.0))) is None  # equal shards: both are the mean


def test_a_difference_in_the_fourth_digit_is_found():
    found = only(with_means(mean(1000.0, 1000, 1.1), mean(1188.0, 990, 1.1)))  # (1.0 + 1.2) / 2
    assert found.fault == "mean-of-means" and found.numbers["right"] == pytest.approx(2188 / 1990)  # 1.0995
    assert only(with_means(mean(1000.0, 1000, 1.0991), mean(1188.0, 990, None))).fault == "wrong-mean"


def test_a_number_that_is_no_mean_at_all_is_wrong_too():
    found = only(with_means(mean(30.0, 10, 35 / 15), mean(5.0, 5, 1.0)))  # rank 1 reports its own
    assert (found.fault, found.rank, found.numbers["reported"]) == ("wrong-mean", 1, 1.0)


TUNED = Reference(global_batch=16, lr=0.1)


def rates(world_size, lr, local_batch=16, reference=TUNED):
    return only(ranks(world_size, lr=lr, local_batch=local_batch, reference=reference))


def test_a_rate_that_was_kept_is_found_and_every_common_rule_is_left_alone():
    found = rates(4, lr=0.1)
    assert (found.fault, found.rank, found.numbers) == ("lr-not-scaled", None, {"times": 4, "lr": 0.1, "linear": 0.4})
    assert "1/4 of its steps" in found.evidence and "rule of thumb" in found.evidence
    assert rates(4, lr=0.4) is None  # linear
    assert rates(4, lr=0.2) is None  # square root
    assert rates(4, lr=0.1, local_batch=4) is None  # the global batch was kept
    assert rates(1, lr=0.1) is None
    assert rates(1, lr=0.05, local_batch=8) is None  # half the batch, half the rate
    assert rates(4, lr=0.1, reference=None) is None


# --- Files, devices, cores -------------------------------------------------------------------------


def test_several_writers_of_one_file_are_found_on_one_host_and_on_two():
    everyone = ranks(3)
    for rank in (0, 2):
        everyone[rank].writes.append(Write("/run/last.pt", rank, rank + 0.5))
    found = only(everyone)
    assert (found.fault, found.rank) == ("several-writers", 2) and found.numbers == {"writers": 2, "together": False}
    assert "ranks 0 and 2 wrote the same file, last.pt;" in found.evidence
    everyone[2] = replace(everyone[2], host="other", writes=[Write("/run/last.pt", 0.1, 0.6)])
    assert only(everyone).numbers["together"] and "from 2 hosts" in only(everyone).evidence


def test_one_writer_may_write_often_and_each_rank_its_own_file():
    everyone = ranks(2, writes=[])
    everyone[0].writes = [Write("/run/last.pt", 0, 1), Write("/run/last.pt", 1, 2), Write("/run/part0.pt", 2, 3)]
    everyone[1] = replace(everyone[1], writes=[Write("/run/part1.pt", 0, 1)])
    assert only(everyone) is None


def loads(devices, names=("w",), model_names=("w",), **facts):
    return [
        RankFacts(rank=rank, device=f"cuda:{rank}", loads=[Load(names, model_names, (device,))], **facts)
        for rank, device in enumerate(devices)
    ]


def test_a_state_on_another_ranks_gpu_is_found_and_the_cpu_is_nobodys():
    found = only(loads(["cuda:0", "cuda:0", "cuda:0"]))
    assert (found.fault, found.rank, found.numbers) == ("all-on-gpu-0", 1, {"ranks": 2})
    assert "ranks 1 and 2 loaded" in found.evidence and "rank 1 has cuda:1, its state lies on cuda:0" in found.evidence
    assert only(loads(["cuda:0", "cuda:1"])) is None
    assert only(loads(["cpu", "cpu"])) is None


def test_a_prefix_on_either_side_is_found_and_other_names_are_not_its_business():
    cpu, bare, wrapped = ["cpu", "cpu"], ("a", "b"), ("module.a", "module.b")
    for names, model_names in ((wrapped, bare), (bare, wrapped)):
        found = only(loads(cpu, names, model_names))
        assert (found.fault, found.rank) == ("module-prefix", None)
        assert found.numbers == {"fits": 0, "without_prefix": 2, "tensors": 2}
    assert only(loads(cpu, wrapped, wrapped)) is None
    assert only(loads(cpu, ("a", "head"), bare)) is None
    assert only(loads(cpu, ("module.a",), ("module.a", "b"))) is None  # a model with a part of that name


@pytest.mark.parametrize(
    ("threads", "cores", "rank", "share"),
    [((4, 4), 4, None, 2), ((1, 4), 4, 1, 2), ((2, 2, 2), 2, None, 1)],
)
def test_more_threads_than_cores_are_found(threads, cores, rank, share):
    everyone = [RankFacts(rank=r, threads=n, cores=tuple(range(cores))) for r, n in enumerate(threads)]
    found = only(everyone)
    assert (found.fault, found.rank) == ("too-many-threads", rank)
    assert found.numbers == {"threads": sum(threads), "cores": cores, "share": share}


def test_threads_that_fit_or_cannot_be_fewer_are_well():
    assert only(ranks(2, threads=2)) is None
    assert only(ranks(8, threads=1, cores=(0, 1))) is None  # more ranks than cores: no setting helps
    pinned = [RankFacts(rank=r, threads=2, cores=(2 * r, 2 * r + 1)) for r in range(4)]
    assert only(pinned) is None
    assert only([replace(facts, host=f"host{facts.rank}") for facts in ranks(2, threads=4)]) is None


# --- Replicas --------------------------------------------------------------------------------------


def test_running_statistics_that_differ_are_batchnorms_and_other_values_are_not():
    everyone = ranks(3, of_batchnorm=("bn.mean",))
    for facts in everyone:
        facts.buffers = {"bn.mean": torch.zeros(4), "scale": torch.ones(1)}
        facts.parameters = {"w": "same"}
    assert only(everyone) is None
    everyone[2].buffers = {"bn.mean": torch.tensor([0, 0, 0.25, 0]), "scale": torch.ones(1)}
    found = only(everyone)
    assert (found.fault, found.rank, found.numbers) == ("batchnorm-drift", 2, {"largest": 0.25, "buffers": 1})
    everyone[2].buffers["bn.mean"] = torch.zeros(4)
    everyone[1].parameters = {"w": "other"}
    assert (only(everyone).fault, only(everyone).rank) == ("replicas-differ", 1)
    everyone[1].parameters = {"w": "same"}
    everyone[2].buffers["scale"] = torch.zeros(1)
    assert (only(everyone).fault, only(everyone).rank) == ("replicas-differ", 2)
