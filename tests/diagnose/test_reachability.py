"""Machines that meet: first what is worked out, then processes on loopback, then namespaces with addresses."""

from __future__ import annotations

import socket
import threading
from dataclasses import asdict, replace

import psutil
import pytest
import torch.distributed as dist

from ddp_course.diagnose import network, reachability
from ddp_course.diagnose.network import Interface
from ddp_course.diagnose.reachability import PREFIX, Meeting, Problem
from ddp_course.diagnose.reachability import Machine as Place
from ddp_course.rendezvous import agent_store, free_port
from tests.cluster.hosts import NETWORK, Hosts, ip, why_not
from tests.diagnose import machines
from tests.diagnose.machines import Machine

pytestmark = pytest.mark.timeout(120)

REFUSED = "refused: nobody listens there, or a firewall rejects it"
PLACES = [Place(f"node-{n}", f"10.0.0.{n}", 1, "eth0", "2.15.0") for n in range(4)]
NAMES = [f"rank {n} (node-{n}, eth0 10.0.0.{n})" for n in range(4)]


def test_a_pair_is_named_with_its_direction_and_a_machine_that_nobody_reaches_once():
    assert reachability.blame(PLACES, {(1, 3): "a"}) == f"{NAMES[3]} cannot be reached from {NAMES[1]}: a"
    assert reachability.blame(PLACES[:2], {(0, 1): "a"}) == f"{NAMES[1]} cannot be reached from {NAMES[0]}: a"
    alone = {(by, 2): "a" for by in (0, 1, 3)}
    assert reachability.blame(PLACES, alone) == f"{NAMES[2]} cannot be reached from any other: a"
    sentences = reachability.blame(PLACES, {(2, 1): "a", (0, 1): "b", (2, 0): "c"}).split("; ")
    assert sentences[0] == f"{NAMES[0]} cannot be reached from {NAMES[2]}: c"
    assert sentences[1] == f"{NAMES[1]} cannot be reached from {NAMES[0]} and {NAMES[2]}: b"


