"""Who am I, how do we meet, and what is said when something about it is wrong."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from ddp_course import RankError, groups, launch
from ddp_course.rendezvous import free_port, listen_on

pytestmark = pytest.mark.timeout(120)
GOOD = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def on_fork_server(fn, world_size, args=(), **more):
    return launch(fn, world_size, args, start_method="forkserver", quiet=True, init=False, **more)


# --- Who am I? -------------------------------------------------------------------------------------


def test_place_is_read_from_the_launchers_variables():
    place = groups.read_place(GOOD, backend="gloo")
    assert place == groups.Place(5, 8, 1, 4, "gloo", torch.device("cpu"))
    assert not place.one_host
    assert groups.read_place(GOOD | {"LOCAL_WORLD_SIZE": "8"}, backend="gloo").one_host


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"RANK": ""}, "RANK='' is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1 is below 0"),
        ({"RANK": "8"}, "RANK=8 does not fit WORLD_SIZE=8: ranks count from 0 to WORLD_SIZE - 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is below 1"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 does not fit LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 does not fit WORLD_SIZE=8: it cannot exceed WORLD_SIZE"),
    ],
)
def test_a_wrong_variable_is_named_with_what_was_found_and_what_to_do(change, says):
    environ = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(ValueError, match="start the program with torchrun") as caught:
        groups.read_place(environ, backend="gloo")
    assert str(caught.value).startswith(says)


# --- Over what do we talk? -------------------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("four_gpus")
def test_nccl_is_chosen_when_every_local_rank_has_a_gpu():
    assert groups.choose_backend(4) == "nccl"
    assert groups.choose_backend(5) == "gloo"
    assert groups.choose_backend(4, "gloo") == "gloo"
    assert groups.read_place(GOOD).device == torch.device("cuda", 1)  # by local rank, not by rank
    with pytest.raises(ValueError, match="5 ranks on this host, 4 GPUs found; use backend='gloo' or at most 4 ranks"):
        groups.choose_backend(5, "nccl")


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("version", "backend"), [((2, 30, 4), "nccl"), ((2, 29, 9), "gloo")])
def test_ranks_share_a_gpu_only_when_asked_and_nccl_can(monkeypatch, version, backend):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert groups.choose_backend(8) == "gloo"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert groups.choose_backend(8) == backend
    assert groups.choose_device(6, "nccl") == torch.device("cuda", 2)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend='mpi' is unknown: use 'nccl'"):
        groups.choose_backend(1, "mpi")


# --- The rendezvous --------------------------------------------------------------------------------


def meet(rank, world_size, rendezvous, address, timeout_s=20.0, absent=None, believe=None):
    """Join, sum the ranks, look at the sockets, leave."""
    import psutil

    if rank == absent:
        return None
    place = groups.read_place(os.environ | (believe or {}).get(rank, {}))
    groups.join_group(place, rendezvous, address, timeout_s)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    heard = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    groups.leave_group()
    return total.item(), heard, dist.is_initialized()


def address_for(rendezvous, tmp_path):
    return {"file": str(tmp_path / "meet"), "tcp": f"127.0.0.1:{free_port()}", "env": None}[rendezvous]


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["file", "tcp", "env"])
def test_all_three_ways_to_meet_listen_on_loopback_only(rendezvous, tmp_path):
    answers = on_fork_server(meet, 3, (rendezvous, address_for(rendezvous, tmp_path)))
    assert answers == [(3.0, {"127.0.0.1"}, False)] * 3


def test_variables_without_an_agent_have_rank_0_host_the_store(tmp_path):
    def by_hand(rank, world_size, port):
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
        return meet(rank, world_size, "env", None)

    assert on_fork_server(by_hand, 2, (free_port(),)) == [(1.0, {"127.0.0.1"}, False)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["file", "tcp", "env"])
def test_a_rank_that_does_not_come_is_named(rendezvous, tmp_path):
    # Of the two that wait, the one that started first is told of: under load not always rank 0.
    with pytest.raises(RankError, match=r"rank [01]: waited 1 s for 3 ranks; missing: rank 2; were all") as caught:
        on_fork_server(meet, 3, (rendezvous, address_for(rendezvous, tmp_path), 1.0, 2))
    assert caught.value.error_type == "TimeoutError"


def test_no_store_at_the_address_is_told(tmp_path):
    with pytest.raises(RankError, match=r"rank 1: no store answered at 127.0.0.1:\d+ within 1 s; is rank 0 running"):
        on_fork_server(meet, 2, ("tcp", address_for("tcp", tmp_path), 1.0, 0))


@pytest.mark.parametrize("rendezvous", ["file", "tcp"])
def test_ranks_that_disagree_about_the_world_size(rendezvous, tmp_path):
    believe = {1: {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}}
    with pytest.raises(RankError, match="expected world size 2, rank 1 has 3; start every rank with the same"):
        on_fork_server(meet, 2, (rendezvous, address_for(rendezvous, tmp_path), 3.0, None, believe))


def test_two_processes_that_claim_one_rank(tmp_path):
    with pytest.raises(RankError, match="rank 0 was claimed twice: two processes have RANK=0"):
        on_fork_server(meet, 2, ("file", str(tmp_path / "meet"), 2.0, None, {1: {"RANK": "0"}}))


def test_a_file_of_an_earlier_run_is_noticed(tmp_path):
    path = tmp_path / "meet"
    store = dist.FileStore(str(path), 5)
    store.add("ddp_course/claims/0", 1)  # as a run that was killed leaves it
    with pytest.raises(RankError, match="used by an earlier run; give .* each run its own file"):
        on_fork_server(meet, 1, ("file", str(path), 2.0))


def test_a_taken_port_is_named():
    with listen_on() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RankError, match=rf"cannot listen on 127.0.0.1:{port} \(Address already in use\); give another"
        ):
            on_fork_server(meet, 2, ("tcp", f"127.0.0.1:{port}", 2.0))


@pytest.mark.parametrize("address", [None, "29500", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:http", "host:70000"])
def test_an_address_must_be_host_and_port(address):
    place = groups.read_place(GOOD, backend="gloo")
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        groups.join_group(place, "tcp", address)


def test_a_missing_address_or_variable_is_named(monkeypatch):
    place = groups.read_place(GOOD, backend="gloo")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        groups.join_group(place, "env")
    with pytest.raises(ValueError, match="needs a path"):
        groups.join_group(place, "file")
    with pytest.raises(ValueError, match="rendezvous='udp' is unknown"):
        groups.join_group(place, "udp")


# --- Groups within groups, and for as long as a block ----------------------------------------------


def test_neighbours_share_a_group():
    assert groups.subgroup_ranks(6, 2) == [[0, 1], [2, 3], [4, 5]]
    assert groups.subgroup_ranks(4, 4) == [[0, 1, 2, 3]]
    for wrong in (0, 4, -2):
        with pytest.raises(ValueError, match="6 ranks cannot be cut into groups"):
            groups.subgroup_ranks(6, wrong)


def sum_of_neighbours(rank, world_size):
    group = groups.split_group(2)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    return total.item(), dist.get_process_group_ranks(group)


def test_a_subgroup_sums_its_own_ranks(ranks):
    answers = ranks(4).run(sum_of_neighbours)
    assert answers == [(1.0, [0, 1]), (1.0, [0, 1]), (5.0, [2, 3]), (5.0, [2, 3])]


def test_a_group_is_open_for_as_long_as_the_block(monkeypatch):
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    for name, value in (alone | {"MASTER_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, str(value))
    with groups.process_group(timeout_s=30) as place:
        total = torch.ones(1, device=groups.my_device())
        dist.all_reduce(total)
        assert (total.item(), place.backend, place.one_host) == (1.0, dist.get_backend(), True)
    assert not dist.is_initialized()
