"""`train.py`, lesson 00's program: 1, 2 or 4 ranks print what one process computes.

And what the lesson takes away from it shows in the losses.
"""

import pytest

from tests.programs.running import PROGRAMS, by_torchrun, edited, losses_in, losses_of_one_process, on_ranks

PROGRAM = PROGRAMS / "train.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
EPOCHS = "01234"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_print_the_losses_of_one_process(world_size):
    assert losses_in("".join(on_ranks(PROGRAM, world_size)), EPOCHS) == pytest.approx(
        losses_of_one_process(5), abs=2e-4
    )


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_runs_it():
    assert losses_in(by_torchrun(PROGRAM, 2), EPOCHS) == pytest.approx(losses_of_one_process(5), abs=2e-4)


def test_with_the_model_in_place_of_its_replica_only_the_losses_differ(tmp_path):
    broken = edited(PROGRAM, tmp_path, ("replica(x.to(device))", "model(x.to(device))"))
    found, alone = losses_in("".join(on_ranks(broken, 2)), EPOCHS), losses_of_one_process(5)
    assert found[-1] < found[0] / 2 and all(abs(a - b) > 0.01 for a, b in zip(found, alone, strict=True))
