"""Can these machines train together?

Each runs the same line. The one that owns HOST opens the meeting there, on that one address; the others call. Ranks
are given by order of arrival. Then every pair tries a plain TCP connection, with a limit, so that a machine that
cannot be reached is named before gloo would hang on it. Only then gloo opens a group, adds up, and is measured.

Whoever opened the meeting decides and tells the others, so every machine prints the same verdict. All of it fits in
one time limit. What is exchanged is JSON: nothing that came over the network is executed.

Left out on purpose: NCCL and InfiniBand; nccl-tests measures those.
Read next: `arrival.py`, `board.py`, `pairs.py` and `measure.py`, its steps in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_course.diagnose import arrival, network, pairs
from ddp_course.diagnose.arrival import Clock
from ddp_course.diagnose.board import Board
from ddp_course.diagnose.measure import Measured, measure, sum_is_right
from ddp_course.diagnose.pairs import Doorbell, Guest
from ddp_course.diagnose.verdict import Problem, Verdict, exit_status, table

GUARD_S = 2.0  # after the limit, for a call that is stuck in compiled code


@dataclass
class Report:
    """What this machine can tell about the meeting, also when it failed half-way."""

    world_size: int
    rendezvous: str
    phase: str = "finding the meeting"  # what is being done just now
    rank: int | None = None
    machines: list[Guest] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)

    def say(self, name: str, found: str, state: str = "ok", cure: str = "") -> None:
        self.verdicts.append(Verdict(name, state, found, cure))


# --- Telling ---------------------------------------------------------------------------------------


def run(world_size: int, rendezvous: str, limit_s: float, megabytes: float, as_json: bool) -> int:
    """Meet, print what came of it, and return 1 if there was a problem, else 0.

    Should anything get stuck in compiled code for longer than the limit allows, the process says so and ends.

    Collective: as `meet`.
    """
    report, clock = Report(world_size, rendezvous), Clock(limit_s)
    with time_limit(report, clock, as_json), quiet_stderr():
        ended = try_to_meet(report, clock, int(megabytes * 1e6))
    status = exit_status(report.verdicts)
    if not ended:
        # A store or a group that lost its peers can hang or abort while Python takes it down.
        sys.stdout.flush()
        os._exit(status)
    return status


@contextlib.contextmanager
def time_limit(report: Report, clock: Clock, as_json: bool) -> Iterator[None]:
    """Tell the report when the block ends; past the limit, tell it all the same, and end the process."""
    telling = threading.Lock()

    def give_up() -> None:
        with telling:
            cure = "run it again; if it stays, look at the other machines' output, and give --timeout more"
            report.say("time limit", f"{clock.limit_s:g} s were over while {report.phase}", "problem", cure)
            tell(report, clock, as_json)
            os._exit(1)

    guard = threading.Timer(clock.limit_s + GUARD_S, give_up)
    guard.daemon = True
    guard.start()
    yield
    with telling:
        guard.cancel()
        tell(report, clock, as_json)


def try_to_meet(report: Report, clock: Clock, largest_bytes: int) -> bool:
    """Hold the meeting; return False, with the reason in the report, if a problem ended it.

    Collective: as `meet`.
    """
    try:
        meet(report, clock, largest_bytes)
        return True
    except Problem as problem:
        report.verdicts.append(problem.verdict)
    except dist.DistError as error:
        lost = f"the connection to rank 0, which opened the meeting, broke: {str(error).splitlines()[0]}"
        report.say("meeting", lost, "problem", "read what rank 0 printed, and run all again")
    return False


def tell(report: Report, clock: Clock, as_json: bool) -> None:
    print(json.dumps(as_data(report), indent=2) if as_json else as_text(report, clock.passed()), flush=True)


def as_text(report: Report, seconds: float) -> str:
    lines = [f"meeting of {report.world_size} at {report.rendezvous}, {seconds:.1f} s"]
    for rank, guest in enumerate(report.machines):
        notes = ["opened the meeting"] * (rank == 0) + ["this machine"] * (rank == report.rank)
        note = f"  ({', '.join(notes)})" if notes else ""
        lines.append(f"  rank {rank:<3} {guest.host:20} {guest.address:15} {guest.interface:10} {guest.torch}{note}")
    lines += ["", table(report.verdicts)]
    if report.measured:
        lines.append(f"\n{'bytes':>12} {'repeats':>8} {'ms':>10} {'algorithm GB/s':>15} {'bus GB/s':>9}")
        lines += [
            f"{m.bytes:12,} {m.repeats:8} {m.seconds * 1e3:10.3f} {m.algorithm_GB_s:15.3f} {m.bus_GB_s:9.3f}"
            for m in report.measured
        ]
    return "\n".join(lines)


def as_data(report: Report) -> dict:
    """Return the report for `--json`; without the addresses of doorbells, which are closed by now."""
    data = asdict(report)
    del data["phase"]
    for guest in data["machines"]:
        del guest["port"], guest["token"]
    return data


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep torch's C++ warnings, a page for each lost connection, from hiding the verdict."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        kept = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


# --- The meeting -----------------------------------------------------------------------------------


def meet(report: Report, clock: Clock, largest_bytes: int) -> None:
    """Hold the meeting and fill in the report.

    Raises:
        Problem: with the verdict that ended it.
    Collective: every rank of the meeting, once.
    """
    address, port = arrival.find(report.rendezvous)
    own, interface = arrival.own_place(address)
    report.phase = "looking for the others"
    store, opened = arrival.open_or_call(report.rendezvous, address, port, report.world_size, clock)
    with Doorbell(own, report.world_size) as bell:
        mine = Guest(socket.gethostname(), own, bell.port, bell.token, interface, torch.__version__)
        report.rank = arrival.sign_in(store, mine, report.world_size, opened)
        report.phase = "waiting for the others" if opened else f"waiting for word from rank 0, at {report.rendezvous}"
        board = Board(store, report.rank, report.world_size, clock)
        try:
            report.machines = board.gather_guests() if opened else [Guest(**told) for told in board.wait_for("guests")]
            report.say("arrival", f"all {report.world_size} came")
            report.phase = "trying each pair"
            errors = pairs.try_all(report.machines, report.rank, min(pairs.LIMIT_S, clock.left()))
            board.post(f"reached/{report.rank}", errors)
            if opened:
                board.gather_reached(report.machines)
            else:
                board.wait_for("pairs")
        except Problem as problem:
            if opened:
                board.tell_all(problem.verdict)
            raise
    report.say("pairs", f"each of {report.world_size} reached each other, on a port of the system's choice")
    compare_versions(report)
    hint_at_gloo(report, own, interface)
    report.phase = "adding up over gloo"
    work(report, store, interface, clock, largest_bytes)
    board.leave(opened)


# --- The work --------------------------------------------------------------------------------------


def compare_versions(report: Report) -> None:
    if len(versions := {guest.torch for guest in report.machines}) > 1:
        cure = "install the same torch everywhere: what ranks send each other may change with the version"
        report.say("versions", f"different: {', '.join(sorted(versions))}", "warning", cure)


def hint_at_gloo(report: Report, own: str, interface: str) -> None:
    """Warn where gloo, left to itself, would announce another address than the one that worked here."""
    if network.gloo_names(os.environ) or network.is_loopback(own) or not interface:
        return
    addresses, _ = network.resolve(socket.gethostname())
    alone = network.gloo_address({}, network.interfaces(), addresses)
    if alone != own:
        name = f"the host name {socket.gethostname()}, which resolves to {' '.join(addresses) or 'nothing'}"
        found = f"gloo alone would announce {alone} here, not {own}: it goes by {name}"
        report.say("interface", found, "warning", f"before training here: export GLOO_SOCKET_IFNAME={interface}")


def work(report: Report, store: dist.Store, interface: str, clock: Clock, largest_bytes: int) -> None:
    """Open a gloo group over the interface that leads to HOST, add up, and measure.

    Collective: init_process_group, many all_reduces, one barrier; every rank.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"{arrival.PREFIX}/gloo", store),
            rank=report.rank,
            world_size=report.world_size,
            timeout=timedelta(seconds=max(clock.left(), 1.0)),
        )
        if not sum_is_right():
            cure = "look for broken memory or network hardware; run it again with pairs of machines"
            raise Problem("all_reduce", "the sum is wrong", cure)
        report.say("all_reduce", f"the sum over {report.world_size} ranks is right on each")
        report.measured = measure(largest_bytes, lambda: clock.left() - 2.0)
        dist.barrier()  # nobody takes the group down while others still talk
        dist.destroy_process_group()
    except RuntimeError as error:
        cure = "the machines reach each other, so look at gloo: GLOO_SOCKET_IFNAME, or a machine that stopped meanwhile"
        raise Problem("all_reduce", f"gloo failed: {str(error).splitlines()[0]}", cure) from None
    small, large = report.measured[0], report.measured[-1]
    report.say("latency", f"{small.seconds * 1e6:,.0f} us for {small.bytes} bytes")
    report.say("bandwidth", f"{large.bus_GB_s:.3f} GB/s on the bus at {large.bytes:,} bytes")
