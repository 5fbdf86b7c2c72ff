"""What does a caller learn of `launch` and `RankPool`: from a type checker, and from `launch?`."""

import inspect
import os
import re
import subprocess
import sys

import pytest
from mypy import api

from ddp_course import RankPool, launch
from ddp_course.launcher import janitor
from tests.waiting import wait_for

CLIENT = """
from typing import assert_type
from ddp_course import RankPool, launch

def total(rank: int, world_size: int, more: float) -> float:
    return rank + more

assert_type(launch(total, 2, args=(1.0,), timeout_s=5), list[float])
with RankPool(2, quiet=True) as ranks:
    assert_type(ranks.run(total, (1.0,)), list[float])
    words: list[str] = ranks.run(total, (1.0,))
launch("total", 2)
"""
# What a checker reads of torch takes it a minute, and says nothing on `launch`.
SETTINGS = "[mypy]\n[mypy-torch.*,numpy.*,cloudpickle.*]\nfollow_imports = skip\nfollow_imports_for_stubs = true\n"


@pytest.mark.timeout(120)
def test_what_the_ranks_return_has_the_functions_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # so the package is found where it is installed, with its py.typed
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    told, trouble, _ = api.run(["--config-file=mypy.ini", "--no-incremental", "client.py"])
    found = re.findall(r"client\.py:(\d+): error:.*\[([\w-]+)\]", told)
    assert found == [("11", "arg-type"), ("12", "arg-type")], told + trouble


@pytest.mark.parametrize("door", [launch, RankPool], ids=["launch", "RankPool"])
def test_its_help_stands_alone(door):
    told, parameters = inspect.getdoc(door), inspect.signature(door).parameters
    arguments = told.partition("Args:\n")[2].partition("Raises:\n")[0]
    lines = {line.split(":")[0].strip(): line for line in arguments.splitlines() if re.match(r"    \w+:", line)}
    assert list(lines) == list(parameters)
    without = {name for name, line in lines.items() if "default" not in line}
    assert without == {name for name, each in parameters.items() if each.default is each.empty}
    assert f"(default {parameters['timeout_s'].default:g})" in lines["timeout_s"]
    assert f"{door.__name__}(" in told.partition("Args:")[0], "an example"


@pytest.mark.parametrize(
    ("start", "guarded"),
    [
        ("launch(rank_of, 2)", "    launch(rank_of, 2)"),
        ("with RankPool(2, start_method='forkserver') as ranks:\n    ranks.run(rank_of)",
         "    with RankPool(2, start_method='forkserver') as ranks:\n        ..."),
    ],
)  # fmt: skip
def test_a_program_without_a_guard_gets_one_report_with_the_guard(start, guarded, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        f"from ddp_course import RankPool, launch\n\n\ndef rank_of(rank, world_size):\n    return rank\n\n\n{start}\n"
    )
    mark = f"DDP_COURSE_TEST={tmp_path}"
    done = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        env={**os.environ, "DDP_COURSE_TEST": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    report = done.stderr.partition("RankError: ")[2]
    assert report.startswith("train.py, line 8, starts ranks while the program is being imported\nEach rank imports ")
    assert report.endswith(f'\n\nif __name__ == "__main__":\n{guarded}\n')
    wait_for(lambda: janitor.marked(mark) == [], lambda: True, "a process was left", limit_s=10)
