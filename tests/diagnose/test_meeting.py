"""Machines that meet: first what is worked out, then processes on loopback, then namespaces with addresses."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from ddp_course.diagnose import arrival, measure, pairs
from ddp_course.diagnose.arrival import Clock
from ddp_course.diagnose.board import Board
from ddp_course.diagnose.pairs import Doorbell, Guest
from ddp_course.diagnose.verdict import Problem, Verdict
from ddp_course.rendezvous import agent_store, free_port, listen_on
from tests.cluster.hosts import NETWORK, Hosts, ip, why_not
from tests.diagnose import machines
from tests.diagnose.machines import Machine

pytestmark = pytest.mark.timeout(120)

REFUSED = "refused: nobody listens there, or a firewall rejects it"


def guest(number: int, port: int = 1, token: str = "t") -> Guest:
    return Guest(f"node-{number}", f"10.0.0.{number}", port, token, "eth0", "2.15.0")


# --- Worked out ------------------------------------------------------------------------------------


def test_bandwidths_are_those_of_nccl_tests():
    found = measure.rate(1_000_000, 3, 0.001, world_size=4)  # 1 MB in 1 ms
    assert found.algorithm_GB_s == pytest.approx(1.0) and found.bus_GB_s == pytest.approx(1.5)  # 2 (4 - 1) / 4
    assert measure.rate(1_000_000, 3, 0.001, world_size=2).bus_GB_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (16_000_000, [4, 65536, 1048576, 16_000_000]),
        (64_000_000, [4, 65536, 1048576, 16777216, 64_000_000]),
        (1001, [4, 1000]),
        (1, [4, 4]),
    ],
)
def test_sizes_grow_up_to_the_largest_and_hold_whole_numbers(largest, sizes):
    assert measure.sizes_up_to(largest) == sizes


NODE = [f"rank {n} (node-{n}, 10.0.0.{n})" for n in range(4)]


@pytest.mark.parametrize(
    ("machines", "errors", "sentences"),
    [
        (4, {rank: {} for rank in range(4)}, []),
        (4, {1: {3: "no answer"}}, [f"{NODE[3]} cannot be reached from {NODE[1]}: no answer"]),
        (2, {0: {1: "no answer"}}, [f"{NODE[1]} cannot be reached from {NODE[0]}: no answer"]),
        (4, {rank: {2: "no answer"} for rank in (0, 1, 3)}, [f"{NODE[2]} cannot be reached by any other: no answer"]),
        (
            4,
            {2: {0: "a", 1: "a", 3: "a"}, 0: {1: "b"}},
            [f"{NODE[2]} cannot reach any other: a", f"{NODE[1]} cannot be reached from {NODE[0]}: b"],
        ),
    ],
)
def test_a_pair_is_named_with_its_direction_and_a_machine_that_reaches_nobody_once(machines, errors, sentences):
    assert pairs.blame([guest(n) for n in range(machines)], errors) == "; ".join(sentences)


@pytest.mark.parametrize(
    ("rendezvous", "found"),
    [
        ("10.0.0.1", "is not HOST:PORT"),
        ("10.0.0.1:0", "is not HOST:PORT"),
        (":29500", "is not HOST:PORT"),
        ("10.0.0.1:http", "is not HOST:PORT"),
        ("no-such-host.invalid:29500", "no-such-host.invalid resolves to nothing here"),
        ("0.0.0.0:29500", "0.0.0.0 is no machine's address"),
        ("[::]:29500", "no machine's address"),
    ],
)
def test_a_rendezvous_that_cannot_be_is_refused_before_anything_is_opened(rendezvous, found):
    with pytest.raises(Problem, match=found):
        arrival.find(rendezvous)


def test_a_name_becomes_an_address_of_ipv4_where_there_is_one():
    assert arrival.find("localhost:29500") == ("127.0.0.1", 29500)
    assert arrival.find("[::1]:29500") == ("::1", 29500)


# --- At the store ----------------------------------------------------------------------------------


def test_one_too_many_is_turned_away_and_takes_no_rank():
    store, _ = agent_store(2)
    assert [arrival.sign_in(store, guest(n), 2, opened=n == 0) for n in range(2)] == [0, 1]
    with pytest.raises(Problem, match="this is number 3, and 2 were expected"):
        arrival.sign_in(store, guest(2), 2, opened=False)
    board = Board(store, 0, 2, Clock(5))
    assert [each.host for each in board.gather_guests()] == ["node-0", "node-1"]


def test_who_came_and_left_before_the_pairs_were_tried_is_named():
    store, _ = agent_store(3)
    guests = [guest(n) for n in range(3)]
    board = Board(store, 0, 3, Clock(0.2))
    board.post("reached/0", {})
    board.post("reached/2", {})
    with pytest.raises(Problem, match=r"stopped answering: rank 1 \(node-1, 10.0.0.1\)$"):
        board.gather_reached(guests)


def test_a_guest_with_less_time_than_rank_0_says_itself_who_is_missing():
    store, _ = agent_store(3)
    arrival.sign_in(store, guest(0), 3, opened=True)
    assert arrival.sign_in(store, guest(1), 3, opened=False) == 1
    with pytest.raises(Problem, match="2 of 3 came within 0 s; missing: rank 2$"):
        Board(store, 1, 3, Clock(0.1)).wait_for("guests")


def test_the_end_that_rank_0_tells_is_told_by_all_and_rank_0_hears_that_they_heard():
    store, _ = agent_store(2)
    arrival.sign_in(store, guest(1), 2, opened=False)
    waiting = Board(store, 1, 2, Clock(10))
    heard: list[Problem] = []

    def wait() -> None:
        try:
            waiting.wait_for("guests")
        except Problem as problem:
            heard.append(problem)

    thread = threading.Thread(target=wait)
    thread.start()
    Board(store, 0, 2, Clock(10)).tell_all(Verdict("pairs", "problem", "found this", "do that"))
    assert store.add(f"{arrival.PREFIX}/left", 0) == 1  # rank 0 stayed until it was heard
    thread.join(10)
    assert [each.verdict for each in heard] == [Verdict("pairs", "problem", "found this", "do that")]


def test_rank_0_that_leaves_is_said():
    listener = listen_on()
    port = listener.getsockname()[1]
    rank0 = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    guest_store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    board = Board(guest_store, 1, 2, Clock(10))
    del rank0
    with pytest.raises(Problem, match="rank 0, which opened the meeting, has left it"):
        board.wait_for("guests")


# --- The doorbell ----------------------------------------------------------------------------------


def test_a_doorbell_answers_many_and_its_token_tells_it_from_others():
    with Doorbell("127.0.0.1", 2) as bell:
        here = Guest("here", "127.0.0.1", bell.port, bell.token, "lo", "")
        silent = socket.create_connection(("127.0.0.1", bell.port))  # stays on the line and stops nobody
        assert [pairs.ring(here, 5) for _ in range(20)] == [""] * 20
        stranger = Guest("there", "127.0.0.1", bell.port, "another token", "lo", "")
        assert pairs.ring(stranger, 5) == "another machine answers at this address"
        assert pairs.try_all([here, here, stranger], 0, 5) == {2: "another machine answers at this address"}
        silent.close()
    assert pairs.ring(here, 5) == REFUSED


def test_a_door_behind_which_nobody_speaks_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert "no answer within 0.2 s" in pairs.ring(Guest("mute", "127.0.0.1", port, "t", "", ""), 0.2)


def test_nobody_at_home_is_said_with_what_was_in_the_way_and_what_to_run_where():
    with pytest.raises(Problem) as told:
        arrival.knock("node-a:29500", "127.0.0.1", free_port(), Clock(0.3))
    assert str(told.value) == f"nobody opened the meeting at node-a:29500 in 0.3 s: {REFUSED}"
    assert "run the same line on the machine that has 127.0.0.1" in told.value.verdict.cure


# --- On ranks --------------------------------------------------------------------------------------


def sums_and_sizes(rank: int, world_size: int):
    """What measure says, on two ranks; and when the second adds up wrongly, or has no time left."""
    import torch.distributed as dist

    from ddp_course.diagnose import measure

    right, honest = measure.sum_is_right(), dist.all_reduce

    def off_by_one(tensor, op=dist.ReduceOp.SUM):
        honest(tensor, op)
        if op == dist.ReduceOp.SUM:
            tensor[7] += rank

    dist.all_reduce = off_by_one
    try:
        wrong = measure.sum_is_right()
    finally:
        dist.all_reduce = honest
    sizes = [found.bytes for found in measure.measure(10**6, lambda: 0.0 if rank else 1e9)]
    return right, wrong, sizes


def test_a_wrong_sum_on_one_rank_and_one_ranks_lack_of_time_are_known_to_all(two_ranks):
    assert two_ranks.run(sums_and_sizes) == [(True, False, [4])] * 2


# --- Processes on loopback -------------------------------------------------------------------------


def line(world_size: int, host: str, port: int, timeout_s: float = 15.0) -> list[str]:
    options = ["--json", "--megabytes", "1", "--timeout", str(timeout_s)]
    return ["--world-size", str(world_size), "--rendezvous", f"{host}:{port}", *options]


def test_three_processes_meet_add_up_and_measure(tmp_path, nothing_left):
    told = machines.run([Machine(line(3, "127.0.0.1", free_port()))] * 3, tmp_path)
    assert [each.status for each in told] == [0, 0, 0], told
    assert sorted(each.report["rank"] for each in told) == [0, 1, 2]
    for each in told:
        assert [v["name"] for v in each.report["verdicts"]][:3] == ["arrival", "pairs", "all_reduce"]
        assert {v["state"] for v in each.report["verdicts"]} == {"ok"}
        assert each.report["measured"] == told[0].report["measured"]  # they agreed on the numbers
        assert {m["address"] for m in each.report["machines"]} == {"127.0.0.1"}
    rows = told[0].report["measured"]
    assert [row["bytes"] for row in rows] == [4, 65536, 1_000_000]
    for row in rows:
        assert row["algorithm_GB_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["bus_GB_s"] == pytest.approx(row["algorithm_GB_s"] * 4 / 3)


def test_who_did_not_come_is_a_number_and_who_came_is_a_name(tmp_path):
    port = free_port()
    told = machines.run([Machine(line(3, "127.0.0.1", port, 3)), Machine(line(3, "127.0.0.1", port, 6))], tmp_path)
    for each in told:  # the one with more time heard it from the other, or opened the meeting itself
        assert (each.status, each.problem["name"]) == (1, "arrival"), told
        assert "2 of 3 came within" in each.problem["found"] and each.problem["found"].endswith("missing: rank 2")
        assert f"rank 1 ({socket.gethostname()}, 127.0.0.1)" in each.problem["cure"]
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
    assert told.problem["found"] == "1 s were over while waiting for the others"


@contextlib.contextmanager
def stranger(speaks: bytes | None):
    """A program that has the port: it says something and hangs up, or stays silent."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    held.append(caller)
                    if speaks is not None:
                        caller.sendall(speaks)
                        caller.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    for caller in held:
        caller.close()


