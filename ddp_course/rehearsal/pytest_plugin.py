"""How does a test ask that a training program computes on several ranks what it computes on one?

    def test_ddp(ddp_certificate):
        ddp_certificate("train.py", "--epochs", "2").check(equal_to=1e-5, samples_once=True)

The rehearsal is a process of its own: pytest imports no torch for it, and keeps its GPUs.
Read next: `certificate.py`, what a certificate says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_course.rehearsal.certificate import Certificate

RUNS = 4  # of the program: on several ranks, on one, killed, resumed
START_S = 60.0  # of each


def certified(
    script: str | Path, *arguments: object, ranks: int = 2, resume_with: str | None = None, limit_s: float = 300.0
) -> Certificate:
    """Rehearse a program, as `ddp-course rehearse --certify` does, and return what was measured.

    Args:
        arguments: the program's own.
        resume_with: arguments that are added when it is started again after a kill, such as "--resume".
        limit_s: the longest that one of its runs may take.
    Raises:
        RuntimeError: it cannot be rehearsed.
        subprocess.TimeoutExpired: the rehearsal took longer than its runs may.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_certificate_") as folder:
        file = Path(folder, "certificate.json")
        # -P: no file of the tests' folder stands for a module of ours.
        command = [sys.executable, "-P", "-m", "ddp_course.cli", "rehearse", "--certify", file]
        command += [f"--resume-with={resume_with or ''}", f"--ranks={ranks}", f"--limit={limit_s}", script, *arguments]
        ended = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=RUNS * (limit_s + START_S)
        )
        if not file.exists() or not (text := file.read_text()):
            raise RuntimeError(ended.stderr.strip())
        return Certificate(**json.loads(text))


@pytest.fixture(scope="session")
def ddp_certificate() -> Callable[..., Certificate]:
    """A function that rehearses a program and returns its certificate: `ddp_certificate("train.py", "--epochs", 2)`."""
    return certified
