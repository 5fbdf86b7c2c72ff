"""Whatever happens to the parent, no rank outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nothing_left")]

PROGRAM = """
import sys
from ddp_course import launch
from tests.launcher import on_ranks
if __name__ == "__main__":
    launch(on_ranks.wait_forever, 3, (sys.argv[1],), start_method=sys.argv[2])
"""


def wait_for_ranks(folder: Path, world_size: int, alive, limit_s: float = 90.0) -> list[psutil.Process]:
    """Return the ranks once each has written its process number to `folder`."""
    deadline = time.monotonic() + limit_s
    while len(found := list(folder.glob("*.pid"))) < world_size:
        assert alive() and time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [psutil.Process(int(path.read_text())) for path in found]


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left, f"left behind: {left}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "start_method"),
    [
        (signal.SIGINT, "spawn"),
        (signal.SIGTERM, "forkserver"),
        (signal.SIGKILL, "spawn"),
        (signal.SIGKILL, "forkserver"),
    ],
)
def test_no_rank_outlives_its_program(tmp_path, how, start_method):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path), start_method]
    environ = {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as parent:
        ranks = wait_for_ranks(tmp_path, 3, lambda: parent.poll() is None)
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(how)
        said, _ = parent.communicate(timeout=20)
    assert_all_gone([*ranks, *family])
    assert not list(tmp_path.glob("ddp_course_*")), "the ranks' folder is left"
    if how == signal.SIGINT:
        assert "KeyboardInterrupt: interrupted; the 3 ranks have been ended" in said
        assert "selectors" not in said
        assert "rank 0  waited in all_reduce #1" in said
        assert "rank 1  did not answer\n          on_ranks.py" in said  # its interpreter is held; faulthandler sees it
        assert "rank 2  was running\n          on_ranks.py" in said


@pytest.fixture
def kernel():
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "restart", "kill"])
def test_no_rank_outlives_its_kernel_or_cell(kernel, tmp_path, how):
    manager, client = kernel
    code = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n"
    code += "from ddp_course import launch\nfrom tests.launcher.on_ranks import wait_forever\n"
    method = "spawn" if how == "interrupt" else "forkserver"
    request = client.execute(f"{code}launch(wait_forever, 3, ({str(tmp_path)!r},), start_method={method!r})")
    ranks = wait_for_ranks(tmp_path, 3, manager.is_alive)
    family = psutil.Process(manager.provisioner.process.pid).children(recursive=True)
    janitors = [process for process in family if "janitor.py" in " ".join(process.cmdline()) and how != "interrupt"]
    if how == "interrupt":
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=20))["parent_header"]["msg_id"] != request:
            pass
        assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
    elif how == "restart":
        manager.restart_kernel(now=False)
    else:
        manager.signal_kernel(signal.SIGKILL)
    assert_all_gone([*ranks, *janitors])
    folders = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert not folders, "the ranks' folder, or the fork server's with its socket, is left"
