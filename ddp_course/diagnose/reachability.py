"""Can these machines train together?

Each runs the same line. The one that owns HOST opens a store there, on that one address; the others call it, and ranks
are given by order of arrival. Then every machine connects to every other by plain TCP, with a limit, so that one that
cannot be reached is named before gloo would hang on it. Only then gloo opens a group and adds up.

What a machine finds out it posts at the store, as JSON, and each works out the same verdict from all the posts. Rank 0
has the store, so it leaves last; when its time is over it closes the meeting, and nobody waits any longer.

Left out on purpose: NCCL and InfiniBand; nccl-tests measures those.
Read next: `network.py`, which works out what gloo and NCCL would choose.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_course.diagnose import network
from ddp_course.diagnose.verdict import Verdict, exit_status, table

PREFIX, POLL_S = "ddp_course/meeting", 0.05
PAIR_S = 3.0  # for one connection from machine to machine
GOODBYE_S = 1.5  # how long rank 0 stays to let the others hear
GUARD_S = 2.0  # after the limit, for a call that is stuck in compiled code
NOT_A_MEETING_S = 5.0  # a store that answers and says nothing of a meeting for so long is another program's
ELEMENTS = 500_000  # of the all_reduce, 4 MB: enough for packets of full size
FIREWALL = (
    "open all TCP ports between the machines, not the rendezvous alone: gloo and NCCL listen on ports that the system "
    "picks (look at iptables -L, nft list ruleset, the cloud's security group, `ip route get ADDRESS`)"
)


class Problem(Exception):
    """A problem that ends the meeting: the name of its verdict, what was found, the cure."""


@dataclass(frozen=True)
class Machine:
    """What a machine tells the others about itself."""

    host: str
    address: str
    port: int  # where the others may connect
    interface: str
    torch: str = torch.__version__

    def __str__(self) -> str:
        return f"({self.host}, {self.interface} {self.address})"


@dataclass
class Meeting:
    """What this machine knows of the meeting, also when it failed half-way."""

    world_size: int
    rendezvous: str
    limit_s: float
    rank: int | None = None
    machines: list[Machine] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    phase: str = "looking for the others"  # what is being done just now
    store: dist.Store | None = None
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return max(0.0, self.started + self.limit_s - time.monotonic())

    def say(self, name: str, found: str, cure: str = "", state: str = "") -> None:
        self.verdicts.append(Verdict(name, state or ("problem" if cure else "ok"), found, cure))

    def post(self, name: str, value: object) -> None:
        self.store.set(f"{name}/{self.rank}", json.dumps(value))

    def gather(self, name: str, keep_s: float) -> dict:
        """Return what each rank has posted, when all have, or rank 0 has closed, or `keep_s` seconds are left."""
        keys = {rank: f"{name}/{rank}" for rank in range(self.world_size)}
        while True:
            over = self.store.check(["closed"]) or self.left() <= keep_s  # first: whoever closed has seen no more
            found = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
            if over or len(found) == self.world_size:
                return found
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Rank 0 closes and waits until the others have heard; each of them says that it has."""
        if self.rank:
            self.store.add("left", 1)
        elif self.rank == 0:
            self.store.set("closed", "")
            until = time.monotonic() + GOODBYE_S
            while time.monotonic() < until and self.store.add("left", 0) < self.store.add("came", 0):
                time.sleep(POLL_S)


def run(world_size: int, rendezvous: str, limit_s: float, as_json: bool) -> int:
    """Meet, print what came of it, and return 0; after a problem end the process with status 1.

    Collective: as `meet`.
    """
    meeting = Meeting(world_size, rendezvous, limit_s)
    guard = threading.Timer(limit_s + GUARD_S, give_up, (meeting, as_json))
    guard.daemon = True
    guard.start()
    kept = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's C++ warnings, a page for each lost connection
    try:
        meet(meeting)
    except Problem as problem:
        meeting.say(*problem.args)
    except RuntimeError as error:  # of the store: torch's DistError
        lost = f"rank 0, which opened the meeting, has left it: {str(error).splitlines()[0]}"
        meeting.say("meeting", lost, "read what it printed, and run all again")
    finally:
        os.dup2(kept, 2)
    guard.cancel()
    return tell(meeting, as_json)


def give_up(meeting: Meeting, as_json: bool) -> None:
    cure = "run it again; if it stays, look at the other machines' output, and give --timeout more"
    meeting.say("time limit", f"{meeting.limit_s:g} s were over while {meeting.phase}", cure)
    tell(meeting, as_json)


