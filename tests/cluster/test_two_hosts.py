"""Training over two hosts, each with a network of its own: equal to one machine, and what happens when one is lost.

The hosts are network namespaces (`hosts.py`), so the ranks reach each other over the cable or not at all.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cluster.hosts import Hosts, why_not
from tests.cluster.node import Node
from tests.programs.running import PROGRAMS, edited, on_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM, EPOCHS, STEPS = PROGRAMS / "train_resumable.py", 8, 8 * 30
LIMIT_S = 120  # far more than needed: a machine that does other things too
COUNTING = str(Path(__file__).with_name("count_on_ranks.py"))
PORT = 29400  # nobody else is on these networks


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2) as built:
        yield built


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory) -> dict:
    """What the same training by four ranks on one machine leaves, that nothing interrupts."""
    folder = tmp_path_factory.mktemp("one_machine")
    on_ranks(program(folder), 4, str(folder / "run.pt"))
    return content(folder)


def program(folder: Path) -> Path:
    """The lessons' program, with more epochs."""
    return edited(
        PROGRAM, folder, ("EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 3,", f"EPOCHS, GLOBAL_BATCH, SAVE_EVERY = {EPOCHS},")
    )


def node(hosts: Hosts, host: int, folder: Path, **other) -> Node:
    """Two ranks of the training on one of the hosts.

    Both hosts have this machine's name, which is 127.0.0.1 in /etc/hosts: plain gloo would meet there, so it is told
    the interface. `process_group` finds it by itself.
    """
    environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    return start(hosts, host, [str(program(folder)), str(folder / "run.pt")], environ=environ, **other)


def start(hosts: Hosts, host: int, program: list[str], nnodes: str = "2", **other) -> Node:
    """Start a node on one of the hosts; the first has the store at which the agents meet."""
    where = {"address": hosts.addresses[host], "prefix": hosts.prefix(host), "hosts_store": host == 0}
    return Node(program, nnodes=nnodes, endpoint=f"{hosts.addresses[0]}:{PORT}", **where, **other)


def content(folder: Path) -> dict:
    return torch.load(folder / "run.pt", weights_only=True)


def past(folder: Path, step: int):
    return lambda: (folder / "run.pt").exists() and content(folder)["step"] >= step


# --- All is well, or comes to be so ----------------------------------------------------------------


@pytest.fixture(scope="module")
def two_hosts(hosts, tmp_path_factory) -> tuple[dict, list[set[str]]]:
    """What two hosts leave that nothing disturbs, and where each listened meanwhile."""
    folder = tmp_path_factory.mktemp("two_hosts")
    with node(hosts, 0, folder) as first, node(hosts, 1, folder) as second:
        first.wait_until(past(folder, 20), LIMIT_S, "a checkpoint")
        heard = [listening(hosts, host) for host in (0, 1)]
        assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), first.errors + second.errors
    return content(folder), heard


def test_two_hosts_train_as_one_machine_does(hosts, one_machine, two_hosts):
    found, heard = two_hosts
    torch.testing.assert_close(found, one_machine, rtol=0, atol=0)
    # Ranks listen at their own host's address. Only stores listen everywhere, the agent's and rank 0's: torch's choice.
    assert heard[1] == {hosts.addresses[1]}
    everywhere = heard[0] - {hosts.addresses[0]}
    assert f"*:{PORT}" in everywhere and len(everywhere) <= 2 and all(each.startswith("*:") for each in everywhere)


def listening(hosts: Hosts, host: int) -> set[str]:
    """Return the addresses at which processes of this host listen; with the port, if it is at all of them."""
    lines = subprocess.run(
        [*hosts.prefix(host), "ss", "-Hltn"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    sockets = [line.split()[3].rpartition(":") for line in lines]
    everywhere = ("*", "0.0.0.0", "[::]")
    return {
        f"*:{port}" if address in everywhere else address.strip("[]").removeprefix("::ffff:")
        for address, _, port in sockets
    }


def test_a_killed_rank_changes_nothing(hosts, two_hosts, tmp_path):
    with node(hosts, 0, tmp_path, max_restarts=3) as first, node(hosts, 1, tmp_path, max_restarts=3) as second:
        first.wait_until(past(tmp_path, 60), LIMIT_S, "three checkpoints")
        second.kill_rank(1)
        assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), first.errors + second.errors
    starts = re.findall(r"4 ranks start after step (\d+)", first.output)
    assert len(starts) == 2 and int(starts[1]) >= 60  # it went on, and did not begin again
    # DDP's first step has other buckets than those after it, and a sum over four ranks depends on its place in one.
    torch.testing.assert_close(content(tmp_path), two_hosts[0], rtol=0, atol=1e-6)


def test_a_dead_host_is_done_without(hosts, one_machine, tmp_path):
    elastic = {"nnodes": "1:2", "max_restarts": 3}
    with node(hosts, 0, tmp_path, **elastic) as first, node(hosts, 1, tmp_path, **elastic) as second:
        second.wait_until(lambda: len(second.rank_pids()) == len(first.rank_pids()) == 2, LIMIT_S, "four ranks")
        first.wait_until(past(tmp_path, 60), LIMIT_S, "three checkpoints")
        second.kill()
        assert first.wait(LIMIT_S) == 0, first.errors
    starts = re.findall(r"(\d) ranks start after step (\d+)", first.output)
    assert [ranks for ranks, _ in starts] == ["4", "2"] and int(starts[1][1]) >= 60
    assert content(tmp_path)["step"] == STEPS and one_machine["step"] == STEPS
    losses = re.findall(r"epoch \d: test loss (\d\.\d{4})", first.output)
    assert float(losses[-1]) < 0.5 * float(losses[0])  # with other masks of dropout, so other bits


# --- All is lost, and somebody says so -------------------------------------------------------------


def test_the_host_with_the_store_is_missed_at_once(hosts, tmp_path):
    """c10d's store lives in an agent. A job that may lose any host keeps it elsewhere, as a Node does by itself."""
    program = [COUNTING, str(tmp_path), "10", "5", "20"]
    elastic = {"nnodes": "1:2", "nproc": 1, "max_restarts": 3}
    with start(hosts, 0, program, **elastic) as first, start(hosts, 1, program, **elastic) as second:
        first.wait_until(lambda: (tmp_path / "count").exists(), LIMIT_S, "a count")
        first.kill()
        assert second.wait(LIMIT_S) == 1
        assert "RendezvousConnectionError: The connection to the C10d store has failed" in second.errors


def test_a_cut_cable_hangs_nobody(hosts, tmp_path):
    """Neither host is told: the ranks wait until their own limit, the agents until the kernel gives the store up."""
    program = [COUNTING, str(tmp_path), "10", "5", "5"]  # counts to 5, then talks on; no collective may take over 5 s
    with start(hosts, 0, program, nproc=1) as first, start(hosts, 1, program, nproc=1) as second:
        count = tmp_path / "count"
        first.wait_until(lambda: count.exists() and count.read_text() == "5", LIMIT_S, "the count of 5")
        assert len(first.rank_pids()) == len(second.rank_pids()) == 1
        with hosts.cut(1):
            assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (1, 1)
        for each in (first, second):
            assert each.rank_pids() == {}
            assert re.search(r"RuntimeError: .* Timed out waiting 5000ms for (recv|send) operation", each.errors)
