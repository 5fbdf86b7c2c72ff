"""Lesson 03's solutions, held to counting: their judges ask nothing but them."""

import subprocess
import sys

import pytest

from ddp_course.grading.source import function_of, solution_of

VALUES = [10**10 + 1, 20, 300, 4000]


def test_the_place_of_a_rank():
    place = function_of("03.1", "place", solution_of("03.1"))
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert place(environ, 4) == (5, 1, 1, "cuda:1")
    assert place(environ, 3) == (5, 1, 1, "cpu")
    for wrong in ({"RANK": "8"}, {"RANK": "-1"}, {"RANK": "1.5"}, {"RANK": ""}):
        with pytest.raises(ValueError, match="RANK"):
            place({**environ, **wrong}, 4)
    with pytest.raises(ValueError, match="LOCAL_RANK"):
        place({name: value for name, value in environ.items() if name != "LOCAL_RANK"}, 4)


@pytest.mark.parametrize(
    ("id", "name", "right"),
    [("03.3", "node_sum", [10**10 + 21] * 2 + [4300] * 2), ("03.5", "from_leader", [10**10 + 1] * 2 + [300] * 2)],
)
def test_each_node_for_itself(ranks, id, name, right):
    function = function_of(id, name, solution_of(id))
    found = ranks(4).run(lambda rank, world_size: int(function(rank, world_size, 2, VALUES[rank])))
    assert found == right


@pytest.mark.slow
def test_torchrun_runs_the_program(tmp_path):
    (tmp_path / "total.py").write_text(function_of("03.4", "program", solution_of("03.4"))())
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    subprocess.run([*start, "total.py", "total.txt", *map(str, VALUES)], cwd=tmp_path, timeout=100, check=True)
    assert (tmp_path / "total.txt").read_text() == f"{sum(VALUES)}\n"
