"""Does the simulated network send what real ranks send, and does it notice work that was left undone?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_course.collectives import ring_all_reduce, tree_all_reduce
from ddp_course.problems import counting
from ddp_course.problems.counting import Network, bisected, least


def sent_by_ranks(rank, world_size):
    x = torch.ones(1003)
    counted = torch.tensor([ring_all_reduce(x), tree_all_reduce(x)])
    layer = fully_shard(nn.Embedding(10, 2), mesh=init_device_mesh("cpu", (world_size,)))
    dist.barrier()
    return *counted.tolist(), layer.weight.to_local().shape[0]


@pytest.mark.timeout(60)
def test_ranks_of_gloo_send_as_much(ranks):
    ring, tree, rows = zip(*ranks(4).run(sent_by_ranks), strict=True)
    network = counting.all_reduce(Network(4), 1003)  # of elements: a chunk is a whole number of them
    assert tuple(4 * network.sent[rank] for rank in range(4)) == ring
    network = counting.tree_all_reduce(Network(4), 4 * 1003)
    assert tuple(network.sent[rank] for rank in range(4)) == tree
    assert rows == tuple(len(chunk) for chunk in torch.empty(10, 2).chunk(4)) == (3, 3, 3, 1)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_what_is_sent_is_received_and_time_is_that_of_the_longest_message(ranks):
    network = counting.all_reduce(Network(ranks, latency_s=1.0, bytes_per_s=10.0), 10 * ranks)
    assert sum(network.sent.values()) == sum(network.received.values()) == 2 * (ranks - 1) * 10 * ranks
    assert network.seconds == pytest.approx(2 * (ranks - 1) * 2.0)
    assert counting.tree_all_reduce(Network(ranks, 1.0), 8).seconds == 2 * (ranks - 1).bit_length()


def test_only_what_leaves_a_node_has_crossed():
    network = counting.all_reduce(Network(4, node_size=2), 400)
    assert network.crossed == {1: 600, 3: 600} and network.sent[0] == 600
    network = counting.reduce_scatter(Network(4, node_size=2), 400, [1, 3])
    assert network.crossed == {1: 200, 3: 200}


def test_a_ring_that_sends_the_wrong_chunk_is_noticed(monkeypatch):
    monkeypatch.setattr(counting, "split", lambda total, parts: [total // parts] * (parts - 1))
    with pytest.raises((AssertionError, IndexError)):
        counting.all_gather(Network(4), 400)


def test_searches_find_the_first_value_that_is_enough():
    assert [least(lambda n, first=first: n >= first) for first in (1, 2, 3, 8, 100)] == [1, 2, 3, 8, 100]
    assert bisected(lambda x: x * x >= 2, 1, 100) == pytest.approx(2**0.5, rel=2e-6)


def test_a_step_of_ddp_is_that_of_lesson_14():
    step = counting.step_seconds
    assert step(20.48, 40.96, 160.0) == pytest.approx(61.44 + 160)
    assert step(20.48, 40.96, 160.0, buckets=8) == pytest.approx(61.44 + 160 - 40.96 * 7 / 8)
    assert step(20.48, 40.96, 160.0, buckets=8, passes=4) == pytest.approx(4 * 61.44 + 160 - 40.96 * 7 / 8)