def tell(meeting: Meeting, as_json: bool) -> int:
    """Print the meeting and return the exit status; a failed one ends the process."""
    data = {name: getattr(meeting, name) for name in ("world_size", "rendezvous", "rank")}
    data |= {name: list(map(asdict, getattr(meeting, name))) for name in ("machines", "verdicts")}
    print(json.dumps(data, indent=2) if as_json else as_text(meeting), flush=True)
    if status := exit_status(meeting.verdicts):
        os._exit(status)  # a store or a group that lost its peers can hang or abort while Python takes it down
    return status


def as_text(meeting: Meeting) -> str:
    lines = [f"meeting of {meeting.world_size} at {meeting.rendezvous}"]
    for rank, each in enumerate(meeting.machines):
        note = "  (opened the meeting)" * (rank == 0) + "  (this machine)" * (rank == meeting.rank)
        lines.append(f"  rank {rank:<3} {each.host:20} {each.address:15} {each.interface:10} {each.torch}{note}")
    return "\n".join([*lines, "", table(meeting.verdicts)])


def meet(meeting: Meeting) -> None:
    """Hold the meeting.

    Raises:
        Problem: with the verdict that ended it.
        RuntimeError: the store is gone.
    Collective: every machine of the meeting, once.
    """
    address, port = find(meeting.rendezvous)
    own, interface = own_place(address)
    opened = open_or_call(meeting, address, port)
    try:
        try_pairs(meeting, own, interface, opened)
        warn(meeting, own, interface)
        try_all_reduce(meeting, interface)
    finally:
        with suppress(RuntimeError):  # the store is gone: there is nobody left to tell
            meeting.leave()


# --- How do machines find each other? --------------------------------------------------------------


def find(rendezvous: str) -> tuple[str, int]:
    """Return the numeric address and the port that HOST:PORT stands for."""
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        cure = "give an address and a port from 1 to 65535, such as 10.0.0.1:29500"
        raise Problem("rendezvous", f"{rendezvous!r} is not HOST:PORT", cure)
    addresses, error = network.resolve(host.strip("[]"))
    if not addresses:
        cure = "give the numeric address, or add the name to DNS or /etc/hosts on every machine"
        raise Problem("rendezvous", f"{host} resolves to nothing here: {error}", cure)
    address = min(addresses, key=lambda each: ":" in each)  # IPv4 first, as gloo takes it from an interface
    if address in ("0.0.0.0", "::"):
        cure = "give an address of one of the machines: this one would open the port to every network"
        raise Problem("rendezvous", f"{host} is no machine's address", cure)
    return address, int(port)


def own_place(address: str) -> tuple[str, str]:
    """Return the own address for the meeting, which gloo will announce, and its interface, "" if none is known.

    What the user told gloo goes first, as it would in training; else it is the way that leads to HOST.
    """
    there, source = network.interfaces(), network.source_address(address)
    if names := network.gloo_names(os.environ):
        if (told := network.gloo_address(os.environ, there, ())) is None:
            found = f"GLOO_SOCKET_IFNAME={names[0]}, which has no address here; found "
            cure = "unset GLOO_SOCKET_IFNAME, or name one of those"
            raise Problem("interface", found + ", ".join(network.with_address(there)), cure)
        return told, names[0]
    if source is None:
        cure = "see `ip route get` for this address; is the network up, and is the address right?"
        raise Problem("route", f"{socket.gethostname()} has no way to {address}", cure)
    interface = network.interface_of(source, there) or ""
    # Of several addresses on one interface gloo announces the first, whichever leads to HOST.
    return network.gloo_address({"GLOO_SOCKET_IFNAME": interface}, there, (source,)), interface


def open_or_call(meeting: Meeting, address: str, port: int) -> bool:
    """Open the store if the address is this machine's, else call the machine that has it; say whether it was opened."""
    try:
        listener = network.listen(address, port).detach()
    except OSError as error:
        if error.errno == errno.EACCES:
            raise Problem("rendezvous", f"port {port} may be opened by root only", "choose one from 1024 on") from None
        call(meeting, address, port)  # also where the port is taken: it may be another process's of this meeting
        return False
    limit = timedelta(seconds=meeting.limit_s)
    # The socket that listens already is handed over: nothing else is opened, on no other address.
    store = dist.TCPStore(address, port, None, True, limit, False, master_listen_fd=listener)
    meeting.store = dist.PrefixStore(PREFIX, store)
    meeting.store.set("open", str(meeting.world_size))
    return True


