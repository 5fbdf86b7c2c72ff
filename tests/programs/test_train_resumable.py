"""`train_resumable.py`, lesson 15's program: killed or told to leave, it ends with the bits of the undisturbed run.

Without dropout, whose masks differ by rank, any number of ranks has the losses of one process.
"""

import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_course import RankError, launch
from tests.programs.running import PROGRAMS, edited, run_program

PROGRAM = PROGRAMS / "train_resumable.py"
EPOCHS, LEFT = 3, 128 + signal.SIGTERM  # an epoch has 30 steps
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Death:
    """A signal that reaches a rank: `at` is where the rank is, in or after which step."""

    number: int
    rank: int
    step: int
    at: str = "step"  # or in a save: "gather", "write" (half of the file is written), "replace", "replaced"


IN_A_SAVE = ("gather", "write", "replace", "replaced")  # the last three on rank 0, which writes


def run(rank: int, world_size: int, program: Path, checkpoint: Path, death: Death | None, dropout: bool) -> int:
    """Run the program, to whose end something may come; return the exit status."""
    steps = count(1)
    now = 0

    def happen(at: str) -> None:
        if death and (at, rank, now) == (death.at, death.rank, death.step):
            signal.raise_signal(death.number)

    def stepped(*_: object) -> None:
        nonlocal now
        now = next(steps)
        happen("step")

    def half_written(state: object, path: Path | BytesIO, *args: object, save=torch.save, **options: object) -> None:
        save(state, path, *args, **options)
        checkpoint = isinstance(path, Path)  # all_gather_object saves tensors, too, in memory
        if death and checkpoint and (death.at, rank, now) == ("write", death.rank, death.step):
            os.truncate(path, path.stat().st_size // 2)
            happen("write")

    def replaced(*paths: Path, replace=os.replace) -> None:
        happen("replace")
        replace(*paths)
        happen("replaced")

    def gathered(*args: object, gather=dist.all_gather_object) -> None:
        happen("gather")
        gather(*args)

    register_optimizer_step_post_hook(stepped)
    torch.save, os.replace, dist.all_gather_object = half_written, replaced, gathered
    if not dropout:
        nn.Dropout.forward = lambda self, x: x
    try:
        print(run_program(rank, world_size, program, (str(checkpoint),), checkpoint.parent, world_size), end="")
    except SystemExit as ended:
        return ended.code
    return 0


def on_ranks(
    world_size: int, checkpoint: Path, death: Death | None = None, dropout: bool = True, program: Path = PROGRAM
) -> list[int]:
    settings = {"init": False, "start_method": "forkserver", "quiet": True, "limit_s": 150}
    return launch(run, world_size, (program, checkpoint, death, dropout), **settings)


def content(checkpoint: Path) -> dict:
    return torch.load(checkpoint, weights_only=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict:
    """What two ranks leave that nothing disturbs."""
    checkpoint = tmp_path_factory.mktemp("straight") / "run.pt"
    assert on_ranks(2, checkpoint) == [0, 0]
    return content(checkpoint)


def same(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_killed_run_that_resumes_is_the_undisturbed_run(straight, tmp_path):
    checkpoint = tmp_path / "run.pt"
    with pytest.raises(RankError, match="SIGKILL"):
        on_ranks(2, checkpoint, Death(signal.SIGKILL, 1, 53))
    assert content(checkpoint)["step"] == 40
    assert on_ranks(2, checkpoint) == [0, 0]
    same(content(checkpoint), straight)
    assert straight["step"] == 90 and [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    first, second = (states[0] for states in straight["rng_states"])
    assert not torch.equal(first, second)


def deaths(seed: int) -> list[Death]:
    """Return what ends the lives of one run, one after the other: a step that this life reaches, mostly in a save."""
    rng, found, begins = Random(seed), [], 0
    while begins < 60 and len(found) < 3 and (not found or rng.random() < 0.5):
        at = rng.choice(("step", *IN_A_SAVE)) if found else ("step", *IN_A_SAVE)[seed % 5]
        rank = (seed // 5 + len(found)) % 2 if at in ("step", "gather") else 0
        if at == "step":
            step = rng.randint(begins + 1, 89)
        else:
            step = rng.choice([step for step in range(20, 81, 20) if step > begins])
        found.append(Death(signal.SIGKILL, rank, step - begins, at))
        begins = step if at == "replaced" else (step - 1) // 20 * 20
    return found


RUNS, BY_DAY = 50, 10  # the others at night


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.nightly] * (n >= BY_DAY)) for n in range(RUNS)])
def test_killed_at_any_moment_a_run_goes_on_to_the_same_bits(seed, straight, tmp_path):
    checkpoint, saved = tmp_path / "run.pt", 0
    for death in deaths(seed):
        with pytest.raises(RankError, match="SIGKILL"):
            on_ranks(2, checkpoint, death)
        ended = saved + death.step
        saved = ended if death.at == "replaced" else (ended - 1) // 20 * 20
        assert (content(checkpoint)["step"] if checkpoint.exists() else 0) == saved
    assert on_ranks(2, checkpoint) == [0, 0]
    same(content(checkpoint), straight)


def test_the_deaths_are_as_various_as_they_should_be():
    found = [deaths(seed) for seed in range(RUNS)]
    for part in (found, found[:BY_DAY]):
        every = [death for run in part for death in run]
        assert {(death.at, death.rank) for death in every} >= {("step", 0), ("step", 1), ("gather", 0), ("gather", 1)}
        assert {death.at for death in every} == {"step", *IN_A_SAVE}
        assert sum(len(run) > 1 for run in part) >= len(part) / 5


@pytest.mark.parametrize(
    "left_out",
    [
        '{"model": model, "optimizer": optimizer, "scheduler": scheduler} => {"model": model, "optimizer": optimizer}',
        "one.set_rng_state(rng_state) => pass",
        "step % steps_per_epoch * local_batch : => :",
    ],
    ids=["the schedule", "the random state", "the place in the epoch"],
)
def test_the_comparison_would_notice_what_is_left_out(left_out, straight, tmp_path):
    program = edited(PROGRAM, tmp_path, tuple(left_out.split(" => ")))
    checkpoint = tmp_path / "run.pt"
    assert on_ranks(2, checkpoint, Death(signal.SIGTERM, 0, 35), program=program) == [LEFT, LEFT]
    assert on_ranks(2, checkpoint, program=program) == [0, 0]
    with pytest.raises(AssertionError):
        same(content(checkpoint)["model"], straight["model"])


@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_at_one_rank_leaves_all_after_the_same_step(straight, tmp_path, victim):
    checkpoint = tmp_path / "run.pt"
    assert on_ranks(2, checkpoint, Death(signal.SIGTERM, victim, 35)) == [LEFT, LEFT]
    assert content(checkpoint)["step"] == 35
    assert on_ranks(2, checkpoint) == [0, 0]
    same(content(checkpoint), straight)


def alone() -> dict:
    """The weights of one process that has no ranks, no sampler, no DDP, no schedule object and no dropout."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[:1440] / 16).float(), torch.tensor(labels[:1440])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for step, batch in enumerate(torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(48)):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * (30 * epoch + step) / 90))
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("before, after", [(1, 1), (4, 4), (2, 3), (3, 2)])
def test_any_ranks_have_the_weights_of_one_process_also_after_a_stop(tmp_path, before, after):
    checkpoint = tmp_path / "run.pt"
    left = on_ranks(before, checkpoint, Death(signal.SIGTERM, before - 1, 35), dropout=False)
    assert left == [LEFT] * before and content(checkpoint)["step"] == 35
    assert on_ranks(after, checkpoint, dropout=False) == [0] * after
    torch.testing.assert_close(content(checkpoint)["model"], dict(alone()), rtol=1e-3, atol=1e-4)


def test_ranks_that_cannot_share_the_batch_are_refused(tmp_path):
    with pytest.raises(RankError, match="5 ranks can't share 48 images evenly"):
        on_ranks(5, tmp_path / "run.pt")


KILLED_ONCE = """
import os, runpy, signal, sys
from io import BytesIO
from itertools import count
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = count(1)

def die(*_):
    if next(steps) == 53 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.raise_signal(signal.SIGKILL)

register_optimizer_step_post_hook(die)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly  # the lesson runs it, too, and nbval compares what it prints
def test_torchrun_restarts_it_by_the_lines_of_its_docstring(straight, tmp_path):
    name, value, options = re.search(r"export (\w+)=(\w+).*\n *torchrun (.*?)train_res", PROGRAM.read_text()).groups()
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options.split(),
        "killed_once.py",
        str(PROGRAM),
        "run.pt",
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", name: value}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"ranks start after step (\d+)", done.stdout) == ["0", "40"]
    same(content(tmp_path / "run.pt"), straight)