@pytest.mark.parametrize("speaks", [None, b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_a_port_that_another_program_has_is_named(tmp_path, speaks):
    with stranger(speaks) as port:
        (told,) = machines.run([Machine(line(2, "127.0.0.1", port))], tmp_path)
    assert told.status == 1
    assert told.problem["found"] == f"port {port} on this machine is taken by another program, not by a meeting"
    assert f"ss -ltnp 'sport = :{port}'" in told.problem["cure"]


def test_another_jobs_store_is_not_a_meeting_and_nothing_is_left_in_it(tmp_path):
    store, variables = agent_store(2)
    before = store.num_keys()
    (told,) = machines.run([Machine(line(2, "127.0.0.1", int(variables["MASTER_PORT"])))], tmp_path)
    assert "taken by another program, not by a meeting" in told.problem["found"]
    assert store.num_keys() == before


@pytest.mark.slow
def test_the_command_prints_a_table_and_opens_nothing_but_the_address_it_was_given():
    port = free_port()
    command = [sys.executable, "-m", "ddp_course.cli", "doctor"]
    command += ["--world-size", "2", "--rendezvous", f"127.0.0.1:{port}", "--timeout", "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while process.poll() is None:  # until the meeting is open
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
        listening = machines.listening_at(process.pid)
        told = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert listening == {"127.0.0.1"}
    assert process.returncode == 1
    assert told.startswith(f"meeting of 2 at 127.0.0.1:{port}, ")
    assert "\nPROBLEM  arrival          1 of 2 came within 2 s; missing: rank 1\n" in told
    assert "1 checks: 1 problems, 0 warnings" in told


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
        assert {m["host"]: m["address"] for m in each.report["machines"]} == {
            "node-1": f"{NETWORK}1",
            "node-2": f"{NETWORK}2",
            "node-3": f"{NETWORK}3",
        }
        assert {m["interface"] for m in each.report["machines"]} == {"eth0"}
        assert each.verdicts["all_reduce"]["state"] == "ok"
        # node-1 is no name that resolves, so gloo alone would announce loopback.
        assert each.verdicts["interface"]["state"] == "warning"
        found = each.verdicts["interface"]["found"]
        assert "gloo alone would announce 127.0.0.1 here" in found and found.endswith("resolves to nothing")
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
        assert f"rank 0 (node-1, {NETWORK}1); rank 1 (node-2, {NETWORK}2)" in each.problem["cure"]
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
    two, three_ = f"rank {ranks['node-2']} (node-2, {NETWORK}2)", f"rank {ranks['node-3']} (node-3, {NETWORK}3)"
    assert f"{three_} cannot be reached from {two}: no way there: a route that drops" in found
    assert f"{two} cannot be reached from {three_}: no answer within 3 s" in found
    assert "node-1" not in found
    assert told[0].problem["cure"].startswith("open all TCP ports between the machines")


@pytest.mark.cluster
def test_a_host_that_announces_loopback_is_named(tmp_path, three):
    told = machines.run(at(three, 29503, node_2={"GLOO_SOCKET_IFNAME": "lo"}), tmp_path)
    assert [each.status for each in told] == [1, 1, 1], told
    assert f"(node-2, 127.0.0.1) cannot be reached by any other: {REFUSED}" in told[0].problem["found"]


@pytest.mark.cluster
def test_a_host_with_an_interface_that_is_not_there_says_which_there_are(tmp_path, three):
    told = machines.run(at(three[:1], 29504, node_1={"GLOO_SOCKET_IFNAME": "ib0"}), tmp_path)
    assert told[0].problem["found"] == "GLOO_SOCKET_IFNAME=ib0, which has no address here; found lo, eth0"


@pytest.mark.cluster
def test_a_meeting_whose_machine_is_not_there_is_given_up_within_the_limit(tmp_path, three):
    options = line(2, f"{NETWORK}9", 29505, 2)
    (told,) = machines.run([Machine(options, three[0], "node-1")], tmp_path)
    assert told.problem["found"].startswith(f"nobody opened the meeting at {NETWORK}9:29505 in 2 s: no ")
    assert f"this machine (node-1) has eth0 {NETWORK}1" in told.problem["cure"]
