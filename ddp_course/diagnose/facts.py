"""What is there on this machine?

`gather_facts` looks around once; the checks then judge what it found. So a test can plant a broken machine without
having one. torch and torchvision are imported in a process of their own, with a limit: a pair that does not fit
raises, crashes or hangs there and not here.

Standard library alone, like all that the doctor needs without `--rendezvous`.
Read next: `checks.py`, from facts to verdicts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ddp_course.diagnose import gpu_links, network, storage
from ddp_course.diagnose.network import Interface
from ddp_course.diagnose.storage import Storage

IMPORT_LIMIT_S = 120.0
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES += ("TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOK_AT_TORCH = """
import torch, torch.distributed as d
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if d.is_available() and d.is_nccl_available() else ()
found = {"version": torch.__version__, "gpus": gpus, "gloo": d.is_available() and d.is_gloo_available(),
         "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl)) or None}
"""


@dataclass(frozen=True)
class Facts:
    """What was found on this machine. The defaults describe one on which all is well."""

    python: tuple[int, int, int] = (3, 11, 7)
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
    driver_cuda: tuple[int, ...] = ()  # the highest CUDA version it is for
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
    return Facts(
        **about_torch(),
        **about_the_network(environ),
        python=tuple(sys.version_info[:3]),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        linux=sys.platform == "linux",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        temp_folder=tempfile.gettempdir(),
        temp_error=error_of_writing(tempfile.gettempdir()),
        storage=storage.look_at(checkpoint) if checkpoint else None,
        kernel=has_kernel(Path(sys.prefix), sys.executable),
        environ=environ,
    )


# --- torch and the GPUs ----------------------------------------------------------------------------


def about_torch() -> dict:
    """Return the facts that torch, torchvision, their metadata and the driver tell."""
    torch, torch_error = import_apart(LOOK_AT_TORCH)
    torchvision, torchvision_error = import_apart("import torchvision; found = {'version': torchvision.__version__}")
    nccl_wants = wish("torch", r"nvidia-nccl-cu\d+==[\d.]+")
    driver, driver_cuda = gpu_links.parse_driver(gpu_links.ask_nvidia_smi())
    return {
        "torch": torch.get("version") or installed("torch"),
        "torch_error": torch_error,
        "torchvision": torchvision.get("version") or installed("torchvision"),
        "torchvision_error": torchvision_error,
        "torchvision_wants": wish("torchvision", r"torch\b(?!vision).*"),
        "gpus": tuple(torch.get("gpus", ())),
        "links": gpu_links.parse_topology(gpu_links.ask_nvidia_smi("topo", "-m")) if driver else {},
        "cuda": torch.get("cuda"),
        "nvidia_driver": Path("/dev/nvidiactl").exists(),
        "driver": driver,
        "driver_cuda": driver_cuda,
        "nccl": torch.get("nccl"),
        "nccl_wants": nccl_wants,
        "nccl_package": installed(nccl_wants.partition("==")[0]) if nccl_wants else None,
        "gloo": torch.get("gloo", False),
    }


def import_apart(program: str, limit_s: float = IMPORT_LIMIT_S) -> tuple[dict, str]:
    """Run `program`, which sets `found`, in another process.

    Returns:
        What it found and "", or nothing and the last line of its error.
    """
    program = f"{program}\nimport json; print('\\n' + json.dumps(found))"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {limit_s:g} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    words = done.stderr.strip().splitlines()
    return {}, words[-1] if words else f"the process ended with status {done.returncode}"


def installed(package: str) -> str | None:
    """Return the version that is installed, with its build where the package's own version.py tells it."""
    try:
        package_files = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(package_files.locate_file(package), "version.py")
    match = re.search(r"__version__ = ['\"](.+?)['\"]", file.read_text()) if file.exists() else None
    return match[1] if match else package_files.version


def wish(package: str, pattern: str) -> str:
    """Return the first of a package's requirements that begins with `pattern`, as far as that goes, or nothing."""
    try:
        wishes = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((match[0] for each in wishes if (match := re.match(pattern, each))), "")


# --- the network -----------------------------------------------------------------------------------


def about_the_network(environ: dict[str, str]) -> dict:
    """Return the facts about interfaces, names and ports."""
    addresses, host_error = network.resolve(socket.gethostname())
    port = environ.get("MASTER_PORT", "")
    return {
        "loopback": working_loopback(),
        "interfaces": network.interfaces(),
        "host_name": socket.gethostname(),
        "host_addresses": addresses,
        "host_error": host_error,
        "port_error": network.error_of_binding(0),
        "master_addresses": network.resolve(environ["MASTER_ADDR"])[0] if environ.get("MASTER_ADDR") else (),
        "master_port_error": network.error_of_binding(int(port), "") if port.isdigit() else "",
    }


def working_loopback() -> str | None:
    """Return the name of the loopback interface, if a connection over 127.0.0.1 comes about."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    except OSError:
        return None


# --- files -----------------------------------------------------------------------------------------


def error_of_writing(folder: str) -> str:
    """Return why nothing can be written in `folder`, or nothing."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return ""


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
