"""Can this machine run the course?

Each check is a pure function from facts to a verdict: ok, warning or problem, what was found, and the cure. Here are
the checks of what is installed and of the machine itself, in the order in which a person would fix things.

Standard library alone: the doctor runs without torch.
Read next: `cluster_checks.py`, for more than one GPU or machine.
"""

from __future__ import annotations

import re

from ddp_course.diagnose.facts import Facts
from ddp_course.diagnose.verdict import Verdict

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
SMALL_SHM_BYTES = 256 * 2**20


def check_python(facts: Facts) -> Verdict:
    found = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        return Verdict("Python", "problem", found, f"install Python {oldest} or newer and run `make env` with it")
    return Verdict("Python", "ok", found)


def check_torch(facts: Facts) -> Verdict:
    if facts.torch is None:
        return Verdict("torch", "problem", "not installed", "run `make env`")
    if facts.torch_error:
        found = f"{facts.torch} cannot be imported: {facts.torch_error}"
        return Verdict("torch", "problem", found, reinstall(facts))
    if release(facts.torch)[:2] < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Verdict("torch", "problem", f"{facts.torch}, older than {oldest}", reinstall(facts))
    return Verdict("torch", "ok", facts.torch)


def check_torchvision(facts: Facts) -> Verdict:
    """torch and torchvision must come from the same build: torchvision calls into torch's compiled code."""
    if facts.torchvision is None:
        missing = "not installed; needed for the ResNet, MNIST, FashionMNIST and CIFAR-10"
        return Verdict("torchvision", "warning", missing, "run `make env`")
    if facts.torch is None or facts.torch_error:
        return Verdict("torchvision", "warning", f"{facts.torchvision}, not tried without torch", "fix torch first")
    pair = f"torch {facts.torch} and torchvision {facts.torchvision}"
    misfits = []
    if build(facts.torch) != build(facts.torchvision):
        misfits.append(f"{pair} come from different builds")
    if not satisfies(facts.torch, facts.torchvision_wants):
        misfits.append(f"torchvision {facts.torchvision} wants {facts.torchvision_wants}, found torch {facts.torch}")
    if facts.torchvision_error:
        said = f"torchvision cannot be imported: {facts.torchvision_error}"
        return Verdict("torchvision", "problem", "; ".join([*(misfits or [pair]), said]), reinstall(facts))
    if misfits:
        return Verdict("torchvision", "warning", "; ".join(misfits), reinstall(facts))
    return Verdict("torchvision", "ok", facts.torchvision)


def check_gpus(facts: Facts) -> Verdict:
    if facts.gpus:
        return Verdict("GPUs", "ok", ", ".join(facts.gpus))
    if facts.nvidia_driver and not facts.torch_error:
        cure = "install torch's CUDA build (`make env TORCH=default`), or a driver as new as that build wants"
        return Verdict("GPUs", "warning", "there is an NVIDIA driver, but torch sees no GPU", cure)
    return Verdict("GPUs", "ok", "none: the ranks run on the CPU and talk over gloo")


def check_cuda(facts: Facts) -> Verdict:
    """A driver serves all CUDA versions up to its own, and newer ones of the same major number."""
    if facts.torch is None or facts.torch_error:
        return Verdict("CUDA", "ok", "not tried without torch")
    if facts.cuda is None:
        return Verdict("CUDA", "ok", "none in this torch: a build for the CPU")
    driver = f"driver {facts.driver or 'unknown'}"
    if not facts.driver_cuda:
        there = f"{driver}" if facts.nvidia_driver else "no NVIDIA driver here"
        return Verdict("CUDA", "ok", f"{facts.cuda} in this torch; {there}")
    newest = ".".join(map(str, facts.driver_cuda))
    if release(facts.cuda)[0] > facts.driver_cuda[0]:
        found = f"torch was built with CUDA {facts.cuda}, {driver} is for CUDA up to {newest}"
        cure = f"a newer driver, or a torch that was built with CUDA {facts.driver_cuda[0]} (`make env TORCH=...`)"
        return Verdict("CUDA", "problem", found, cure)
    return Verdict("CUDA", "ok", f"{facts.cuda} in this torch; {driver}, for CUDA up to {newest}")


def check_nccl(facts: Facts) -> Verdict:
    """torch is built with one NCCL and loads the one that is installed beside it."""
    package, _, wanted = facts.nccl_wants.partition("==")
    if facts.nccl is None:
        if facts.gpus:
            return Verdict("NCCL", "problem", "this torch was built without it: GPUs talk slowly", reinstall(facts))
        return Verdict("NCCL", "ok", "none in this torch; it is for GPUs only")
    if wanted and facts.nccl_package != wanted:
        found = f"torch wants {facts.nccl_wants}, found {facts.nccl_package or 'none'}"
        return Verdict("NCCL", "warning", found, f"install {package}=={wanted}, or: {reinstall(facts)}")
    return Verdict("NCCL", "ok", facts.nccl)


