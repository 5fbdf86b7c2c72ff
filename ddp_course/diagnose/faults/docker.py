"""Why does NCCL fail in a container that runs fine outside?

Three things that NCCL takes for granted are missing or different in there: shared memory, which Docker limits to
64 MB; direct access from GPU to GPU, which a virtual machine or an IOMMU may break without saying so; and the
network, where the container sees other interfaces than the host. `check_container` judges them from facts, one
after the other, as a person would.

Here the facts of a typical container are planted: NCCL needs GPUs, so nothing is provoked. `look_around` gathers the
facts of the machine you are on.
Read next: `catalogue.py`, all faults in order.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace

import torch

from ddp_course.diagnose.faults.fault import Diagnosis, Fault
from ddp_course.diagnose.network import interfaces, nccl_interfaces

DOCKER_SHM_BYTES = 64 * 2**20  # Docker's and Kubernetes' default
INNER = ("br-", "veth", "virbr", "cni", "flannel")  # interfaces that lead to other containers of this host only


@dataclass(frozen=True)
class ContainerFacts:
    """What NCCL finds. The defaults describe a container in which all is well."""

    gpus: int = 2
    machines: int = 1
    shm_bytes: int | None = 8 * 2**30  # None: there is no /dev/shm
    p2p: str = "right"  # a copy from GPU to GPU arrives "right" or "wrong"; or "none": no direct access
    interfaces: tuple[str, ...] = ("lo", "eth0")
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """One thing that is wrong."""

    found: str
    cure: str


def check_container(facts: ContainerFacts) -> list[Advice]:
    """Return what will go wrong, first things first; nothing when all is well."""
    return [advice for check in (check_shm, check_p2p, check_interfaces) if (advice := check(facts))]


def check_shm(facts: ContainerFacts) -> Advice | None:
    """GPUs without direct access meet in shared memory, about 10 MB for each pair, as do a DataLoader's workers."""
    if facts.gpus < 2 or (facts.shm_bytes or 0) > DOCKER_SHM_BYTES:
        return None
    size = "missing" if facts.shm_bytes is None else f"{facts.shm_bytes / 2**20:.0f} MB"
    cure = "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir with medium: Memory at /dev/shm"
    return Advice(f"/dev/shm is {size} for {facts.gpus} GPUs: 'No space left on device', or a bus error", cure)


def check_p2p(facts: ContainerFacts) -> Advice | None:
    """A direct copy that arrives wrong means that an IOMMU or PCI's access control stands between the GPUs."""
    if facts.gpus < 2 or facts.p2p != "wrong" or facts.environ.get("NCCL_P2P_DISABLE") == "1":
        return None
    cure = "NCCL_P2P_DISABLE=1 at once, at the price of speed; for good, switch off ACS or the IOMMU of the host"
    return Advice("the driver offers direct GPU access, but a copy arrives wrong: NCCL hangs or sums garbage", cure)


def check_interfaces(facts: ContainerFacts) -> Advice | None:
    """Between machines NCCL takes whatever interface its filter lets through."""
    if facts.machines < 2:
        return None
    wanted = facts.environ.get("NCCL_SOCKET_IFNAME", "")
    chosen = nccl_interfaces(facts.environ, facts.interfaces)
    outside = [name for name in facts.interfaces if not name.startswith(("lo", "docker", *INNER))]
    if not outside:
        found = f"no interface leads outside: {', '.join(facts.interfaces)}"
        return Advice(found, "docker run --network=host on every machine")
    if not chosen:
        found = f"NCCL_SOCKET_IFNAME={wanted} fits none of {', '.join(facts.interfaces)}"
    elif astray := [name for name in chosen if name not in outside]:
        found = f"NCCL will use {', '.join(astray)}, which the other machine cannot reach"
    else:
        return None
    return Advice(found, f"NCCL_SOCKET_IFNAME={outside[0]}, the interface that the other machine is reached by")


# --- The facts of this machine ---------------------------------------------------------------------


def look_around(machines: int = 1) -> ContainerFacts:
    """Gather the facts where you are. With two GPUs or more it copies a few kB between the first two."""
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    names = tuple(each.name for each in interfaces() if each.up)
    environ = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return ContainerFacts(torch.cuda.device_count(), machines, shm, copy_directly(), names, environ)


def copy_directly() -> str:
    """Copy from GPU 0 to GPU 1 and compare: "right", "wrong", or "none" without a direct way."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        return "none"
    sent = torch.arange(1000, device="cuda:0")
    return "right" if torch.equal(sent.to("cuda:1").cpu(), sent.cpu()) else "wrong"


# --- The fault -------------------------------------------------------------------------------------


def judge(facts: ContainerFacts) -> Diagnosis:
    """`check_container` as a diagnosis, all its advice in the evidence."""
    if advice := check_container(facts):
        return Diagnosis("nccl-in-docker", None, "; ".join(f"{a.found} -> {a.cure}" for a in advice))
    return Diagnosis(None, None, "shared memory, direct access and interfaces are as NCCL needs them")


CONTAINER = ContainerFacts(
    gpus=4, machines=2, shm_bytes=DOCKER_SHM_BYTES, p2p="wrong", interfaces=("lo", "br-4f2a", "docker0", "eth0")
)


def start_a_plain_container() -> Diagnosis:
    return judge(CONTAINER)  # docker run --gpus all IMAGE


def start_a_fit_container() -> Diagnosis:
    # docker run --gpus all --shm-size=8g -e NCCL_P2P_DISABLE=1 -e NCCL_SOCKET_IFNAME=eth0 IMAGE
    environ = {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}
    return judge(replace(CONTAINER, shm_bytes=8 * 2**30, environ=environ))


FAULTS = (
    Fault(
        name="nccl-in-docker",
        title="NCCL fails in a container: shared memory, direct access, interfaces",
        symptom="'unhandled system error', 'No space left on device' or a bus error; a hang in the first all_reduce; "
        "or connections to 172.17.0.2, an address that exists on every Docker host.",
        cause="Docker gives 64 MB of shared memory. Direct GPU access is offered but broken by an IOMMU. NCCL has "
        "picked an interface that only leads to other containers.",
        cure="--shm-size=8g or --ipc=host; NCCL_P2P_DISABLE=1, to find out; NCCL_SOCKET_IFNAME and --network=host. Set "
        "NCCL_DEBUG=INFO and read which way it takes: P2P, SHM or NET.",
        met_at="https://github.com/NVIDIA/nccl/issues/342",
        provoke=start_a_plain_container,
        fix=start_a_fit_container,
    ),
)
