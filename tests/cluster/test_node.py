"""Nodes on loopback: killed ranks and machines, meeting again, and what is left of it all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ddp_course import rendezvous
from ddp_course.launcher import janitor
from tests.cluster.node import Node

PROGRAM = str(Path(__file__).with_name("count_on_ranks.py"))
LIMIT_S = 90  # far more than needed: a machine that does other things too


def counting(folder: Path, steps: int = 10, hold_at: int = 5, timeout_s: float = 30) -> list[str]:
    return [PROGRAM, str(folder), str(steps), str(hold_at), str(timeout_s)]


def counted(folder: Path, to: int):
    return lambda: (folder / "count").exists() and int((folder / "count").read_text()) == to


def others(node: Node, before: dict[int, int]) -> bool:
    """Whether as many ranks are running, and all are new."""
    return len(now := node.rank_pids()) == len(before) and not set(now.values()) & set(before.values())


def told(*nodes: Node) -> list[dict]:
    lines = [line for node in nodes for line in node.output.splitlines() if line.startswith("{")]
    return sorted(map(json.loads, lines), key=lambda each: each["rank"])


# --- Which interface, and which round --------------------------------------------------------------


def test_the_interface_is_the_one_that_has_the_address():
    lo = rendezvous._interface_of("127.0.0.1")
    assert lo and lo.startswith("lo")
    assert rendezvous._interface_of("198.51.100.7") is None  # nobody's: reserved for documentation


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_whose_first_is_on_loopback_stay_there(host, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what it sets is gone after the test
    rendezvous.pin_interface(host)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == rendezvous._interface_of("127.0.0.1")


def test_the_users_interface_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setattr(rendezvous, "_address_towards", lambda host: "10.0.0.1")
    monkeypatch.setattr(rendezvous, "_interface_of", lambda address: "eth0")
    rendezvous.pin_interface("node7")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_name_that_means_home_is_refused(monkeypatch):
    monkeypatch.setattr(rendezvous, "_address_towards", lambda host: "127.0.1.1")
    with pytest.raises(ValueError, match=r"MASTER_ADDR=node7 stands for 127\.0\.1\.1 on this host.*--local-addr"):
        rendezvous.pin_interface("node7")


@pytest.mark.timeout(60)
def test_a_round_knows_nothing_of_the_one_before():
    """Of ranks that were killed the store still holds everything; of the next round, two ranks have come again."""
    store, _ = rendezvous.agent_store(3)
    limit = timedelta(seconds=20)
    names = []
    for world_size in (3, 2, 3):
        found: dict[int, dist.Store] = {}

        def enter(rank, found=found, world_size=world_size):
            found[rank] = rendezvous.enter_round(rank, world_size, client(store), limit)

        # Rank 0 last: the others find an old round first.
        threads = [threading.Thread(target=enter, args=(rank,)) for rank in reversed(range(world_size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(world_size))
        found[0].set("name", str(len(names)))
        names.append([found[rank].get("name").decode() for rank in range(world_size)])
        for rank in range(world_size):
            assert found[rank].add(f"claims/{rank}", 1) == 1
    assert names == [["0"] * 3, ["1"] * 2, ["2"] * 3]


@pytest.mark.timeout(60)
def test_a_round_names_who_is_missing():
    store, _ = rendezvous.agent_store(3)
    store.set("ddp_course/round", "of-ranks-long-gone")
    with pytest.raises(TimeoutError, match=r"rank 0: waited 0.3 s for 3 ranks; missing: ranks 1, 2;"):
        rendezvous.enter_round(0, 3, store, timedelta(seconds=0.3))
    with pytest.raises(TimeoutError, match=r"rank 2: waited 0.3 s for 3 ranks; missing: rank 0;"):
        rendezvous.enter_round(2, 3, store, timedelta(seconds=0.3))


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore(store.host, store.port, None, False, timedelta(seconds=20))


# --- Nodes -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("shared", ["0", "1"], ids=["the agent's store", "a store a round"])
def test_a_killed_rank_costs_one_restart(tmp_path, shared):
    """torch keeps the agents' store for all rounds unless told otherwise, with the addresses of the dead in it."""
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared}
    with Node(counting(tmp_path), max_restarts=3, environ=environ) as node:
        node.wait_until(counted(tmp_path, 5), LIMIT_S, "the count of 5")
        before = node.rank_pids()
        assert list(before) == [0, 1]
        if shared == "1":  # the default of a Node
            for pid in (os.getpid(), node._agent.pid, *before.values()):
                listening = {c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"}
                assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}, pid
        assert node.kill_rank(1) == before[1]
        node.wait_until(lambda: others(node, before), LIMIT_S, "a restart")
        (tmp_path / "go").touch()
        assert node.wait(LIMIT_S) == 0
        assert [(each["first"], each["restarts"]) for each in told(node)] == [(5, 1), (5, 1)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dead_node_is_done_without_and_may_come_back(tmp_path):
    elastic = {"nproc": 1, "nnodes": "1:2", "max_restarts": 3}
    with Node(counting(tmp_path), **elastic) as first:
        with Node(counting(tmp_path), endpoint=first.endpoint, **elastic) as second:
            first.wait_until(counted(tmp_path, 5), LIMIT_S, "the count of 5")
            assert len(second.rank_pids()) == 1
            old = first.rank_pids()
            second.kill()
            assert second.status == -signal.SIGKILL and janitor.marked(second._mark) == []
        first.wait_until(lambda: others(first, old), LIMIT_S, "a restart")
        with Node(counting(tmp_path), endpoint=first.endpoint, **elastic) as third:
            third.wait_until(lambda: third.rank_pids(), LIMIT_S, "a rank that joins")
            (tmp_path / "go").touch()
            assert (first.wait(LIMIT_S), third.wait(LIMIT_S)) == (0, 0)
            assert [(each["world_size"], each["first"]) for each in told(first, third)] == [(2, 5)] * 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_outlives_a_node_or_its_parent(tmp_path):
    script = f"""
import time
from tests.cluster.node import Node
node = Node({counting(tmp_path)!r})
node.wait_until(lambda: len(node.rank_pids()) == 2, {LIMIT_S})
print(node._mark, node._folder, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        mark, folder = parent.stdout.readline().split()
        assert len(janitor.marked(mark)) == 3 and Path(folder).exists()
    finally:
        parent.kill()  # as a notebook's kernel is
        parent.communicate()
    deadline = time.monotonic() + 20
    while (janitor.marked(mark) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert janitor.marked(mark) == [] and not Path(folder).exists()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_sigterm_reaches_the_ranks(tmp_path):
    script = tmp_path / "saves.py"
    script.write_text("""
import os, signal, sys
def say(line):  # in one write: two ranks share the pipe, and print() writes a line's end by itself
    os.write(1, line)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(say(b"saved\\n") or 143))
say(b"up\\n")
while True:
    signal.pause()
""")
    with Node([str(script)], max_restarts=3) as node:
        node.wait_until(lambda: node.output.count("up") == 2, LIMIT_S, "two ranks")
        node.terminate()
        assert node.wait(LIMIT_S) == 1  # and no restart
        assert node.output.split() == ["up", "up", "saved", "saved"]


@pytest.mark.slow
def test_a_node_says_what_is_wrong(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("import sys; print('so far'); sys.exit('no further')")
    with Node([str(script)], nproc=1) as node:
        assert node.wait(LIMIT_S) == 1
        assert node.output == "so far\n" and "no further" in node.errors
        with pytest.raises(RuntimeError, match="local rank 0 is not running; these are: none"):
            node.kill_rank(0)
        with pytest.raises(RuntimeError, match=r"ended with status 1 before a step\n(.*\n)*no further"):
            node.wait_until(lambda: False, 5, "a step")
    assert node.output == "so far\n"  # still there
