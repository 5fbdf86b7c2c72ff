"""`train_watchdog.py`, lesson 12's program: the numbers of one process, or the rank and the line of a hang."""

import os
import re
import subprocess

import pytest

from tests.programs.running import PROGRAMS, RANKS, by_torchrun, edited, losses_in, losses_of_one_process, on_ranks
from tests.warm.plugin import start_of

PROGRAM = PROGRAMS / "train_watchdog.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("world_size", RANKS)
def test_ranks_print_the_losses_of_one_process_and_write_no_stack(world_size, tmp_path):
    assert losses_in("".join(on_ranks(PROGRAM, world_size, folder=tmp_path)), "012") == pytest.approx(
        losses_of_one_process(3), abs=2e-4
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{rank}.stack" for rank in range(world_size)]
    assert all(path.read_text() == "" for path in tmp_path.iterdir())


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it(tmp_path):
    assert losses_in(by_torchrun(PROGRAM, 2, folder=tmp_path), "012") == pytest.approx(
        losses_of_one_process(3), abs=2e-4
    )


def hang(program, world_size: int, *words: str, folder) -> tuple[str, str, list[list[str]]]:
    """Return both outputs of a run that must fail, and the innermost two functions of each rank's first stack."""
    start = [start_of("torchrun"), "--standalone", f"--nproc-per-node={world_size}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [*start, str(program), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    stacks = [(folder / f"rank{rank}.stack").read_text() for rank in range(world_size)]
    return done.stdout, done.stderr, [re.findall(r" in (\S+)$", stack, re.MULTILINE)[:2] for stack in stacks]


WAITS, STUCK = ["monitored_barrier", "check"], ["read_slowly", "<module>"]


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_a_hang_names_the_rank_and_leaves_the_line_of_each(tmp_path):
    said, errors, innermost = hang(PROGRAM, 4, "--stuck", "2", "--limit", "10", folder=tmp_path)
    assert losses_in(said, "0") == pytest.approx(losses_of_one_process(3)[:1], abs=2e-4)
    assert "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 20000 ms" in errors
    assert innermost == [WAITS, WAITS, STUCK, WAITS]


def test_rank_0_that_hangs_at_the_first_batch_leaves_its_line_and_the_others_point_to_it(tmp_path):
    program = edited(PROGRAM, tmp_path, ("if epoch == 1 and", "if epoch == 0 and"))
    said, errors, innermost = hang(program, 2, "--stuck", "0", "--limit", "5", folder=tmp_path)
    assert losses_in(said, "") == []
    assert "Rank 1 successfully reached monitoredBarrier, but received errors while waiting" in errors
    assert innermost == [STUCK, WAITS]
