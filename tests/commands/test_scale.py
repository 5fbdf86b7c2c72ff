"""Does `ddp-course scale` say what it measured, refuse what it cannot, and leave nothing behind?"""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from ddp_course.commands import scale
from tests.waiting import wait_for

TINY = ["--quick", "--hidden", "16", "--batch", "8"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_json_and_text_and_the_picture_of_one_measurement(capsys, tmp_path, monkeypatch):
    measured, picture = [], tmp_path / "new" / "scale.png"
    measure = scale.measure_scaling
    monkeypatch.setattr(
        scale, "measure_scaling", lambda *args, **more: measured.append(measure(*args, **more)) or measured[0]
    )
    words = [*TINY, "--mode", "strong", "--link", "100gbe"]
    assert scale.main([*words, "--json", "--png", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["world_size"] for row in found["rows"]] == [1, 2] and found["mode"] == "strong"
    assert found["rows"][0]["efficiency"]["value"] == 1.0
    assert found["explained"][0].startswith("2 ranks train at")
    (cost,) = found["collectives"]
    assert cost["op"] == "all_reduce" and len(cost["residuals"]) == len(cost["sizes"])
    assert picture.read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(scale, "measure_scaling", lambda *args, **more: measured[0])
    assert scale.main([*words, "--collectives", "none"]) == 0
    said = capsys.readouterr().out
    assert "simulated link (100 GbE)" in " ".join(said.split()) and "busbw" not in said
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
        scale.main(words)
    assert exit_.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_failing_rank_is_status_1(capsys):
    assert scale.main(["--quick", "--hidden", "16", "--batch", "1000"]) == 1
    assert "does not fit into the" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path):
    command = [sys.executable, "-m", "ddp_course.cli", "scale", "--steps", "100000", "--hidden", "16", "--batch", "8"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: computing_ranks(program.pid), lambda: program.poll() is None, "the ranks did not start", 90)
        ranks = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
        assert program.returncode == 130 and "no rank is left" in said
        gone, alive = psutil.wait_procs(ranks, timeout=30)
        assert not alive and len(gone) >= 3
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ddp_course")] == []
    finally:
        program.kill()


def computing_ranks(pid: int) -> list[psutil.Process]:
    """The processes below, if the three ranks are there and one has computed for a second; else none."""
    below = psutil.Process(pid).children(recursive=True)
    heads = [process for process in below if psutil.pid_exists(process.pid) and os.getsid(process.pid) == process.pid]
    return below if len(heads) >= 3 and any(sum(process.cpu_times()[:2]) > 1 for process in heads) else []
