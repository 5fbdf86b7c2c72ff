"""Can this machine run the course, and work together with others?

Each check is a pure function from facts to what it says: ok, warning or problem, what was found, and the cure. First
what is installed and the machine itself; then what matters once ranks have several GPUs or machines.

Standard library alone: the doctor runs where torch is broken.
Left out on purpose: whether machines reach each other. No machine can tell that alone; `reachability.py` tries it.
Read next: `machine_facts.py`, which looks around.
"""

from __future__ import annotations

import re

from ddp_course.diagnose import network
from ddp_course.diagnose.machine_facts import Facts
from ddp_course.diagnose.verdict import Verdict

OLDEST_PYTHON, OLDEST_TORCH = "3.11", "2.11"
SMALL_SHM_BYTES, LITTLE_SPACE_BYTES = 256 * 2**20, 2**30
MOST_SHOWN = 4  # a machine with containers has dozens of interfaces
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # of two GPUs, from near to far; NVLinks come before all of them
# File systems that other machines can mount too, and those that are gone after a restart; as `stat -f` names them.
SHARED = {"nfs", "cifs", "smb", "smb2", "lustre", "gpfs", "ceph", "afs", "k-afs", "v9fs", "fuseblk", "beegfs", "panfs"}
MEMORY = {"tmpfs", "ramfs"}

Said = tuple[str, ...]  # state, what was found and, unless all is well, the cure


# --- What is installed -----------------------------------------------------------------------------


def python(facts: Facts) -> Said:
    if release(facts.python) < release(OLDEST_PYTHON):
        return "problem", facts.python, f"install Python {OLDEST_PYTHON} or newer and run `make env` with it"
    return "ok", facts.python


def torch(facts: Facts) -> Said:
    if facts.torch is None:
        return "problem", "not installed", "run `make env`"
    if facts.torch_error:
        return "problem", f"{facts.torch} cannot be imported: {facts.torch_error}", reinstall(facts)
    if release(facts.torch) < release(OLDEST_TORCH):
        return "problem", f"{facts.torch}, older than {OLDEST_TORCH}", reinstall(facts)
    return "ok", facts.torch


def torchvision(facts: Facts) -> Said:
    """torch and torchvision must come from the same build: torchvision calls into torch's compiled code."""
    if facts.torchvision is None:
        return "warning", "not installed; needed for the ResNet, MNIST, FashionMNIST and CIFAR-10", "run `make env`"
    if facts.torch is None or facts.torch_error:
        return "warning", f"{facts.torchvision}, not tried without torch", "fix torch first"
    pair, misfits = f"torch {facts.torch} and torchvision {facts.torchvision}", []
    if build(facts.torch) != build(facts.torchvision):
        misfits.append(f"{pair} come from different builds")
    if not satisfies(facts.torch, facts.torchvision_wants):
        misfits.append(f"torchvision {facts.torchvision} wants {facts.torchvision_wants}, found torch {facts.torch}")
    if facts.torchvision_error:
        said = f"torchvision cannot be imported: {facts.torchvision_error}"
        return "problem", "; ".join([*(misfits or [pair]), said]), reinstall(facts)
    return ("warning", "; ".join(misfits), reinstall(facts)) if misfits else ("ok", facts.torchvision)


def gpus(facts: Facts) -> Said:
    if facts.nvidia_driver and not facts.gpus and not facts.torch_error:
        cure = "install torch's CUDA build (`make env TORCH=default`), or a driver as new as that build wants"
        return "warning", "there is an NVIDIA driver, but torch sees no GPU", cure
    return "ok", ", ".join(facts.gpus) or "none: the ranks run on the CPU and talk over gloo"


def cuda(facts: Facts) -> Said:
    """A driver serves all CUDA versions up to its own, and newer ones of the same major number."""
    if facts.cuda is None:
        return "ok", "not tried without torch" if facts.torch_error else "none in this torch: a build for the CPU"
    driver = f"driver {facts.driver or 'unknown'}" if facts.nvidia_driver else "no NVIDIA driver here"
    if not facts.driver_cuda:
        return "ok", f"{facts.cuda} in this torch; {driver}"
    if release(facts.cuda)[0] > release(facts.driver_cuda)[0]:
        cure = f"a newer driver, or a torch for CUDA {release(facts.driver_cuda)[0]} (`make env TORCH=...`)"
        found = f"torch was built with CUDA {facts.cuda}, {driver} is for CUDA up to {facts.driver_cuda}"
        return "problem", found, cure
    return "ok", f"{facts.cuda} in this torch; {driver}, for CUDA up to {facts.driver_cuda}"


