"""The plain programs train the same network on one device and on 1, 2 and 4 ranks, however the ranks are started.

And each change of `ddp.py` that is taken away again shows in the numbers, or in an error.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ddp_course import RankError
from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks
from tests.warm.plugin import start_of

EPOCHS = 3
START = "dist.init_process_group(backend, device_id=device if cuda else None)"
MORE_DIGITS = [("{mean:.4f}", "{mean:.6f}"), ("{accuracy:.4f}", "{accuracy:.6f}")]  # four are for readers
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Two ranks' lines may share a line, for each rank writes where it is.
_EPOCH = re.compile(r"epoch \d+: loss (\d\.\d{6}), accuracy (\d\.\d{6})")
Numbers = list[tuple[float, float]]  # loss and accuracy, by epoch


def finished(folder: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def numbers(done: subprocess.CompletedProcess) -> Numbers:
    assert done.returncode == 0, done.stderr[-3000:]
    return printed(done.stdout)


def printed(said: str) -> Numbers:
    return [(float(a), float(b)) for a, b in _EPOCH.findall(said)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with the three programs, which print six digits there."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("one_device.py", "ddp.py"):
        edited(PROGRAMS / name, folder, *MORE_DIGITS)
    shutil.copy(PROGRAMS / "ddp_spawn.py", folder)
    return folder


@pytest.fixture(scope="module")
def alone(programs) -> Numbers:
    """What the program for one device prints, which is also seen to learn."""
    found = numbers(finished(programs, start_of("python"), "one_device.py", "--epochs", str(EPOCHS)))
    assert len(found) == EPOCHS and found[-1][0] < found[0][0] / 3 and found[-1][1] > 0.95
    return found


def close(found: Numbers) -> object:
    return [pytest.approx(pair, abs=1e-5) for pair in found]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_print_the_numbers_of_one_device(alone, programs, ranks):
    first, *others = on_ranks(programs / "ddp.py", ranks, "--epochs", str(EPOCHS))
    assert printed(first) == close(alone) and others == [""] * len(others)


@pytest.mark.nightly  # lesson 11 runs it, too, and nbval compares what it prints
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_and_so_do_those_of_torchrun(alone, programs, ranks):
    assert printed(by_torchrun(programs / "ddp.py", ranks, "--epochs", str(EPOCHS))) == close(alone)


def test_spawn_prints_the_numbers_of_one_device(alone, programs):
    found = numbers(finished(programs, start_of("python"), "ddp_spawn.py", "2", "--epochs", str(EPOCHS)))
    assert found == close(alone)


def test_a_run_resumes_with_another_number_of_ranks(alone, programs, tmp_path):
    save = ("--checkpoint", str(tmp_path / "run.pt"))
    first = numbers(finished(programs, start_of("python"), "one_device.py", "--epochs", "1", *save))
    then = printed(on_ranks(programs / "ddp.py", 2, "--epochs", str(EPOCHS), *save)[0])
    assert len(first) == 1 and first + then == close(alone)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def without(folder: Path, *edits: tuple[str, str]) -> str:
    """Run `ddp.py` on two ranks after edits; return what both print.

    Raises:
        RankError: as it does on the ranks.
    """
    program = edited(PROGRAMS / "ddp.py", folder, *MORE_DIGITS, *edits)
    return "".join(on_ranks(program, 2, "--epochs", str(EPOCHS)))


def test_without_a_group_there_are_no_ranks(tmp_path):
    with pytest.raises(RankError, match="process group has not been initialized"):
        without(tmp_path, (START, "pass"))


def test_without_a_sampler_an_epoch_is_as_many_passes_as_ranks(alone, tmp_path):
    found = printed(without(tmp_path, (", sampler=sampler", "")))
    assert found[0] != pytest.approx(alone[0], rel=0.1)
    steps = ('print(f"epoch', 'print("steps", len(loader)) if epoch == 0 else None; print(f"epoch')
    assert "steps 32" in without(tmp_path, steps)
    assert "steps 64" in without(tmp_path, steps, (", sampler=sampler", ""))


def test_without_the_division_the_global_batch_is_larger(alone, tmp_path):
    found = printed(without(tmp_path, ("BATCH // world_size", "BATCH")))
    assert found[0][0] > alone[0][0] + 0.02 and found[-1][0] > alone[-1][0] + 0.02


def test_without_set_epoch_all_epochs_have_the_first_ones_order(alone, tmp_path):
    found = printed(without(tmp_path, ("sampler.set_epoch(epoch)", "pass")))
    assert found[0] == pytest.approx(alone[0], abs=1e-5) and found[1:] != close(alone[1:])


def test_without_the_wrapper_each_rank_trains_for_itself(alone, tmp_path):
    found = printed(without(tmp_path, ("replica(x.to(device))", "model(x.to(device))")))
    assert found != close(alone)


def test_without_a_reduction_the_loss_is_that_of_one_ranks_rows(alone, tmp_path):
    found = printed(without(tmp_path, ("        dist.all_reduce(total)\n", "")))
    assert [loss for loss, _ in found] == pytest.approx([loss / 2 for loss, _ in alone], rel=0.2)
    assert [accuracy for _, accuracy in found] == pytest.approx([accuracy for _, accuracy in alone], abs=1e-5)


def test_without_one_voice_every_rank_prints(alone, tmp_path):
    found = printed(without(tmp_path, ("if rank == 0:  # 5: one rank prints", "if True:")))
    assert found[:EPOCHS] == found[EPOCHS:] == close(alone)
