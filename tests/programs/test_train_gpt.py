"""`train_gpt.py` has the losses of one process on any number of ranks, also when it resumes."""

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.programs.running import PROGRAMS, RANKS, by_torchrun, on_ranks

PROGRAM = PROGRAMS / "train_gpt.py"
STEPS = 4
OPTIONS = ["--steps", str(STEPS), "--context", "16"]
_LINE = re.compile(r"step (\d+): loss ([\d.]+), held-out ([\d.]+), gradient norm ([\d.]+), [\d,]+ tokens/s")


def numbers(said: str) -> tuple[float, ...]:
    """Step, loss, held-out loss and norm of the last line."""
    lines = _LINE.findall(said)
    assert len(lines) == len(said.splitlines()) == 1, said  # one rank prints, once
    return tuple(map(float, lines[0]))


def numbers_of(world_size: int, checkpoint: Path, *options: str) -> tuple[float, ...]:
    first, *others = on_ranks(PROGRAM, world_size, *OPTIONS, "--checkpoint", str(checkpoint), *options)
    assert others == [""] * len(others)
    return numbers(first)


def close(found: tuple[float, ...]) -> object:
    return pytest.approx(found, abs=0.011)  # the norm is printed with two digits; the losses are compared below


@pytest.fixture(scope="module")
def alone() -> tuple[float, ...]:
    """The numbers of a loop without ranks and micro-batches, written again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAMS)
        gpt, gpt_text = importlib.import_module("gpt"), importlib.import_module("gpt_text")
    train, held_out = gpt_text.read_text()
    torch.manual_seed(0)
    model = gpt.GPT(context=16)
    optimizer = gpt.adamw(model)
    for step in range(STEPS):
        x, y = gpt_text.windows(train, gpt_text.numbers_of_step((len(train) - 1) // 16, step, 32), 16)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = gpt.learning_rate(step, STEPS)
        optimizer.step()
    x, y = gpt_text.windows(held_out, torch.arange(128) * ((len(held_out) - 1) // 16 // 128), 16)
    with torch.no_grad():
        outside = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return STEPS, loss.item(), outside.item(), norm.item()


def test_gpt_has_the_parameters_of_gpt2_and_reads_nothing_ahead(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    gpt = importlib.import_module("gpt")
    with torch.device("meta"):
        model = gpt.GPT(layers=12, heads=12, width=768, context=1024, vocabulary=50257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    model, x = gpt.GPT(), torch.arange(64)[None]
    changed = x.clone()
    changed[0, 40] = 200
    with torch.no_grad():
        differs = (model(x) != model(changed)).any(dim=-1)[0]
    assert differs.nonzero().flatten().tolist() == list(range(40, 64))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", RANKS)
def test_any_number_of_ranks_has_the_numbers_of_one_process(alone, world_size, tmp_path):
    found = numbers_of(world_size, tmp_path / "gpt.pt")
    assert found == close(alone) and found[1:3] == pytest.approx(alone[1:3], abs=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_continues_on_another_number_of_ranks(alone, tmp_path):
    checkpoint = tmp_path / "gpt.pt"
    assert numbers_of(1, checkpoint, "--until", "2")[0] == 2
    found = numbers_of(2, checkpoint)
    assert found == close(alone) and found[1:3] == pytest.approx(alone[1:3], abs=2e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.pt"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_runs_it_in_bf16(alone, tmp_path):
    found = numbers(by_torchrun(PROGRAM, 2, *OPTIONS, "--bf16", folder=tmp_path))
    assert found[1:3] == pytest.approx(alone[1:3], abs=0.02) and found[1:] != pytest.approx(alone[1:], abs=1e-5)
