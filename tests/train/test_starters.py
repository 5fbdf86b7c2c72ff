"""Do a terminal, torchrun and a cell train the same bits, and does a hang or a signal under them end well?"""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ddp_course.train.gpt import GPTConfig, train_gpt
from ddp_course.train.images import Config, train
from ddp_course.train.policy import PolicyConfig, train_policy
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
MEASURED = ("seconds", "tokens_per_s", "peak_flops", "mfu")

IMAGES = Config(epochs=2, hidden=32)
GPT = GPTConfig(size="tiny", steps=6, warmup=2, local_batch=2, held_out=7, sample=20)
POLICY = PolicyConfig(iterations=5, num_envs=4, horizon=16, epochs=3, hidden=16, episodes=8, check_every=0)


def options_of(config: object) -> list[str]:
    """Return the options that a terminal needs for this config."""
    usual = asdict(type(config)())
    changed = {name: value for name, value in asdict(config).items() if value != usual[name]}
    return [f"--{name.replace('_', '-')}={value}" for name, value in changed.items()]


@pytest.mark.parametrize(
    ("starter", "words", "work", "config"),
    [
        ([*TORCHRUN, "-m"], [], train, IMAGES),
        ([], ["--world-size=2"], train, IMAGES),
        ([*TORCHRUN, "-m"], ["gpt"], train_gpt, GPT),
        ([], ["policy"], train_policy, POLICY),
    ],
    ids=["images, torchrun", "images, our own launcher", "gpt, torchrun", "policy, our own launcher"],
)
def test_every_starter_trains_the_same_bits(ranks, two_cores, starter, words, work, config):
    command = [sys.executable, "-m", *starter, "ddp_course.train", *words, *options_of(config)]
    done = subprocess.run([*command, "--backend=gloo", "--json"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    expected = [asdict(result) for result in ranks(2).run(work, (config,), limit_s=120)]
    found, expected = json.loads(done.stdout), json.loads(json.dumps(expected))  # JSON has no tuples
    for result in found + expected:
        for name in MEASURED:
            result.pop(name, None)
    assert found == expected


def test_sigterm_to_a_language_model_saves_and_ends_with_143(tmp_path):
    config = replace(GPT, steps=1_000_000, save_every=5, checkpoint=str(tmp_path))
    command = [sys.executable, "-m", "ddp_course.train", "gpt", *options_of(config), "--backend=gloo", "--no-progress"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: list(tmp_path.glob("step-*.pt")), lambda: program.poll() is None, "no checkpoint")
        program.terminate()
        said, errors = program.communicate(timeout=60)
    finally:
        program.kill()
        program.communicate()
    assert program.returncode == 143, errors
    last = max(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("step-*.pt"))
    assert f"left after step {last}, saved" in said


HANGS_ON_RANK_1 = """
import os, sys, time
from ddp_course.train.run import Run
from ddp_course.commands.train import main

if os.environ["RANK"] == "1":
    Run.after_step = lambda self, loss, rows: time.sleep(60)  # never comes
sys.exit(main(["--epochs=1", "--backend=gloo", "--no-progress", "--hang-report=2"]))
"""


def test_a_hang_under_torchrun_is_reported_with_the_rank_and_its_line(tmp_path):
    program = tmp_path / "hangs.py"
    program.write_text(HANGS_ON_RANK_1)
    done = subprocess.run(
        [sys.executable, "-m", *TORCHRUN, str(program)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 1
    # The first thing that rank 0 does alone: DDP plans its buckets again, and rank 0 tells how.
    assert "rank 1 never entered broadcast #5 " in done.stderr and "; rank 0 waited 2 s" in done.stderr
    assert "rank 1 was at hangs.py, line 7, in <lambda>: Run.after_step = " in done.stderr
    assert done.stderr.count("Where the ranks were:") == 1