def call(meeting: Meeting, address: str, port: int) -> None:
    """Find the meeting's store at the address."""

    def ask() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=meeting.left() + 1)
            store = dist.PrefixStore(PREFIX, dist.TCPStore(address, port, None, False, limit, False))
            while not store.check(["open"]):  # another job's store never has it
                time.sleep(POLL_S)
            meeting.store = store

    wait_for_answer(meeting, address, port)
    # torch waits without end for a program that accepts and stays silent, so it waits in a thread of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(min(NOT_A_MEETING_S, max(meeting.left(), 0.1)))
    if meeting.store is None:
        wait_for_answer(meeting, address, port)  # is it still there, or did a meeting end meanwhile?
        cure = f"give another port to all; who has it: ss -ltnp 'sport = :{port}'"
        raise Problem("rendezvous", f"port {port} at {address} is taken by another program, not by a meeting", cure)
    if (there := int(meeting.store.get("open"))) != meeting.world_size:
        meeting.store.set("turned away", f"{socket.gethostname()} came with --world-size {meeting.world_size}")
        found = f"{meeting.world_size} here, {there} where the meeting was opened"
        raise Problem("world size", found, "give --world-size the same number everywhere")


def wait_for_answer(meeting: Meeting, address: str, port: int) -> None:
    """Wait until something answers at the address; say what was in the way if nothing does."""
    while error := connect(meeting, address, port):
        if not meeting.left():
            there = ", ".join(map(" ".join, network.routable(network.interfaces()))) or "no address but loopback"
            cure = f"run the same line on the machine that has {address}, and let its firewall open port {port}; "
            found = f"nobody opened the meeting at {meeting.rendezvous} in {meeting.limit_s:g} s: {error}"
            raise Problem("rendezvous", found, f"{cure}this machine ({socket.gethostname()}) has {there}")
        time.sleep(min(POLL_S * 4, meeting.left()))


def connect(meeting: Meeting, address: str, port: int) -> str:
    """Return "" if somebody listens there, else what was in the way."""
    try:
        socket.create_connection((address, port), min(PAIR_S, meeting.left() + POLL_S)).close()
        return ""
    except TimeoutError:
        return "no answer: a firewall that drops, or no way there"
    except ConnectionRefusedError:
        return "refused: nobody listens there, or a firewall rejects it"
    except OSError as error:  # EINVAL is what Linux says where a route leads into a black hole
        return "no way there: a route that drops" if error.errno == errno.EINVAL else str(error.strerror).lower()


# --- Who cannot reach whom? ------------------------------------------------------------------------


def try_pairs(meeting: Meeting, own: str, interface: str, opened: bool) -> None:
    """Take a rank, wait for the others, and connect to each; name who is missing or cannot be reached."""
    W = meeting.world_size
    with network.listen(own, 0) as door:  # the system accepts by itself, so nobody here has to
        rank = 0 if opened else meeting.store.add("came", 1)
        if rank >= W:
            cure = "give --world-size the number of all that run this, everywhere; was one machine started twice?"
            raise Problem("arrival", f"this is number {rank + 1}, and {W} were expected", cure)
        meeting.rank, meeting.phase = rank, "waiting for the others"
        meeting.post("machine", asdict(Machine(socket.gethostname(), own, door.getsockname()[1], interface)))
        told = meeting.gather("machine", min(10.0, meeting.limit_s / 3))  # what is kept is for what comes after
        here = {rank: Machine(**each) for rank, each in told.items()}
        if len(here) < W:
            raise missing(meeting, here)
        meeting.machines, meeting.phase = [here[rank] for rank in range(W)], "trying each pair"
        meeting.say("arrival", f"all {W} came")
        others = [other for other in range(W) if other != rank]
        with ThreadPoolExecutor(64) as threads:
            errors = threads.map(lambda other: connect(meeting, here[other].address, here[other].port), others)
            meeting.post("errors", list(zip(others, errors, strict=True)))
        told = meeting.gather("errors", max(0.0, meeting.left() - PAIR_S - 2.0))
    if gone := [f"rank {rank} {each}" for rank, each in here.items() if rank not in told]:
        cure = "read what it printed; start all with the same --timeout, or a larger one"
        raise Problem("pairs", f"came and then left or stopped answering: {'; '.join(sorted(gone))}", cure)
    if failed := {(by, to): error for by, errors in told.items() for to, error in errors if error}:
        at_home = {network.is_loopback(each.address) for each in here.values()}
        cure = "a loopback address leads to its own machine: name another interface in GLOO_SOCKET_IFNAME there"
        raise Problem("pairs", blame(meeting.machines, failed), cure if len(at_home) > 1 else FIREWALL)
    meeting.say("pairs", f"each of {W} reached each other, on a port of the system's choice")


