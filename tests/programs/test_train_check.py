"""`train_check.py`, lesson 13's program: it has the losses of one process, and names what is planted in it."""

import re

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from tests.programs.running import PROGRAMS, by_torchrun, edited, on_ranks

PROGRAM = PROGRAMS / "train_check.py"
SAMPLES, ORDER, GRADIENT, WEIGHTS = (
    "samples twice in a step",
    "steps that came before",
    "gradient off, relatively",
    "checksums apart",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of a loop without ranks, sampler and DDP."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.2), []
    for epoch in range(2):
        total = 0.0
        for batch in torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)).split(32):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * 32
        found.append(total / 1440)
    return found


def losses_in(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d{4})\n", said)]


def verdicts(said: str) -> dict[str, tuple[str, float, str]]:
    """What the report says of each comparison: ok or WRONG, the number, where first."""
    found = re.findall(r"^(ok|WRONG) +(.*): ([\d.e+-]+)(?:, first in (.*))?$", said, re.MULTILINE)
    return {what: (verdict, float(number), where) for verdict, what, number, where in found}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("words", [(), ("--check",)])
def test_it_has_the_losses_of_one_process_and_finds_nothing(alone, world_size, words):
    first, *others = on_ranks(PROGRAM, world_size, *words)
    assert others == [""] * (world_size - 1)
    assert losses_in(first) == pytest.approx(alone, abs=2e-4)
    found = verdicts(first)
    assert set(found) == ({SAMPLES, ORDER, GRADIENT, WEIGHTS} if words else set())
    assert all(verdict == "ok" for verdict, *_ in found.values())
    if words:
        assert found[WEIGHTS][1] == found[SAMPLES][1] == found[ORDER][1] == 0 and found[GRADIENT][1] < 1e-12


WRAP, STEP = "    replica = DDP(", "            optimizer.step()\n"
BACKWARD = "            check and check.after_backward"
RATE = "            optimizer.param_groups[0]['lr'] = loss.item() / 10\n"
PLANTED = {  # edits, and what is found where
    "no sampler": ([("sampler=sampler)", "shuffle=True)")], {SAMPLES: "step 0"}),
    "no set_epoch": ([("sampler.set_epoch(epoch)", "pass")], {ORDER: "step 45"}),
    "called directly": ([("replica(x", "model(x")], {GRADIENT: "step 0", WEIGHTS: "step 0: 0.weight"}),
    "divided again": ([(BACKWARD, f"            model[2].bias.grad /= 2\n{BACKWARD}")], {GRADIENT: "step 0"}),
    "thawed": (
        [
            (WRAP, f"    model[2].requires_grad_(False)\n{WRAP}"),
            ("    optimizer =", "    model[2].requires_grad_(True)\n    optimizer ="),
        ],
        {GRADIENT: "step 0", WEIGHTS: "step 0: 2.weight"},
    ),
    "own rate": ([(STEP, RATE + STEP)], {WEIGHTS: "step 0: 0.weight", GRADIENT: "step 1"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_names_a_planted_fault_and_where_it_began(name, tmp_path):
    edits, expected = PLANTED[name]
    found = verdicts(on_ranks(edited(PROGRAM, tmp_path, *edits), 2, "--check")[0])
    assert {what: where for what, (verdict, _, where) in found.items() if verdict == "WRONG"} == expected


def test_torchrun_runs_it(alone):
    said = by_torchrun(PROGRAM, 2, "--check")
    assert losses_in(said) == pytest.approx(alone, abs=2e-4) and len(verdicts(said)) == 4