def nccl(facts: Facts) -> Said:
    """torch is built with one NCCL and loads the one that is installed beside it."""
    package, _, wanted = facts.nccl_wants.partition("==")
    if facts.nccl is None and facts.gpus:
        return "problem", "this torch was built without it: GPUs talk slowly", reinstall(facts)
    if facts.nccl is not None and wanted and facts.nccl_package != wanted:
        found = f"torch wants {facts.nccl_wants}, found {facts.nccl_package or 'none'}"
        return "warning", found, f"install {package}=={wanted}, or: {reinstall(facts)}"
    return "ok", facts.nccl or "none in this torch; it is for GPUs only"


def gloo(facts: Facts) -> Said:
    if facts.gloo or facts.torch is None or facts.torch_error:
        return "ok", "in this torch" if facts.gloo else "not tried without torch"
    return "problem", "this torch was built without it: ranks on the CPU cannot talk", reinstall(facts)


def kernel(facts: Facts) -> Said:
    if facts.kernel:
        return "ok", "runs this Python"
    cure = "run `make env`, or: python -m ipykernel install --sys-prefix"
    return "warning", "none for this Python: notebooks would use another", cure


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 15, 0) for "2.15.0+cu132"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def build(version: str) -> str:
    """Return what follows the plus sign: "cu132" for "2.15.0+cu132"."""
    return version.partition("+")[2]


def satisfies(version: str, requirement: str) -> bool:
    """Say whether `version` fits a requirement such as "torch>=2.14.0" or "torch (==2.11.0)"."""
    return all(
        release(version) == release(wanted) if relation == "==" else release(version) >= release(wanted)
        for relation, wanted in re.findall(r"(==|>=)\s*([\d.]+)", requirement)
    )


def reinstall(facts: Facts) -> str:
    command = f"rm -rf .venv && make env{' TORCH=cpu' * (build(facts.torch or '') == 'cpu')}"
    both = "uninstall torch and torchvision, then install them in one command from one index"
    return f"{command}, which takes both from one build; without make: {both}"


# --- The machine -----------------------------------------------------------------------------------


def loopback(facts: Facts) -> Said:
    if facts.loopback:
        return "ok", facts.loopback
    cure = "bring it up (Linux: ip link set lo up) and let no firewall block 127.0.0.1"
    return "problem", "no connection to 127.0.0.1 came about", cure


def shared_memory(facts: Facts) -> Said:
    cure = "start the container with more, for example: docker run --shm-size=1g"
    if facts.shm_bytes is None:
        need = "warning", "no /dev/shm: NCCL and DataLoader's workers need it", cure
        return need if facts.linux else ("ok", "no /dev/shm on this system, and none needed")
    found = f"{facts.shm_bytes / 2**20:,.0f} MiB in /dev/shm"
    little = "warning", f"{found}: NCCL and DataLoader's workers may run out", cure
    return little if facts.shm_bytes < SMALL_SHM_BYTES else ("ok", found)


def cores(facts: Facts) -> Said:
    if facts.cores < 2:
        return "warning", "1: all ranks share it, and lessons take longer", "nothing need be done"
    return "ok", f"{facts.cores}, and {facts.memory_bytes / 1e9:.0f} GB of memory"


def threads(facts: Facts) -> Said:
    """Each rank's compute threads; more than there are cores get in each other's way."""
    if (told := facts.environ.get("OMP_NUM_THREADS")) is None:
        return "ok", "OMP_NUM_THREADS is not set: launch shares the cores out, torchrun gives each rank 1"
    if whole(told, 0) < 1:
        cure = "unset OMP_NUM_THREADS, or give it cores divided by ranks"
        return "warning", f"OMP_NUM_THREADS={told} is not a number of threads", cure
    ranks = whole(facts.environ.get("LOCAL_WORLD_SIZE"), 1)
    found = f"OMP_NUM_THREADS={told} for each of {ranks} ranks, {facts.cores} cores"
    if int(told) * ranks > facts.cores:
        cure = f"export OMP_NUM_THREADS={max(1, facts.cores // ranks)}"
        return "warning", f"{found}: they get in each other's way", cure
    return "ok", found


def temporary_files(facts: Facts) -> Said:
    if not facts.temp_error:
        return "ok", facts.temp_folder
    cure = "free some space, or name another folder: export TMPDIR=..."
    return "problem", f"cannot write in {facts.temp_folder}: {facts.temp_error}", cure


