"""Can this machine work together with others?

These checks are pure functions too. They judge what only matters once ranks have several GPUs or several machines:
links, interfaces, the host name, ports, the folder for checkpoints, and a launcher's variables.

Standard library alone: the doctor runs without torch.
Left out on purpose: whether machines reach each other. No machine can tell that alone; `meeting.py` tries it.
"""

from __future__ import annotations

from ddp_course.diagnose import network
from ddp_course.diagnose.checks import whole
from ddp_course.diagnose.facts import Facts
from ddp_course.diagnose.gpu_links import farness
from ddp_course.diagnose.storage import MEMORY, NETWORK
from ddp_course.diagnose.verdict import Verdict

LITTLE_SPACE_BYTES = 2**30
MOST_SHOWN = 4  # a machine with containers has dozens of interfaces
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_links(facts: Facts) -> Verdict:
    """Ranks wait for the slowest link: one far pair slows every all_reduce."""
    name = "GPU links"
    if len(facts.gpus) < 2:
        return Verdict(name, "ok", "none: fewer than two GPUs")
    if not facts.links:
        return Verdict(name, "ok", "unknown: nvidia-smi topo -m told nothing")
    kinds = sorted(set(facts.links.values()), key=farness)
    far = [pair for pair, link in facts.links.items() if link == "SYS"]
    if far and len(kinds) > 1:
        found = f"{', '.join(kinds)}: GPU{far[0][0]} and GPU{far[0][1]} are on different processors"
        near = ",".join(map(str, near_gpus(facts.links)))
        return Verdict(name, "warning", found, f"for a job of fewer GPUs choose near ones: CUDA_VISIBLE_DEVICES={near}")
    return Verdict(name, "ok", f"{', '.join(kinds)} between {len(facts.gpus)} GPUs")


def near_gpus(links: dict[tuple[int, int], str]) -> list[int]:
    """Return the GPUs that GPU 0 reaches without crossing to another processor, GPU 0 with them."""
    return [0, *sorted(column for (row, column), link in links.items() if row == 0 and link != "SYS")]


def check_interfaces(facts: Facts) -> Verdict:
    """The interfaces, and those that gloo and NCCL would take."""
    name = "interfaces"
    with_address = [each.name for each in facts.interfaces if each.addresses]
    there, routable = ", ".join(with_address) or "none", network.routable(facts.interfaces)
    good = routable[0][0] if routable else "eth0"
    if not facts.interfaces:
        return Verdict(name, "ok", "unknown: this system does not list them")
    for told in network.gloo_names(facts.environ):
        if told not in with_address:
            why = ": gloo wants whole names; prefixes, ^ and = are NCCL's" if told[0] in "^=" else ""
            found = f"GLOO_SOCKET_IFNAME={told}, which has no address here{why}; found {there}"
            return Verdict(name, "problem", found, f"export GLOO_SOCKET_IFNAME={good}")
    up = [each.name for each in facts.interfaces if each.up and each.addresses]
    chosen = network.nccl_interfaces(facts.environ, up)
    if "NCCL_SOCKET_IFNAME" in facts.environ and not chosen:
        found = f"NCCL_SOCKET_IFNAME={facts.environ['NCCL_SOCKET_IFNAME']} fits none of {there}"
        return Verdict(name, "problem", found, f"export NCCL_SOCKET_IFNAME={good}")
    address = network.gloo_address(facts.environ, facts.interfaces, facts.host_addresses)
    gloo = f"gloo would take {network.interface_of(address, facts.interfaces)} ({address})"
    more = f" and {len(routable) - MOST_SHOWN} more" if len(routable) > MOST_SHOWN else ""
    shown = f"{', '.join(map(' '.join, routable[:MOST_SHOWN])) or 'loopback alone'}{more}"
    return Verdict(name, "ok", f"{shown}; {gloo}, NCCL {', '.join(chosen) or 'none'}")


def check_host_name(facts: Facts) -> Verdict:
    """gloo announces the address of the own host name, unless it is told an interface."""
    name, routable = "host name", network.routable(facts.interfaces)
    resolved = f"{facts.host_name} is {' '.join(facts.host_addresses)}"
    if network.gloo_names(facts.environ) or not routable:
        why = "an interface was named" if routable else "this machine has no network"
        return Verdict(name, "ok", f"{resolved if facts.host_addresses else facts.host_name}; not needed, {why}")
    cure = f"export GLOO_SOCKET_IFNAME={routable[0][0]}, or fix /etc/hosts"
    announced = network.gloo_address(facts.environ, facts.interfaces, facts.host_addresses)
    if facts.host_error or not facts.host_addresses:
        trouble = f"{facts.host_name} resolves to nothing ({facts.host_error or 'no address'})"
    elif not any(network.interface_of(address, facts.interfaces) for address in facts.host_addresses):
        trouble = f"{resolved}, which no interface here has"
    elif network.is_loopback(announced):
        trouble = resolved
    else:
        return Verdict(name, "ok", resolved)
    if any(map(network.is_routable, facts.master_addresses)):  # the ranks will meet on several machines
        return Verdict(name, "warning", f"{trouble}: gloo would announce {announced} to other machines", cure)
    return Verdict(name, "ok", f"{trouble}: enough for one machine; before you use several: {cure}")


