"""`train_dp.py`, lesson 02's program: it prints the losses of one process, which are those of lesson 00's `train.py`.

Without a GPU, `nn.DataParallel` calls the model. So what is tested here is that the program trains as `train.py` does.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.programs.running import PROGRAMS, edited, losses_in, losses_of_one_process
from tests.warm.plugin import start_of

PROGRAM = PROGRAMS / "train_dp.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def by_python(program: Path) -> list[float]:
    """What the line of its docstring prints."""
    assert f"\npython {program.name}\n" in program.read_text()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [start_of("python"), str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_in(done.stdout, "01234")


def test_it_prints_the_losses_of_one_process():
    assert by_python(PROGRAM) == pytest.approx(losses_of_one_process(5), abs=2e-4)


def test_another_order_of_samples_has_other_losses(tmp_path):
    broken = edited(PROGRAM, tmp_path, ("    order.manual_seed(epoch)  # a different order in each epoch\n", ""))
    found = by_python(broken)
    assert found[-1] < found[0] / 5 and found != pytest.approx(losses_of_one_process(5), abs=2e-4)
