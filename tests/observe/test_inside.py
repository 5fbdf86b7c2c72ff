"""What a process finds of itself that is watched, and of those that it starts."""

import os
import subprocess
import sys

import pytest

from ddp_course.observe.program import INSIDE, VARIABLE


def printed(program: str, folder: object, **other: str) -> str:
    """What a program prints that is watched from `folder`, where nobody may listen."""
    environment = os.environ | {VARIABLE: str(folder), "PYTHONPATH": str(INSIDE)} | other
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize("before", [[], ["/the/script's", "/second"]])
def test_the_own_path_is_kept_whatever_stands_before_ours(before, tmp_path):
    path = os.pathsep.join([*before, str(INSIDE), "/mine"])
    program = "import os; print(os.environ['PYTHONPATH'])"
    assert printed(program, tmp_path, RANK="0", PYTHONPATH=path).split(os.pathsep) == [*before, "/mine"]
