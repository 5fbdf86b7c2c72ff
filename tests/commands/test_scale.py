"""Does `ddp-course scale` say what it measured, refuse what it cannot, and leave nothing behind?"""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from ddp_course.commands.scale import main

TINY = ["--quick", "--hidden", "16", "--batch", "8"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_json_and_the_picture(capsys, tmp_path):
    picture = tmp_path / "new" / "scale.png"
    assert main([*TINY, "--mode", "strong", "--json", "--png", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["world_size"] for row in found["rows"]] == [1, 2] and found["mode"] == "strong"
    assert found["rows"][0]["efficiency"]["value"] == 1.0
    assert found["explained"][0].startswith("2 ranks train at")
    (cost,) = found["collectives"]
    assert cost["op"] == "all_reduce" and len(cost["residuals"]) == len(cost["sizes"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(180)
def test_the_text_says_simulated_where_it_is(capsys):
    assert main([*TINY, "--link", "100gbe", "--collectives", "none"]) == 0
    said = capsys.readouterr().out
    assert "simulated link (100 GbE)" in said.splitlines()[0] and "busbw" not in said
    assert "2 ranks train at" in said and "missing" in said


@pytest.mark.parametrize("words, sentence", [
    (["--world-size", "2"], "is one number of ranks"),
    (["--world-size", "1,x"], "not a whole number"),
    (["--mode", "strong", "--batch", "7"], "cannot be divided among 2"),
    (["--repeats", "1"], "two runs"),
    (["--collectives", "gather"], "'gather' is not known"),
    (["--replica", "naive", "--link", "1gbe"], "needs buckets"),
])  # fmt: skip
def test_what_is_refused(words, sentence, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_failing_rank_is_status_1(capsys):
    assert main(["--quick", "--hidden", "16", "--batch", "1000"]) == 1
    assert "does not fit into the" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path):
    command = [sys.executable, "-m", "ddp_course.cli", "scale", "--steps", "100000", "--hidden", "16", "--batch", "8"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ranks = _ranks(program.pid)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
        assert program.returncode == 130 and "no rank is left" in said
        gone, alive = psutil.wait_procs(ranks, timeout=30)
        assert not alive and len(gone) >= 3
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ddp_course")] == []
    finally:
        program.kill()


def _ranks(pid: int) -> list[psutil.Process]:
    """The processes below, once the three ranks are there and one has computed for a second."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        below = psutil.Process(pid).children(recursive=True)
        heads = [
            process for process in below if psutil.pid_exists(process.pid) and os.getsid(process.pid) == process.pid
        ]
        if len(heads) >= 3 and any(sum(process.cpu_times()[:2]) > 1 for process in heads):
            return below
        time.sleep(0.05)
    raise AssertionError("the ranks did not start within 90 s")
