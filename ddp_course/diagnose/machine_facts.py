"""What is there on this machine?

`gather_facts` looks around once, and `machine_checks.py` judges what it found; so a test can plant a broken machine
without having one. torch and torchvision are imported in a process of their own, with a limit: a pair that does not
fit raises, crashes or hangs there and not here.

Standard library alone: the doctor runs where torch is broken.
Left out on purpose: whether another machine sees the folder for checkpoints; only it can tell.
Read next: `network.py`, for the interfaces.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_course.diagnose import network
from ddp_course.diagnose.network import Interface

IMPORT_LIMIT_S = 120.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES += ("TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOK_AT_TORCH = """
import torch, torch.distributed as d
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if d.is_available() and d.is_nccl_available() else ()
found = {"torch": torch.__version__, "gpus": gpus, "gloo": d.is_available() and d.is_gloo_available(),
         "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)) or None}
"""
# lockf's locks keep processes out, not threads: another process tries.
TRY_TO_LOCK = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(3)
"""


@dataclass(frozen=True)
class Storage:
    """What was found about a folder. The defaults describe one that is fit."""

    folder: str = "/data/checkpoints"
    error: str = ""  # why nothing can be written there
    atomic_rename: bool = True  # a rename onto an existing file replaces it
    locks: bool = True  # a lock keeps another process out
    free_bytes: int = 100 * 2**30
    kind: str = "ext2/ext3"  # of file system, as Linux's `stat` names it; "" if unknown


@dataclass(frozen=True)
class Facts:
    """What was found on this machine. The defaults describe one on which all is well."""

    python: str = "3.11.7"
    torch: str | None = "2.15.0+cpu"  # version with the build it is from; None: not installed
    torch_error: str = ""  # last line of a failed import
    torchvision: str | None = "0.29.2+cpu"
    torchvision_error: str = ""
    torchvision_wants: str = "torch>=2.14.0"  # from its own metadata
    gpus: tuple[str, ...] = ()
    links: dict[tuple[int, int], str] = field(default_factory=dict)  # (0, 1) -> "NV12"
    cuda: str | None = None  # that torch was built with; None: a build for the CPU
    nvidia_driver: bool = False
    driver: str | None = None  # its version, if nvidia-smi tells
    driver_cuda: str = ""  # the highest CUDA version it is for
    nccl: str | None = None  # as torch tells it
    nccl_wants: str = ""  # the package and version that torch's metadata asks for: "nvidia-nccl-cu13==2.30.1"
    nccl_package: str | None = None  # the version of that package that is installed
    gloo: bool = True
    loopback: str | None = "lo"  # its name, if a connection over it came about
    interfaces: tuple[Interface, ...] = (
        Interface("lo", ("127.0.0.1", "::1"), loopback=True),
        Interface("eth0", ("10.0.0.5",)),
    )
    host_name: str = "node-a"
    host_addresses: tuple[str, ...] = ("10.0.0.5",)  # what the own host name resolves to
    host_error: str = ""  # why it resolves to nothing
    port_error: str = ""  # why no port can be opened
    master_port_error: str = ""  # why nobody can listen at MASTER_PORT, if that is set
    master_addresses: tuple[str, ...] = ()  # what MASTER_ADDR resolves to, if it is set
    shm_bytes: int | None = 8 * 2**30  # None: there is no /dev/shm
    linux: bool = True
    cores: int = 4
    memory_bytes: int = 16 * 10**9
    temp_folder: str = "/tmp"
    temp_error: str = ""
    storage: Storage | None = None  # None: no folder was named
    kernel: bool = True  # JupyterLab can start this very Python
    environ: dict[str, str] = field(default_factory=dict)  # those of VARIABLES that are set


def gather_facts(checkpoint: str | None = None) -> Facts:
    """Look at this machine. Opens ports on loopback for a moment and starts a few short processes.

    Args:
        checkpoint: a folder to try for checkpoints.
    """
    environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    port, (addresses, host_error) = environ.get("MASTER_PORT", ""), network.resolve(socket.gethostname())
    return Facts(
        **about_torch(),
        python=platform.python_version(),
        loopback=working_loopback(),
        interfaces=network.interfaces(),
        host_name=socket.gethostname(),
        host_addresses=addresses,
        host_error=host_error,
        port_error=error_of_binding(0),
        master_addresses=network.resolve(environ["MASTER_ADDR"])[0] if environ.get("MASTER_ADDR") else (),
        master_port_error=error_of_binding(int(port)) if port.isdigit() else "",
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        linux=sys.platform == "linux",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        temp_folder=tempfile.gettempdir(),
        temp_error=look_at_folder(tempfile.gettempdir()).error,
        storage=look_at_folder(checkpoint) if checkpoint else None,
        kernel=has_kernel(Path(sys.prefix), sys.executable),
        environ=environ,
    )


# --- torch and the GPUs ----------------------------------------------------------------------------


def about_torch() -> dict:
    """Return the facts that torch, torchvision, their metadata and the driver tell."""
    facts = {name: installed(name) for name in ("torch", "torchvision")} | {"gloo": False}
    found, facts["torch_error"] = import_apart(LOOK_AT_TORCH)
    facts |= {"gpus": (), "cuda": None, "nccl": None} | found
    program = "import torchvision; found = {'torchvision': torchvision.__version__}"
    found, facts["torchvision_error"] = import_apart(program)
    facts |= found
    facts["torchvision_wants"] = wish("torchvision", r"torch\b(?!vision).*")
    facts["nccl_wants"] = wish("torch", r"nvidia-nccl-cu\d+==[\d.]+")
    facts["nccl_package"] = installed(facts["nccl_wants"].partition("==")[0]) if facts["nccl_wants"] else None
    facts["driver"], facts["driver_cuda"] = parse_driver(output_of("nvidia-smi"))
    facts["links"] = parse_links(output_of("nvidia-smi", "topo", "-m")) if facts["driver"] else {}
    return facts | {"nvidia_driver": Path("/dev/nvidiactl").exists()}


def import_apart(program: str, limit_s: float = IMPORT_LIMIT_S) -> tuple[dict, str]:
    """Run `program`, which sets `found`, in another process; return `found` and "", or {} and why there is none."""
    command = [sys.executable, "-c", f"{program}\nimport json; print('\\n' + json.dumps(found))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {limit_s:g} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    return {}, (done.stderr.strip().splitlines() or [f"the process ended with status {done.returncode}"])[-1]


def installed(package: str) -> str | None:
    """Return the version that is installed, with its build where the package's own version.py tells it."""
    with suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution(package)
        file = Path(found.locate_file(package), "version.py")
        match = re.search(r"__version__ = ['\"](.+?)['\"]", file.read_text()) if file.exists() else None
        return match[1] if match else found.version
    return None


def wish(package: str, pattern: str) -> str:
    """Return the first of a package's requirements that begins with `pattern`, as far as that goes, or nothing."""
    with suppress(importlib.metadata.PackageNotFoundError):
        wishes = importlib.metadata.requires(package) or []
        return next((match[0] for each in wishes if (match := re.match(pattern, each))), "")
    return ""


def output_of(*command: str, limit_s: float = 20.0) -> str:
    """Return what a command prints, or nothing where it is missing, fails or does not answer."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True).stdout
    return ""


def parse_driver(text: str) -> tuple[str | None, str]:
    """Return the driver's version and the highest CUDA version it is for, from the head that `nvidia-smi` prints."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", text)
    return driver[1] if driver else None, cuda[1] if cuda else ""


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Return the link between each two GPUs, (0, 1) -> "NV12", from what `nvidia-smi topo -m` prints.

    NV12 stands for twelve NVLinks, PIX and PXB for switches on one PCIe tree, PHB and NODE for the way through the
    processor, SYS for the way to another processor's side. Columns for network cards and CPUs are passed over.
    """
    rows = re.findall(r"^[ \t]*GPU(\d+)([ \t].*\bX\b.*)$", text, re.MULTILINE)  # X, itself, stands in no other line
    return {
        (int(a), int(b)): link.replace("SOC", "SYS")  # SYS's name in old drivers
        for a, links in rows
        for (b, _), link in zip(rows, links.split(), strict=False)  # the first columns are the rows' GPUs
        if int(a) < int(b) and re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC", link)
    }


# --- The network -----------------------------------------------------------------------------------


def working_loopback() -> str | None:
    """Return the name of the loopback interface, if a connection over 127.0.0.1 comes about."""
    with suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return None


def error_of_binding(port: int) -> str:
    """Return why no one can take this port, 0 for any; "" if that is possible. Nothing is opened: nobody listens."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server would: old connections may linger
            probe.bind(("", port))
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


# --- Files -----------------------------------------------------------------------------------------


def look_at_folder(folder: str) -> Storage:
    """Try what a checkpoint needs in `folder`, and leave nothing there.

    A checkpoint is written beside its place and renamed onto it, so that a kill leaves the old one or the new one. A
    lock keeps a second run out. Network file systems differ in both, so both are tried.
    """
    kind = output_of("stat", "-f", "-c", "%T", folder).strip()
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as own:
            old, new = Path(own, "old"), Path(own, "new")
            old.write_text("old")
            new.write_text("new")
            with suppress(OSError):
                os.replace(new, old)
            renamed, locks = old.read_text() == "new" and not new.exists(), can_lock(old)
        return Storage(folder, "", renamed, locks, shutil.disk_usage(folder).free, kind)
    except OSError as error:
        return Storage(folder, error.strerror or str(error))


def can_lock(file: Path) -> bool:
    """Say whether a lock on `file` keeps another process out."""
    with suppress(ImportError, OSError, subprocess.TimeoutExpired), open(file, "a") as held:
        import fcntl

        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        command = [sys.executable, "-c", TRY_TO_LOCK, str(file)]
        return subprocess.run(command, timeout=30, capture_output=True).returncode == 3
    return False


def has_kernel(prefix: Path, executable: str) -> bool:
    """Say whether a kernel that is installed below `prefix` starts `executable`."""
    if importlib.util.find_spec("ipykernel") is None:
        return False
    for file in prefix.glob("share/jupyter/kernels/*/kernel.json"):
        starts = json.loads(file.read_text()).get("argv", [""])[0]
        # A bare "python" is replaced by the Python that runs Jupyter, which is the one below `prefix`.
        if starts in ("python", "python3") or os.path.dirname(starts) == os.path.dirname(executable):
            return True
    return False