@pytest.mark.parametrize(
    ("rendezvous", "found"),
    [
        *((wrong, "is not HOST:PORT") for wrong in ("10.0.0.1", "10.0.0.1:0", ":29500", "10.0.0.1:http")),
        ("no-such-host.invalid:29500", "no-such-host.invalid resolves to nothing here"),
        ("0.0.0.0:29500", "0.0.0.0 is no machine's address"),
        ("[::]:29500", "no machine's address"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused_before_anything_is_opened(rendezvous, found):
    with pytest.raises(Problem, match=found):
        reachability.find(rendezvous)


def test_a_name_becomes_an_address_of_ipv4_where_there_is_one():
    assert reachability.find("localhost:29500") == ("127.0.0.1", 29500)
    assert reachability.find("[::1]:29500") == ("::1", 29500)


def test_a_sum_that_is_wrong_on_one_rank_is_known_to_all(two_ranks):
    for mistake in (False, True):
        (here, seconds), there = two_ranks.run(sum_with_a_mistake, (mistake,))
        assert (here, seconds) == there and here is not mistake and seconds > 0


def sum_with_a_mistake(rank: int, world_size: int, mistake: bool):
    honest = dist.all_reduce

    def off_by_one(tensor, op=dist.ReduceOp.SUM):
        honest(tensor, op)
        tensor[7 % len(tensor)] += mistake * rank * (op == dist.ReduceOp.SUM)

    dist.all_reduce = off_by_one
    try:
        return reachability.add_up()
    finally:
        dist.all_reduce = honest


def test_versions_and_interfaces_that_differ_are_warnings_below_who_is_who(monkeypatch):
    there = (Interface("br-0", ("172.18.0.1",)), Interface("eth0", ("10.0.0.1",)))
    monkeypatch.setattr(network, "interfaces", lambda: there)
    monkeypatch.setattr(network, "resolve", lambda name: (("127.0.1.1",), ""))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    meeting = Meeting(2, "node-0:29500", 30, 1, [PLACES[0], replace(PLACES[1], torch="2.14.0")])
    reachability.warn(meeting, "10.0.0.1", "eth0")
    versions, interface = meeting.verdicts
    assert (versions.state, versions.found) == ("warning", "different: 2.14.0, 2.15.0")
    assert interface.found.startswith("gloo alone would announce 127.0.0.1 here, not 10.0.0.1")
    assert interface.found.endswith("resolves to 127.0.1.1; NCCL alone would take br-0 first, not eth0")
    assert interface.cure == "before training here: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    lines = reachability.as_text(meeting).splitlines()
    assert lines[0] == "meeting of 2 at node-0:29500"
    assert lines[1].split(maxsplit=6) == ["rank", "0", "node-0", "10.0.0.0", "eth0", "2.15.0", "(opened the meeting)"]
    assert lines[2].split(maxsplit=6) == ["rank", "1", "node-1", "10.0.0.1", "eth0", "2.14.0", "(this machine)"]
    assert lines[-1] == "2 checks: 0 problems, 2 warnings"


# --- At the store ----------------------------------------------------------------------------------


@pytest.fixture
def meet():
    """A function that returns a machine of three at one store, where rank 0 has posted already."""
    store, _ = agent_store(3)

    def one(rank: int | None = None, limit_s: float = 5) -> Meeting:
        return Meeting(3, "node-0:29500", limit_s, rank, store=dist.PrefixStore(PREFIX, store))

    one(0).post("machine", asdict(PLACES[0]))
    return one


def test_one_too_many_is_turned_away_and_takes_no_rank(meet):
    meet().store.add("came", 2)
    late = meet()
    with pytest.raises(Problem, match="this is number 4, and 3 were expected"):
        reachability.try_pairs(late, "127.0.0.1", "lo", opened=False)
    assert late.rank is None and late.gather("machine", 5).keys() == {0}


def test_a_machine_with_less_time_than_rank_0_says_itself_who_is_missing(meet):
    with pytest.raises(Problem, match="2 of 3 came within 0 s; missing: rank 2"):
        reachability.try_pairs(meet(limit_s=0.1), "127.0.0.1", "lo", opened=False)


def test_who_came_and_left_before_the_pairs_were_tried_is_named(meet):
    with network.listen("127.0.0.1", 0) as door:
        for rank in (0, 2):
            meet(rank).post("machine", asdict(Place("node-1", *door.getsockname(), "lo")))
        meet(2).post("errors", [])
        meet().store.set("closed", "")  # rank 0 has given up
        with pytest.raises(Problem, match=r"stopped answering: rank 0 \(node-1, lo 127.0.0.1\)"):
            reachability.try_pairs(meet(), "127.0.0.1", "lo", opened=False)


def test_rank_0_stays_until_the_others_have_heard(meet):
    meet().store.add("came", 1)
    leaving = threading.Thread(target=meet(0).leave)
    leaving.start()
    meet().gather("machine", 0)  # waits for three, and ends as soon as rank 0 has closed
    assert leaving.is_alive()
    meet(1).leave()
    leaving.join(reachability.GOODBYE_S / 2)
    assert not leaving.is_alive()


def test_rank_0_that_is_gone_is_said(monkeypatch, capsys):
    def lose(meeting: Meeting):
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(reachability, "meet", lose)
    monkeypatch.setattr(reachability.os, "_exit", lambda status: None)
    assert reachability.run(2, "127.0.0.1:29500", 5, as_json=False) == 1
    assert "rank 0, which opened the meeting, has left it: Connection reset by peer" in capsys.readouterr().out


def test_a_meeting_listens_on_the_address_that_it_was_given_alone():
    def listening() -> set[tuple[str, int]]:
        return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}

    before, port, meeting = listening(), free_port(), Meeting(2, "", 5)
    assert reachability.open_or_call(meeting, "127.0.0.1", port)
    assert listening() - before == {("127.0.0.1", port)}


# --- Processes on loopback -------------------------------------------------------------------------


def line(world_size: int, host: str, port: int, timeout_s: float = 15.0) -> list[str]:
    return ["--world-size", str(world_size), "--rendezvous", f"{host}:{port}", "--json", "--timeout", str(timeout_s)]


def test_three_processes_meet_and_add_up(tmp_path, nothing_left):
    told = machines.run([Machine(line(3, "127.0.0.1", free_port()))] * 3, tmp_path)
    assert [each.status for each in told] == [0, 0, 0], told
    assert sorted(each.report["rank"] for each in told) == [0, 1, 2]
    assert {m["address"] for each in told for m in each.report["machines"]} == {"127.0.0.1"}
    assert told[0].verdicts == told[1].verdicts == told[2].verdicts
    assert {v["name"]: v["state"] for v in told[0].report["verdicts"]} == {
        name: "ok" for name in ("arrival", "pairs", "all_reduce")
    }
    assert "the sum over 3 ranks is right on each; 4 MB in " in told[0].verdicts["all_reduce"]["found"]


def test_who_did_not_come_is_a_number_and_who_came_is_a_name(tmp_path):
    port = free_port()
    told = machines.run([Machine(line(3, "127.0.0.1", port, 3)), Machine(line(3, "127.0.0.1", port, 6))], tmp_path)
    for each in told:  # the one with more time saw the other close, or opened the meeting itself
        assert (each.status, each.problem["name"]) == (1, "arrival"), told
        assert "2 of 3 came within" in each.problem["found"] and each.problem["found"].endswith("missing: rank 2")
        assert f"rank 1 ({socket.gethostname()}, lo 127.0.0.1)" in each.problem["cure"]
        assert "127.0.0.1, which no other machine can reach" in each.problem["cure"]


def test_machines_that_disagree_about_their_number_say_so(tmp_path):
    port = free_port()
    told = machines.run([Machine(line(2, "127.0.0.1", port, 3)), Machine(line(3, "127.0.0.1", port, 3))], tmp_path)
    by_name = {each.problem["name"]: each.problem["found"] for each in told}
    assert set(by_name) == {"arrival", "world size"}, told  # the one that opened the meeting, and its caller
    assert "where the meeting was opened" in by_name["world size"]
    assert f"; {socket.gethostname()} came with --world-size" in by_name["arrival"]


def test_a_call_that_never_returns_ends_with_the_time_limit(tmp_path):
    (told,) = machines.run([Machine(line(2, "127.0.0.1", free_port(), 1), stuck=True)], tmp_path)
    assert (told.status, told.problem["name"]) == (1, "time limit")
    assert told.problem["found"] == "1 s were over while looking for the others"


def test_a_port_that_another_program_has_is_named_and_nothing_is_left_in_another_jobs_store(tmp_path):
    store, variables = agent_store(2)
    before = store.num_keys()
    with network.listen("127.0.0.1", 0) as silent:
        for port in (silent.getsockname()[1], variables["MASTER_PORT"]):
            (told,) = machines.run([Machine(line(2, "127.0.0.1", port))], tmp_path)
            assert told.status == 1
            assert told.problem["found"] == f"port {port} at 127.0.0.1 is taken by another program, not by a meeting"
            assert f"ss -ltnp 'sport = :{port}'" in told.problem["cure"]
    assert store.num_keys() == before


# --- Machines with addresses of their own ----------------------------------------------------------


@pytest.fixture(scope="module")
def three():
    """Three hosts on a switch, with the addresses .1 to .3."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield hosts.names


def at(hosts: list[str], port: int, timeout_s: float = 15.0, **environ: dict[str, str]) -> list[Machine]:
    """One machine on each host, called node-1 and so on; the first owns the meeting's address."""
    options = line(3, f"{NETWORK}1", port, timeout_s)
    return [Machine(options, host, f"node-{n}", environ.get(f"node_{n}", {})) for n, host in enumerate(hosts, 1)]


@pytest.mark.cluster
def test_three_hosts_meet_over_their_own_addresses(tmp_path, three):
    told = machines.run(at(three, 29500), tmp_path)
    assert [each.status for each in told] == [0, 0, 0], told
    assert told[0].report["rank"] == 0  # it owns the address
    for each in told:
        found = {(m["host"], m["interface"], m["address"]) for m in each.report["machines"]}
        assert found == {(f"node-{n}", "eth0", f"{NETWORK}{n}") for n in (1, 2, 3)}
        assert each.verdicts["all_reduce"]["state"] == "ok"
        # node-1 is no name that resolves, so gloo alone would announce loopback.
        assert each.verdicts["interface"]["state"] == "warning"
        assert "gloo alone would announce 127.0.0.1 here" in each.verdicts["interface"]["found"]
        assert each.verdicts["interface"]["cure"].endswith("export GLOO_SOCKET_IFNAME=eth0")


@pytest.mark.cluster
def test_a_host_whose_cable_is_out_is_missing_and_says_that_it_has_no_way(tmp_path, three):
    ip("-n", three[2], "link", "set", "eth0", "down")
    try:
        told = machines.run(at(three, 29501, 3), tmp_path)
    finally:
        ip("-n", three[2], "link", "set", "eth0", "up")
    assert [each.status for each in told] == [1, 1, 1], told
    for each in told[:2]:
        assert each.problem["found"].endswith("missing: rank 2")
        assert f"rank 0 (node-1, eth0 {NETWORK}1); rank 1 (node-2, eth0 {NETWORK}2)" in each.problem["cure"]
    assert (told[2].problem["name"], told[2].problem["found"]) == ("route", f"node-3 has no way to {NETWORK}1")


@pytest.mark.cluster
def test_a_pair_that_a_firewall_parts_is_named_before_gloo_would_hang(tmp_path, three):
    ip("-n", three[1], "route", "add", "blackhole", f"{NETWORK}3/32")
    try:
        told = machines.run(at(three, 29502), tmp_path)
    finally:
        ip("-n", three[1], "route", "del", "blackhole", f"{NETWORK}3/32")
    assert [each.status for each in told] == [1, 1, 1], told
    found = told[0].problem["found"]
    assert {each.problem["found"] for each in told} == {found}  # all tell the same
    ranks = {m["host"]: rank for rank, m in enumerate(told[0].report["machines"])}
    two, three_ = (f"rank {ranks[f'node-{n}']} (node-{n}, eth0 {NETWORK}{n})" for n in (2, 3))
    assert f"{three_} cannot be reached from {two}: no way there: a route that drops" in found
    assert f"{two} cannot be reached from {three_}: no answer: a firewall that drops" in found
    assert "node-1" not in found
    assert told[0].problem["cure"].startswith("open all TCP ports between the machines")


@pytest.mark.cluster
def test_a_host_that_announces_loopback_is_named(tmp_path, three):
    told = machines.run(at(three, 29503, node_2={"GLOO_SOCKET_IFNAME": "lo"}), tmp_path)
    assert [each.status for each in told] == [1, 1, 1], told
    assert f"(node-2, lo 127.0.0.1) cannot be reached from any other: {REFUSED}" in told[0].problem["found"]
    assert "name another interface in GLOO_SOCKET_IFNAME there" in told[0].problem["cure"]


@pytest.mark.cluster
def test_an_interface_or_a_machine_that_is_not_there_is_named_with_those_there_are(tmp_path, three):
    astray = Machine(line(2, f"{NETWORK}9", 29505, 2), three[1], "node-2")
    told = machines.run([*at(three[:1], 29504, node_1={"GLOO_SOCKET_IFNAME": "ib0"}), astray], tmp_path)
    assert told[0].problem["found"] == "GLOO_SOCKET_IFNAME=ib0, which has no address here; found lo, eth0"
    assert told[1].problem["found"].startswith(f"nobody opened the meeting at {NETWORK}9:29505 in 2 s: no ")
    assert f"run the same line on the machine that has {NETWORK}9" in told[1].problem["cure"]
    assert f"this machine (node-2) has eth0 {NETWORK}2" in told[1].problem["cure"]