def checkpoints(facts: Facts) -> Said:
    """A checkpoint must come whole to a place that outlives the machine's failure."""
    if (storage := facts.storage) is None:
        return "ok", "not asked for: --checkpoint FOLDER tries one"
    if storage.error:
        cure = "create it, or name another folder that may be written"
        return "problem", f"cannot write in {storage.folder}: {storage.error}", cure
    where = "shared over the network" if storage.kind in SHARED else "of this machine"
    found = f"{storage.folder} ({storage.kind or 'unknown'}, {where}), {storage.free_bytes / 2**30:,.1f} GiB free"
    if not storage.atomic_rename:
        cure = "use a folder on another file system: a kill during a save could leave half a checkpoint"
        return "problem", f"{found}: a rename does not replace a file", cure
    if storage.free_bytes < LITTLE_SPACE_BYTES:
        return "warning", f"{found}: little space", "free some: old and new checkpoint are held at once"
    if storage.kind in MEMORY:
        return "warning", f"{found}: in memory, gone after a restart", "use a folder on a disk"
    if not storage.locks:
        cure = "see to it yourself that no two runs write there (NFS: mount it with locks)"
        return "warning", f"{found}: a lock does not keep another process out", cure
    return "ok", found


# --- With others -----------------------------------------------------------------------------------


def links(facts: Facts) -> Said:
    """Ranks wait for the slowest link: one far pair slows every all_reduce."""
    if not facts.links:
        alone = len(facts.gpus) < 2
        return "ok", "none: fewer than two GPUs" if alone else "unknown: nvidia-smi topo -m told nothing"
    kinds = sorted(set(facts.links.values()), key=lambda kind: NEARNESS.index(kind) if kind in NEARNESS else -1)
    if kinds[-1] == "SYS" and len(kinds) > 1:
        far = next(pair for pair, link in facts.links.items() if link == "SYS")
        near = ",".join(["0", *(str(b) for (a, b), link in facts.links.items() if a == 0 and link != "SYS")])
        found = f"{', '.join(kinds)}: GPU{far[0]} and GPU{far[1]} are on different processors"
        return "warning", found, f"for a job of fewer GPUs choose near ones: CUDA_VISIBLE_DEVICES={near}"
    return "ok", f"{', '.join(kinds)} between {len(facts.gpus)} GPUs"


def interfaces(facts: Facts) -> Said:
    """The interfaces, and those that gloo and NCCL would take."""
    if not facts.interfaces:
        return "ok", "unknown: this system does not list them"
    there, routable = network.with_address(facts.interfaces), network.routable(facts.interfaces)
    good = routable[0][0] if routable else "eth0"
    for told in network.gloo_names(facts.environ):
        if told not in there:
            why = ": gloo wants whole names; prefixes, ^ and = are NCCL's" if told[0] in "^=" else ""
            found = f"GLOO_SOCKET_IFNAME={told}, which has no address here{why}; found {', '.join(there)}"
            return "problem", found, f"export GLOO_SOCKET_IFNAME={good}"
    chosen = network.nccl_interfaces(facts.environ, network.with_address(each for each in facts.interfaces if each.up))
    if "NCCL_SOCKET_IFNAME" in facts.environ and not chosen:
        found = f"NCCL_SOCKET_IFNAME={facts.environ['NCCL_SOCKET_IFNAME']} fits none of {', '.join(there)}"
        return "problem", found, f"export NCCL_SOCKET_IFNAME={good}"
    address = network.gloo_address(facts.environ, facts.interfaces, facts.host_addresses)
    announced = f"gloo would take {network.interface_of(address, facts.interfaces)} ({address})"
    more = f" and {len(routable) - MOST_SHOWN} more" if len(routable) > MOST_SHOWN else ""
    shown = f"{', '.join(map(' '.join, routable[:MOST_SHOWN])) or 'loopback alone'}{more}"
    return "ok", f"{shown}; {announced}, NCCL {', '.join(chosen) or 'none'}"