def missing(meeting: Meeting, here: dict[int, Machine]) -> Problem:
    absent = ", ".join(str(rank) for rank in range(meeting.world_size) if rank not in here)
    seconds = meeting.limit_s - meeting.left()
    found = f"{len(here)} of {meeting.world_size} came within {seconds:.0f} s; missing: rank {absent}"
    if meeting.store.check(["turned away"]):
        found += f"; {meeting.store.get('turned away').decode()}"
    came = "; ".join(f"rank {rank} {each}" for rank, each in here.items())
    cure = f"start the same line on each machine that is not among these: {came}; or give --timeout more"
    if 0 in here and network.is_loopback(here[0].address):
        cure += f". The meeting is at {here[0].address}, which no other machine can reach"
    return Problem("arrival", found, cure)


def blame(machines: list[Machine], failed: dict[tuple[int, int], str]) -> str:
    """Return a sentence for each machine that was not reached.

    Args:
        failed: the rank that called, and the one that it could not reach -> why.
    """
    sentences, names = [], [f"rank {rank} {each}" for rank, each in enumerate(machines)]
    for to in sorted({to for _, to in failed}):
        callers = sorted(by for by, other in failed if other == to)
        whom = "any other" if len(callers) == len(machines) - 1 > 1 else " and ".join(names[by] for by in callers)
        sentences.append(f"{names[to]} cannot be reached from {whom}: {failed[callers[0], to]}")
    return "; ".join(sentences)


# --- Can they add up? ------------------------------------------------------------------------------


def warn(meeting: Meeting, own: str, interface: str) -> None:
    """Warn of different versions, and where gloo or NCCL alone would choose another way than the one that worked."""
    if len(versions := {each.torch for each in meeting.machines}) > 1:
        cure = "install the same torch everywhere: what ranks send each other may change with the version"
        meeting.say("versions", f"different: {', '.join(sorted(versions))}", cure, "warning")
    if network.is_loopback(own) or not interface:
        return
    there, (addresses, _), astray = network.interfaces(), network.resolve(socket.gethostname()), {}
    if not network.gloo_names(os.environ) and (alone := network.gloo_address({}, there, addresses)) != own:
        name = f"the host name {socket.gethostname()}, which resolves to {' '.join(addresses) or 'nothing'}"
        astray["GLOO_SOCKET_IFNAME"] = f"gloo alone would announce {alone} here, not {own}: it goes by {name}"
    first = network.nccl_interfaces({}, network.with_address(each for each in there if each.up))[0]
    if "NCCL_SOCKET_IFNAME" not in os.environ and first != interface and not first.startswith("ib"):
        astray["NCCL_SOCKET_IFNAME"] = f"NCCL alone would take {first} first, not {interface}"
    if astray:
        cure = f"before training here: export {' '.join(f'{name}={interface}' for name in astray)}"
        meeting.say("interface", "; ".join(astray.values()), cure, "warning")


def try_all_reduce(meeting: Meeting, interface: str) -> None:
    """Add up with a gloo group over the interface that leads to HOST.

    Collective: init_process_group, three all_reduces; every rank.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    meeting.phase, store = "adding up over gloo", dist.PrefixStore("gloo", meeting.store)
    W, limit = meeting.world_size, timedelta(seconds=max(meeting.left(), 1.0))
    try:
        dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=W, timeout=limit)
        right, seconds = add_up()
        dist.destroy_process_group()
    except RuntimeError as error:
        cure = "the machines reach each other, so look at gloo: GLOO_SOCKET_IFNAME; at one that stopped meanwhile; or "
        cure += "at packets of full size that are lost (compare the MTU in `ip link`; try ping -M do -s 1472)"
        raise Problem("all_reduce", f"gloo failed: {str(error).splitlines()[0]}", cure) from None
    if not right:
        cure = "look for broken memory or network hardware; run it again with pairs of machines"
        raise Problem("all_reduce", "the sum is wrong", cure)
    speed = 8 * ELEMENTS / seconds * 2 * (W - 1) / W / 1e9  # the bus bandwidth of nccl-tests
    found = f"the sum over {W} ranks is right on each; {8 * ELEMENTS / 1e6:g} MB in {seconds * 1e3:.1f} ms"
    meeting.say("all_reduce", f"{found}, bus {speed:.3f} GB/s")


def add_up() -> tuple[bool, float]:
    """Return whether a sum was right on every rank, and the seconds of the slowest.

    Collective: three all_reduces, every rank.
    """
    W, position = dist.get_world_size(), torch.arange(ELEMENTS, dtype=torch.float64)
    total = position * (dist.get_rank() + 1)
    dist.all_reduce(total)  # opens the connections, too
    right = torch.equal(total, position * (W * (W + 1) // 2))
    started = time.perf_counter()
    dist.all_reduce(total)
    told = torch.tensor([right, started - time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told[0]), -told[1].item()