def check_gloo(facts: Facts) -> Verdict:
    if facts.gloo or facts.torch is None or facts.torch_error:
        return Verdict("gloo", "ok", "in this torch" if facts.gloo else "not tried without torch")
    return Verdict("gloo", "problem", "this torch was built without it: ranks on the CPU cannot talk", reinstall(facts))


def check_loopback(facts: Facts) -> Verdict:
    if facts.loopback is None:
        cure = "bring it up (Linux: ip link set lo up) and let no firewall block 127.0.0.1"
        return Verdict("loopback", "problem", "no connection to 127.0.0.1 came about", cure)
    return Verdict("loopback", "ok", facts.loopback)


def check_shared_memory(facts: Facts) -> Verdict:
    if facts.shm_bytes is None and not facts.linux:
        return Verdict("shared memory", "ok", "no /dev/shm on this system, and none needed")
    cure = "start the container with more, for example: docker run --shm-size=1g"
    if facts.shm_bytes is None:
        return Verdict("shared memory", "warning", "no /dev/shm: NCCL and DataLoader's workers need it", cure)
    found = f"{facts.shm_bytes / 2**20:,.0f} MiB in /dev/shm"
    if facts.shm_bytes < SMALL_SHM_BYTES:
        return Verdict("shared memory", "warning", f"{found}: NCCL and DataLoader's workers may run out", cure)
    return Verdict("shared memory", "ok", found)


def check_cores(facts: Facts) -> Verdict:
    if facts.cores < 2:
        return Verdict("cores", "warning", "1: all ranks share it, and lessons take longer", "nothing need be done")
    return Verdict("cores", "ok", f"{facts.cores}, and {facts.memory_bytes / 1e9:.0f} GB of memory")


def check_threads(facts: Facts) -> Verdict:
    """Each rank's compute threads; more than there are cores get in each other's way."""
    told = facts.environ.get("OMP_NUM_THREADS")
    if told is None:
        found = "OMP_NUM_THREADS is not set: launch shares the cores out, torchrun gives each rank 1"
        return Verdict("threads", "ok", found)
    if not told.isdigit() or int(told) < 1:
        cure = "unset OMP_NUM_THREADS, or give it cores divided by ranks"
        return Verdict("threads", "warning", f"OMP_NUM_THREADS={told} is not a number of threads", cure)
    ranks = whole(facts.environ.get("LOCAL_WORLD_SIZE"), 1)
    found = f"OMP_NUM_THREADS={told} for each of {ranks} ranks, {facts.cores} cores"
    if int(told) * ranks > facts.cores:
        cure = f"export OMP_NUM_THREADS={max(1, facts.cores // ranks)}"
        return Verdict("threads", "warning", f"{found}: they get in each other's way", cure)
    return Verdict("threads", "ok", found)


def whole(text: str | None, otherwise: int) -> int:
    """Return the whole number that `text` is, or `otherwise`."""
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else otherwise


def check_temp(facts: Facts) -> Verdict:
    if facts.temp_error:
        found = f"cannot write in {facts.temp_folder}: {facts.temp_error}"
        cure = "free some space, or name another folder: export TMPDIR=..."
        return Verdict("temporary files", "problem", found, cure)
    return Verdict("temporary files", "ok", facts.temp_folder)


def check_kernel(facts: Facts) -> Verdict:
    if facts.kernel:
        return Verdict("Jupyter kernel", "ok", "runs this Python")
    cure = "run `make env`, or: python -m ipykernel install --sys-prefix"
    return Verdict("Jupyter kernel", "warning", "none for this Python: notebooks would use another", cure)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 15, 0) for "2.15.0+cu132"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def build(version: str) -> str:
    """Return what follows the plus sign: "cu132" for "2.15.0+cu132"."""
    return version.partition("+")[2]


def satisfies(version: str, requirement: str) -> bool:
    """Say whether `version` fits a requirement such as "torch>=2.14.0" or "torch (==2.11.0)"."""
    found = release(version)
    return all(
        found == release(wanted) if relation == "==" else found >= release(wanted)
        for relation, wanted in re.findall(r"(==|>=)\s*([\d.]+)", requirement)
    )


def reinstall(facts: Facts) -> str:
    flag = " TORCH=cpu" if build(facts.torch or "") == "cpu" else ""
    return (
        f"rm -rf .venv && make env{flag}, which takes both from one build; without make: uninstall torch and "
        "torchvision, then install them in one command from one index"
    )
