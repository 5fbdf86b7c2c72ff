"""Training over two hosts, each with a network of its own: equal to one machine, and what happens when one is lost.

The hosts are network namespaces (`hosts.py`), so the ranks reach each other over the cable or not at all.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import pytest

from ddp_course import launch
from ddp_course.checkpoint.folder import load_checkpoint
from ddp_course.diagnose.nodes import Node
from ddp_course.train.images import Config, Result, train
from tests.cluster.hosts import Hosts, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

EPOCHS, LOCAL_BATCH, SAVE_EVERY, ROWS = 8, 16, 10, 1437
LIMIT_S = 120  # far more than needed: a machine that does other things too
COUNTING = str(Path(__file__).parents[1] / "diagnose" / "nodes_on_ranks.py")
PORT = 29400  # nobody else is on these networks


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2) as built:
        yield built


@pytest.fixture(scope="module")
def one_machine() -> Result:
    """The same training by four ranks on one machine, never interrupted: what must come of it."""
    config = Config(epochs=EPOCHS, local_batch=LOCAL_BATCH, progress=False)
    return launch(train, 4, args=(config,), timeout_s=60, start_method="forkserver", quiet=True)[0]


def node(hosts: Hosts, host: int, folder: Path, **other) -> Node:
    """Two ranks of the training on one of the hosts."""
    program = [
        "-m",
        "ddp_course.train",
        f"--epochs={EPOCHS}",
        f"--local-batch={LOCAL_BATCH}",
        "--no-progress",
        "--json",
    ]
    program += [f"--checkpoint={folder}", f"--save-every={SAVE_EVERY}", "--keep=1000", "--resume"]
    return start(hosts, host, program, **other)


def start(hosts: Hosts, host: int, program: list[str], nnodes: str = "2", **other) -> Node:
    """Start a node on one of the hosts; the first has the store at which the agents meet."""
    where = {"address": hosts.addresses[host], "prefix": hosts.prefix(host), "hosts_store": host == 0}
    return Node(program, nnodes=nnodes, endpoint=f"{hosts.addresses[0]}:{PORT}", **where, **other)


def results(first: Node) -> list[dict]:
    line = next(line for line in first.output.splitlines() if line.startswith("["))
    return json.loads(line)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.pt"))


def past(folder: Path, step: int):
    return lambda: any(saved >= step for saved in steps(folder))


# --- All is well, or comes to be so ----------------------------------------------------------------


def test_two_hosts_train_as_one_machine_does(hosts, one_machine, tmp_path):
    with node(hosts, 0, tmp_path) as first, node(hosts, 1, tmp_path) as second:
        first.wait_until(past(tmp_path, SAVE_EVERY), LIMIT_S, "a checkpoint")
        heard = [listening(hosts, host) for host in (0, 1)]
        assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), first.errors + second.errors
    for result in results(first):
        assert result["checksum"] == one_machine.checksum
        assert result["losses"] == one_machine.losses
        assert result["accuracies"] == one_machine.accuracies
    # Each rank listens at its own host's address. Only the agent with the store listens everywhere: torch's choice.
    assert heard[1] == {hosts.addresses[1]}
    assert heard[0] <= {hosts.addresses[0], f"*:{PORT}"} and f"*:{PORT}" in heard[0]


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


def test_a_killed_rank_changes_nothing(hosts, one_machine, tmp_path):
    with node(hosts, 0, tmp_path, max_restarts=3) as first, node(hosts, 1, tmp_path, max_restarts=3) as second:
        first.wait_until(past(tmp_path, 3 * SAVE_EVERY), LIMIT_S, "three checkpoints")
        second.kill_rank(1)
        assert (first.wait(LIMIT_S), second.wait(LIMIT_S)) == (0, 0), first.errors + second.errors
    for result in results(first):
        assert result["first_step"] >= 3 * SAVE_EVERY  # it went on, and did not begin again
        assert result["checksum"] == one_machine.checksum
        assert result["losses"] == one_machine.losses


def test_a_dead_host_is_done_without(hosts, one_machine, tmp_path):
    elastic = {"nnodes": "1:2", "max_restarts": 3}
    with node(hosts, 0, tmp_path, **elastic) as first, node(hosts, 1, tmp_path, **elastic) as second:
        second.wait_until(lambda: len(second.rank_pids()) == len(first.rank_pids()) == 2, LIMIT_S, "four ranks")
        first.wait_until(past(tmp_path, 3 * SAVE_EVERY), LIMIT_S, "three checkpoints")
        second.kill()
        assert first.wait(LIMIT_S) == 0, first.errors
    found = results(first)
    assert len(found) == 2 and found[0]["first_step"] >= 3 * SAVE_EVERY
    assert found[0]["checksum"] == found[1]["checksum"]
    assert len(found[0]["losses"]) == EPOCHS and all(map(math.isfinite, found[0]["losses"]))
    assert found[0]["accuracy"] >= one_machine.accuracy - 0.02
    assert_no_row_lost_or_repeated(tmp_path)


def assert_no_row_lost_or_repeated(folder: Path) -> None:
    """From each checkpoint to the next, the position moves by as many rows as the ranks took; so up to the very end."""
    world_sizes, consumed, epoch, step = set(), 0, 0, 0
    for each in (load_checkpoint(folder / f"step-{step:010d}.pt", "cpu") for step in steps(folder)):
        rows = (each["step"] - step) * LOCAL_BATCH * each["world_size"]
        if each["epoch"] == epoch:
            assert each["sampler"]["consumed"] - consumed == rows
        else:  # a last batch may be smaller
            assert each["epoch"] == epoch + 1
            assert 0 <= rows - (ROWS - consumed) < LOCAL_BATCH * each["world_size"]
        epoch, step = each["epoch"], each["step"]
        consumed = each["sampler"]["consumed"] % ROWS if each["sampler"]["epoch"] == epoch else 0
        world_sizes.add(each["world_size"])
    assert epoch == EPOCHS and world_sizes == {2, 4}


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
