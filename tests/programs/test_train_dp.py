"""`train_dp.py`, lesson 02's program: one process prints what `train.py` prints on any number of ranks.

Without a GPU, `nn.DataParallel` calls the model. So what is tested here is that the two programs train alike.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.running import PROGRAMS, edited, on_ranks

PROGRAM = PROGRAMS / "train_dp.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def losses(said: str) -> list[float]:
    assert re.findall(r"^epoch (\d):", said, re.MULTILINE) == list("01234")
    return [float(loss) for loss in re.findall(r"loss (\d\.\d{4})\n", said)]


def by_python(program: Path) -> list[float]:
    """What the line of its docstring prints."""
    assert f"\npython {program.name}\n" in program.read_text()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(done.stdout)


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    found = by_python(PROGRAM)
    assert found[-1] < found[0] / 5
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_of_train_print_its_losses(one_process, world_size):
    said = "".join(on_ranks(PROGRAMS / "train.py", world_size))
    assert losses(said) == pytest.approx(one_process, abs=2e-4)


def test_another_order_of_samples_has_other_losses(one_process, tmp_path):
    broken = edited(PROGRAM, tmp_path, ("    order.manual_seed(epoch)  # a different order in each epoch\n", ""))
    found = by_python(broken)
    assert found[-1] < found[0] / 5 and found != pytest.approx(one_process, abs=2e-4)
