"""Is a setting that cannot be meant refused before any rank starts, and a run resumed as itself?"""

from dataclasses import asdict, replace

import pytest

from ddp_course.checkpoint.folder import CheckpointError
from ddp_course.train.gpt import GPTConfig
from ddp_course.train.images import Config
from ddp_course.train.policy import PolicyConfig


@pytest.mark.parametrize(
    ("config", "setting", "message"),
    [
        (Config, {"epochs": 0}, "epochs=0: must be at least 1"),
        (Config, {"local_batch": -1}, "local_batch=-1: must be at least 1"),
        (Config, {"model": "gpt"}, "model='gpt' is not known; choose from mlp, mlp_bn, resnet18"),
        (Config, {"dataset": "faces"}, "dataset='faces' is not known; choose from digits, mnist"),
        (Config, {"resume": True}, "resume needs a checkpoint"),
        (Config, {"schedule": "stairs"}, "schedule='stairs' is not known; choose from constant, cosine"),
        (Config, {"schedule": "cosine", "epochs": 2, "warmup": 2.0}, "warmup=2.0: must end before the last epoch does"),
        (Config, {"warmup": -0.5}, "warmup=-0.5: must be at least 0"),
        (Config, {"workers": -1}, "workers=-1: must be at least 0"),
        (Config, {"amp": True, "dtype": "float64"}, "amp is for weights in float32, not in float64"),
        (GPTConfig, {"steps": 0}, "steps=0: must be at least 1"),
        (GPTConfig, {"accumulation": 0}, "accumulation=0: must be at least 1"),
        (GPTConfig, {"clip": 0.0}, "clip=0.0: must be above 0"),
        (GPTConfig, {"size": "huge"}, "size='huge' is not known; choose from tiny, mini, small, gpt2"),
        (GPTConfig, {"precision": "fp8"}, "precision='fp8' is not known; choose from float32, bf16"),
        (GPTConfig, {"save_every": 5}, "save_every needs a checkpoint"),
        (PolicyConfig, {"iterations": 0}, "iterations=0: must be at least 1"),
        (PolicyConfig, {"horizon": 1}, "horizon=1: must be at least 2"),
        (PolicyConfig, {"check_every": -1}, "check_every=-1: must be at least 0"),
        (PolicyConfig, {"seed": -1}, "seed=-1: must be at least 0"),
    ],
)
def test_a_wrong_setting_is_refused_before_any_rank_starts(config, setting, message):
    with pytest.raises(ValueError) as caught:
        config(**setting)
    assert str(caught.value).startswith(message)


def test_a_run_is_resumed_as_itself_and_older_files_know_fewer_settings():
    now = Config(lr=0.2)
    older = {name: value for name, value in asdict(now).items() if name not in ("schedule", "augment", "amp")}
    now.refuse_another_run(older, "run")
    now.refuse_another_run(asdict(replace(now, epochs=3, workers=2)), "run")  # free, with a constant rate
    with pytest.raises(CheckpointError, match="was written with schedule='constant', this run has 'cosine'"):
        replace(now, schedule="cosine").refuse_another_run(older, "run")
    falling = replace(now, schedule="cosine", epochs=8)
    falling.refuse_another_run(asdict(falling), "run")
    with pytest.raises(CheckpointError, match="go on with epochs=8"):  # its rate would not have ended at zero
        replace(falling, epochs=9).refuse_another_run(asdict(falling), "run")
