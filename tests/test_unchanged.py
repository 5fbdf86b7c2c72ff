"""Is a lesson left out only when it, what it imports and the versions are as they were when all of it passed?"""

import json
import os
import subprocess
import sys

import pytest

from tests import unchanged

LESSON = "notebooks/03_process_groups.ipynb"
BANK = "solutions/09_logging"


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        (LESSON, {LESSON}),
        ("solutions/09_logging/bank.py", {BANK}),
        ("judges/logging/mean.py", {BANK}),
        ("ddp_course/launcher/pool.py", None),
        ("versions.txt", None),
        ("tests/test_gpt.py", set()),
    ],
)
def test_what_runs_again_after_a_change(changed, again, monkeypatch):
    before, read = unchanged.groups(), type(unchanged.ROOT).read_bytes
    edited = unchanged.ROOT / changed
    assert edited.is_file()
    monkeypatch.setattr(type(edited), "read_bytes", lambda path: read(path) + b" " * (path == edited))
    after = unchanged.groups()
    assert {group for group in before if before[group] != after[group]} == (set(before) if again is None else again)


@pytest.mark.slow
def test_a_lesson_that_passed_whole_is_left_out_until_asked_for_again(tmp_path):
    def outcomes(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", "-o", f"cache_dir={tmp_path}", *options]
        environment = {n: v for n, v in os.environ.items() if n != "CI" and not n.startswith("PYTEST")}
        done = subprocess.run(command, cwd=unchanged.ROOT, env=environment, capture_output=True, text=True, timeout=250)
        return done.stdout.strip().splitlines()[-1]

    cells = json.loads((unchanged.ROOT / LESSON).read_text())["cells"]
    every = sum(cell["cell_type"] == "code" for cell in cells)
    assert outcomes(f"{LESSON}::Cell 0").startswith("1 passed")
    assert outcomes(LESSON, f"--deselect={LESSON}::Cell {every - 1}").startswith(f"{every - 1} passed")
    assert outcomes(LESSON).startswith(f"{every} passed")  # neither part of it was the whole
    assert outcomes(LESSON).startswith(f"{every} deselected")
    assert outcomes(LESSON, "--again").startswith(f"{every} passed")