def check_ports(facts: Facts) -> Verdict:
    """Ranks listen on ports that the system picks; the first rank also on MASTER_PORT."""
    name, port = "ports", facts.environ.get("MASTER_PORT")
    if facts.port_error:
        cure = "close programs that hold many connections, or widen net.ipv4.ip_local_port_range"
        return Verdict(name, "problem", f"none can be opened: {facts.port_error}", cure)
    if port is None:
        return Verdict(name, "ok", "one could be opened")
    if not port.isdigit() or not 0 < int(port) < 65536:
        cure = "export MASTER_PORT=29500, or any from 1024 to 65535"
        return Verdict(name, "problem", f"MASTER_PORT={port} is not a port", cure)
    if facts.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Verdict(name, "ok", f"MASTER_PORT={port} is held by torchrun's own store, as it should be")
    if facts.environ.get("RANK", "0") != "0":
        return Verdict(name, "ok", f"MASTER_PORT={port} is opened by rank 0, not here")
    if facts.master_port_error:
        cure = f"find its owner: ss -ltnp 'sport = :{port}'; end it, or give every rank another MASTER_PORT"
        return Verdict(name, "problem", f"MASTER_PORT={port} cannot be opened: {facts.master_port_error}", cure)
    return Verdict(name, "ok", f"MASTER_PORT={port} is free")


def check_checkpoints(facts: Facts) -> Verdict:
    """A checkpoint must come whole to a place that outlives the machine's failure."""
    name, found = "checkpoints", facts.storage
    if found is None:
        return Verdict(name, "ok", "not asked for: --checkpoint FOLDER tries one")
    kind = f"{found.kind or 'unknown'}, {'shared over the network' if found.kind in NETWORK else 'of this machine'}"
    shown = f"{found.folder} ({kind}), {found.free_bytes / 2**30:,.1f} GiB free"
    if found.error:
        cure = "create it, or name another folder that may be written"
        return Verdict(name, "problem", f"cannot write in {found.folder}: {found.error}", cure)
    if not found.atomic_rename:
        cure = "use a folder on another file system: a kill during a save could leave half a checkpoint"
        return Verdict(name, "problem", f"{shown}: a rename does not replace a file", cure)
    if found.free_bytes < LITTLE_SPACE_BYTES:
        return Verdict(name, "warning", f"{shown}: little space", "free some: old and new checkpoint are held at once")
    if found.kind in MEMORY:
        return Verdict(name, "warning", f"{shown}: in memory, gone after a restart", "use a folder on a disk")
    if not found.locks:
        cure = "see to it yourself that no two runs write there (NFS: mount it with locks)"
        return Verdict(name, "warning", f"{shown}: a lock does not keep another process out", cure)
    return Verdict(name, "ok", shown)


def check_environment(facts: Facts) -> Verdict:
    """A launcher's variables, left over in a shell, make a program wait for ranks that nobody started."""
    name, set_here = "launcher", [name for name in LAUNCHER_VARIABLES if name in facts.environ]
    if not set_here:
        return Verdict(name, "ok", "none of its variables are left over")
    found = " ".join(f"{name}={facts.environ[name]}" for name in set_here)
    cure = f"unless a launcher has started this shell: unset {' '.join(set_here)}"
    if ("RANK" in set_here) != ("WORLD_SIZE" in set_here):
        missing = "WORLD_SIZE" if "RANK" in set_here else "RANK"
        return Verdict(name, "problem", f"{found}, but no {missing}", cure)
    if wrong := wrong_numbers(facts) or wrong_master(facts):
        return Verdict(name, "problem", f"{found}: {wrong}", cure)
    return Verdict(name, "warning", f"{found}: training here would join that job", cure)


def wrong_numbers(facts: Facts) -> str:
    """Return what cannot be right about a launcher's numbers, or nothing."""
    environ = facts.environ
    for name in LAUNCHER_VARIABLES[:4]:
        if name in environ and whole(environ[name], -1) < int("WORLD" in name):
            return f"{name} is not a number from {int('WORLD' in name)} on"
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in environ and limit in environ and int(environ[name]) >= int(environ[limit]):
            return f"ranks count from 0 to {limit} - 1"
    if facts.gpus and int(environ.get("LOCAL_RANK", 0)) >= len(facts.gpus):
        return f"LOCAL_RANK counts GPUs from 0, and there are {len(facts.gpus)}"
    return ""


def wrong_master(facts: Facts) -> str:
    """Return why the ranks could not meet at MASTER_ADDR, or nothing."""
    environ = facts.environ
    if "MASTER_ADDR" in environ and not facts.master_addresses:
        return "MASTER_ADDR resolves to nothing here"
    ranks, here = whole(environ.get("WORLD_SIZE"), 1), whole(environ.get("LOCAL_WORLD_SIZE"), 0)
    if 0 < here < ranks and facts.master_addresses and all(map(network.is_loopback, facts.master_addresses)):
        return f"{ranks - here} ranks are on other machines, and MASTER_ADDR is loopback, which they cannot reach"
    return ""
