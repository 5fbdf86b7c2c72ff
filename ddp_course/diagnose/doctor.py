"""What is missing or wrong on this machine, said before a lesson stumbles over it.

First `gather_facts` looks around. Then each check is a pure function from these facts to a verdict, so that a test
can plant a broken machine without having one. torch and torchvision are imported in a process of their own, with
a limit: a pair that does not fit raises, crashes or hangs there and not here.

This file uses the standard library alone. If torch is too broken for `ddp-course doctor` to start, run it by its
path: python ddp_course/diagnose/doctor.py

Left out on purpose: whether ranks can talk to each other; lesson 00 shows that.
"""

from __future__ import annotations

import argparse
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
from dataclasses import asdict, dataclass, field
from pathlib import Path

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
SMALL_SHM_BYTES = 256 * 2**20
IMPORT_LIMIT_S = 120.0
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARK = {"ok": "ok", "warning": "warning", "problem": "PROBLEM"}


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
    nvidia_driver: bool = False
    gloo: bool = True
    loopback: str | None = "lo"  # its name, if a connection over it came about
    shm_bytes: int | None = 8 * 2**30  # None: there is no /dev/shm
    linux: bool = True
    cores: int = 4
    temp_folder: str = "/tmp"
    temp_error: str = ""
    kernel: bool = True  # JupyterLab can start this very Python
    environ: dict[str, str] = field(default_factory=dict)  # a launcher's variables


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    name: str
    state: str  # "ok", "warning" or "problem"
    found: str
    cure: str = ""


# --- The checks, pure ------------------------------------------------------------------------------


def diagnose(facts: Facts) -> list[Verdict]:
    """Return one verdict for each check, in the order in which a person would mend things."""
    return [check(facts) for check in CHECKS]


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
        return Verdict("torchvision", "warning", f"{facts.torchvision}, not tried without torch", "mend torch first")
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
    return Verdict("cores", "ok", str(facts.cores))


def check_temp(facts: Facts) -> Verdict:
    if facts.temp_error:
        found = f"cannot write in {facts.temp_folder}: {facts.temp_error}"
        return Verdict(
            "temporary files", "problem", found, "free some space, or name another folder: export TMPDIR=..."
        )
    return Verdict("temporary files", "ok", facts.temp_folder)


def check_kernel(facts: Facts) -> Verdict:
    if facts.kernel:
        return Verdict("Jupyter kernel", "ok", "runs this Python")
    cure = "run `make env`, or: python -m ipykernel install --sys-prefix"
    return Verdict("Jupyter kernel", "warning", "none for this Python: notebooks would use another", cure)


def check_environment(facts: Facts) -> Verdict:
    """A launcher's variables, left over in a shell, make a program wait for ranks that nobody started."""
    name, left_over = "launcher", [name for name in LAUNCHER_VARIABLES if name in facts.environ]
    if not left_over:
        return Verdict(name, "ok", "none of its variables are left over")
    found = " ".join(f"{name}={facts.environ[name]}" for name in left_over)
    cure = f"unless a launcher has started this shell: unset {' '.join(left_over)}"
    if ("RANK" in left_over) != ("WORLD_SIZE" in left_over):
        missing = "WORLD_SIZE" if "RANK" in left_over else "RANK"
        return Verdict(name, "problem", f"{found}, but no {missing}", cure)
    return Verdict(name, "warning", f"{found}: training here would join that job", cure)


CHECKS = (
    check_python,
    check_torch,
    check_torchvision,
    check_gpus,
    check_gloo,
    check_loopback,
    check_shared_memory,
    check_cores,
    check_temp,
    check_kernel,
    check_environment,
)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 15, 0) for "2.15.0+cu132"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def build(version: str) -> str:
    """Return what follows the plus sign: "cu132" for "2.15.0+cu132"."""
    return version.partition("+")[2]


def satisfies(version: str, requirement: str) -> bool:
    """Say whether `version` fits a requirement such as "torch>=2.14.0" or "torch (==2.11.0)"."""
    for relation, wanted in re.findall(r"(==|>=)\s*([\d.]+)", requirement):
        fits = release(version) == release(wanted) if relation == "==" else release(version) >= release(wanted)
        if not fits:
            return False
    return True


def reinstall(facts: Facts) -> str:
    flag = " TORCH=cpu" if build(facts.torch or "") == "cpu" else ""
    return (
        f"rm -rf .venv && make env{flag}, which takes both from one build; without make: uninstall torch and "
        "torchvision, then install them in one command from one index"
    )


# --- Looking around --------------------------------------------------------------------------------


def gather_facts() -> Facts:
    """Look at this machine. Opens one connection over loopback and starts two short processes."""
    torch, torch_error = import_apart(
        "import torch, torch.distributed as d; "
        "gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]; "
        "found = {'version': torch.__version__, 'gpus': gpus, 'gloo': d.is_available() and d.is_gloo_available()}"
    )
    torchvision, torchvision_error = import_apart("import torchvision; found = {'version': torchvision.__version__}")
    return Facts(
        python=tuple(sys.version_info[:3]),
        torch=torch.get("version") or installed("torch"),
        torch_error=torch_error,
        torchvision=torchvision.get("version") or installed("torchvision"),
        torchvision_error=torchvision_error,
        torchvision_wants=wish_of_torchvision(),
        gpus=tuple(torch.get("gpus", ())),
        nvidia_driver=Path("/dev/nvidiactl").exists(),
        gloo=torch.get("gloo", False),
        loopback=working_loopback(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        linux=sys.platform == "linux",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        temp_folder=tempfile.gettempdir(),
        temp_error=error_of_writing(tempfile.gettempdir()),
        kernel=has_kernel(Path(sys.prefix), sys.executable),
        environ={name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ},
    )


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
    try:
        told = Path(package_files.locate_file(package), "version.py").read_text()
    except OSError:
        told = ""
    match = re.search(r"__version__ = ['\"](.+?)['\"]", told)
    return match[1] if match else package_files.version


def wish_of_torchvision() -> str:
    """Return what torchvision's own metadata says about torch, or nothing."""
    try:
        wishes = importlib.metadata.requires("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    return next((wish for wish in wishes if re.match(r"torch\b(?!vision)", wish)), "")


def working_loopback() -> str | None:
    """Return the name of the loopback interface, if a connection over 127.0.0.1 comes about."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    except OSError:
        return None


def error_of_writing(folder: str) -> str:
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


# --- Telling ---------------------------------------------------------------------------------------


def table(verdicts: list[Verdict]) -> str:
    """Return a line for each verdict, each cure below what it cures, and the sum of it all."""
    lines = []
    for verdict in verdicts:
        lines.append(f"{MARK[verdict.state]:8} {verdict.name:16} {verdict.found}")
        if verdict.cure:
            lines.append(f"{'':25} -> {verdict.cure}")
    count = {state: sum(verdict.state == state for verdict in verdicts) for state in MARK}
    lines.append(f"\n{len(verdicts)} checks: {count['problem']} problems, {count['warning']} warnings")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the verdicts; return 1 if there is a problem, else 0."""
    parser = argparse.ArgumentParser(prog="ddp-course doctor", description="Say what is missing on this machine.")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    options = parser.parse_args(argv)
    verdicts = diagnose(gather_facts())
    print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2) if options.json else table(verdicts))
    return int(any(verdict.state == "problem" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
