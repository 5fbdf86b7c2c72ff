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


def wait_for_ranks(folder: Path, alive) -> list[psutil.Process]:
    """Return the three ranks once each has written its process number to `folder`, and take the numbers away."""
    deadline = time.monotonic() + 90.0
    while len(found := list(folder.glob("*.pid"))) < 3:
        assert alive() and time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    ranks = [psutil.Process(int(path.read_text())) for path in found]
    for path in found:
        path.unlink()
    return ranks


def assert_all_gone(processes: list[psutil.Process], folder: Path) -> None:
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left, f"left behind: {left}"
    folders = [path.name for path in folder.iterdir() if path.is_dir() and "torchinductor" not in path.name]
    assert not folders, "the ranks' folder, or the fork server's with its socket, is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "start_method"),
    [
        (signal.SIGINT, "forkserver"),  # and with "spawn" in a kernel, below
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
        ranks = wait_for_ranks(tmp_path, lambda: parent.poll() is None)
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(how)
        said, _ = parent.communicate(timeout=60)  # so long on a busy machine; alone it takes 4 s
    assert_all_gone([*ranks, *family], tmp_path)
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
def test_no_rank_outlives_its_cell_or_kernel(kernel, tmp_path):
    """A kernel that is killed is a program that is killed, as above; these two are a kernel's own."""
    manager, client = kernel

    def launch(start_method: str) -> tuple[str, list[psutil.Process]]:
        code = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n"
        code += "from ddp_course import launch\nfrom tests.launcher.on_ranks import wait_forever\n"
        request = client.execute(f"{code}launch(wait_forever, 3, ({str(tmp_path)!r},), start_method={start_method!r})")
        return request, wait_for_ranks(tmp_path, manager.is_alive)

    request, ranks = launch("spawn")
    manager.interrupt_kernel()
    while (reply := client.get_shell_msg(timeout=20))["parent_header"]["msg_id"] != request:
        pass
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
    assert_all_gone(ranks, tmp_path)
    _, ranks = launch("forkserver")
    family = psutil.Process(manager.provisioner.process.pid).children(recursive=True)
    janitors = [process for process in family if "janitor.py" in " ".join(process.cmdline())]
    assert janitors
    manager.restart_kernel(now=False)
    assert_all_gone([*ranks, *janitors], tmp_path)


def test_a_program_that_has_launched_ends_without_a_warning():
    program = "from ddp_course import launch; print(launch(lambda r, w: r, 2, start_method='forkserver', quiet=True))"
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")