def host_name(facts: Facts) -> Said:
    """gloo announces the address of the own host name, unless it is told an interface."""
    routable, resolved = network.routable(facts.interfaces), f"{facts.host_name} is {' '.join(facts.host_addresses)}"
    announced = network.gloo_address(facts.environ, facts.interfaces, facts.host_addresses)
    if not facts.host_addresses:
        resolved = f"{facts.host_name} resolves to nothing ({facts.host_error or 'no address'})"
    if not routable or network.gloo_names(facts.environ):
        why = "an interface was named" if routable else "this machine has no network"
        return "ok", f"{resolved}; not needed, {why}"
    if facts.host_addresses and not any(network.interface_of(each, facts.interfaces) for each in facts.host_addresses):
        resolved += ", which no interface here has"
    elif not network.is_loopback(announced):
        return "ok", resolved
    cure = f"export GLOO_SOCKET_IFNAME={routable[0][0]}, or fix /etc/hosts"
    if any(map(network.is_routable, facts.master_addresses)):  # the ranks will meet on several machines
        return "warning", f"{resolved}: gloo would announce {announced} to other machines", cure
    return "ok", f"{resolved}: enough for one machine; before you use several: {cure}"


def ports(facts: Facts) -> Said:
    """Ranks listen on ports that the system picks; the first rank also on MASTER_PORT."""
    if facts.port_error:
        cure = "close programs that hold many connections, or widen net.ipv4.ip_local_port_range"
        return "problem", f"none can be opened: {facts.port_error}", cure
    if (port := facts.environ.get("MASTER_PORT")) is None:
        return "ok", "one could be opened"
    if not 0 < whole(port, 0) < 65536:
        return "problem", f"MASTER_PORT={port} is not a port", "export MASTER_PORT=29500, or any from 1024 to 65535"
    if facts.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or facts.environ.get("RANK", "0") != "0":
        return "ok", f"MASTER_PORT={port} is opened by torchrun's own store or by rank 0, not here"
    if facts.master_port_error:
        cure = f"find its owner: ss -ltnp 'sport = :{port}'; end it, or give every rank another MASTER_PORT"
        return "problem", f"MASTER_PORT={port} cannot be opened: {facts.master_port_error}", cure
    return "ok", f"MASTER_PORT={port} is free"


def launcher(facts: Facts) -> Said:
    """A launcher's variables, left over in a shell, make a program wait for ranks that nobody started."""
    set_here = {name: facts.environ[name] for name in LAUNCHER_VARIABLES if name in facts.environ}
    if not set_here:
        return "ok", "none of its variables are left over"
    found = " ".join(f"{name}={value}" for name, value in set_here.items())
    cure = f"unless a launcher has started this shell: unset {' '.join(set_here)}"
    if wrong := wrong_variables(facts, set_here):
        return "problem", f"{found}: {wrong}", cure
    return "warning", f"{found}: training here would join that job", cure


def wrong_variables(facts: Facts, environ: dict[str, str]) -> str:
    """Return what cannot be right about a launcher's variables, or nothing."""
    for name in LAUNCHER_VARIABLES[:4]:
        if name in environ and whole(environ[name], -1) < (least := int("WORLD" in name)):
            return f"{name} is not a number from {least} on"
    for name, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in environ and limit in environ and int(environ[name]) >= int(environ[limit]):
            return f"ranks count from 0 to {limit} - 1"
    if ("RANK" in environ) != ("WORLD_SIZE" in environ):
        return f"{'WORLD_SIZE' if 'RANK' in environ else 'RANK'} is missing"
    if facts.gpus and int(environ.get("LOCAL_RANK", 0)) >= len(facts.gpus):
        return f"LOCAL_RANK counts GPUs from 0, and there are {len(facts.gpus)}"
    if "MASTER_ADDR" in environ and not facts.master_addresses:
        return "MASTER_ADDR resolves to nothing here"
    ranks, here = (int(environ.get(name, 0)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if 0 < here < ranks and facts.master_addresses and all(map(network.is_loopback, facts.master_addresses)):
        return f"{ranks - here} ranks are on other machines, and MASTER_ADDR is loopback, which they cannot reach"
    return ""


def whole(text: str | None, otherwise: int) -> int:
    """Return the whole number that `text` is, or `otherwise`."""
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else otherwise


# In the order in which a person would fix things.
CHECKS = {"Python": python, "torch": torch, "torchvision": torchvision, "GPUs": gpus, "CUDA": cuda, "NCCL": nccl}
CHECKS |= {"GPU links": links, "gloo": gloo, "loopback": loopback, "interfaces": interfaces, "host name": host_name}
CHECKS |= {"ports": ports, "shared memory": shared_memory, "cores": cores, "threads": threads}
CHECKS |= {"temporary files": temporary_files, "checkpoints": checkpoints, "Jupyter kernel": kernel}
CHECKS |= {"launcher": launcher}


def diagnose(facts: Facts) -> list[Verdict]:
    """Return one verdict for each check."""
    return [Verdict(name, *check(facts)) for name, check in CHECKS.items()]
