"""What does a caller learn of `launch` and `RankPool`: from a type checker, and from `launch?`."""

import inspect
import re

import pytest
from mypy import api

from ddp_course import RankPool, launch

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
