"""Where several tests run at a time, the kernels of compared lessons, their ranks and their torchrun are forked.

`--again` starts real ones, as one test file by itself does. A lesson's kernel finds the server's commands in
its PATH; the tests of programs ask for them, with `start_of`.
"""

from __future__ import annotations

import json
import marshal
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.warm import client

ROOT = Path(__file__).parents[2]
FOLDER = "WARM_PYTHON"  # the variable that tells the workers where the server's commands are


def start_of(command: str) -> str:
    """Return the path of `python` or `torchrun`: the server's, where there is one, else the real one."""
    return str(Path(os.environ.get(FOLDER) or Path(sys.executable).parent) / command)


COMMANDS = {"torchrun": "torch.distributed.run", "ddp-course": "ddp_course.cli"}


def lay_out(folder: Path) -> None:
    """Write the commands that stand for Python's into a folder."""
    for name in ("python", *COMMANDS):
        (folder / name).write_text(f"#!{sys.executable} -IS\n{Path(client.__file__).read_text('utf-8')}")
        (folder / name).chmod(0o755)
    (folder / "real").symlink_to(sys.executable)
    (folder / "commands").write_bytes(marshal.dumps(COMMANDS))
    (folder / "environment").write_bytes(marshal.dumps(client.at_start(dict(os.environ))))


class Warm:
    """A server and its folder; they go with the block, or with this process."""

    def __enter__(self) -> Warm:
        self.folder = Path(tempfile.mkdtemp(prefix="warm_"))
        lay_out(self.folder)
        command = [sys.executable, "-m", "tests.warm", self.folder]
        pipe = subprocess.PIPE  # forks take Python's streams as they are: those of pipes suit any file
        self._server = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        return self

    def __exit__(self, *error: object) -> None:
        _, said = self._server.communicate(timeout=60)
        sys.stderr.write(said.decode())

    def offer_kernel(self) -> None:
        """Let Jupyter find a kernel that is forked, and that finds the server's commands."""
        start = [f"{self.folder}/python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        found = {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"}
        kernel = {"argv": start, "env": found, "display_name": "forked Python", "language": "python"}
        place = self.folder / "kernels/forked"
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps(kernel))
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("JUPYTER_PATH"))))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.option.nbval_kernel_name = "forked" if FOLDER in os.environ else None
        return
    several = sys.platform == "linux" and (config.getoption("numprocesses", None) or 0) > 1
    if several and not config.getoption("again") and not config.option.collectonly:
        until_end = ExitStack()
        warm = until_end.enter_context(Warm())
        config.add_cleanup(until_end.close)
        warm.offer_kernel()
        os.environ[FOLDER] = str(warm.folder)
