"""The solutions of lesson 11, held to one process, to torch's own BatchNorm and to what was drawn."""

import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from ddp_course.diagnose.drill import drawn
from ddp_course.grading.source import function_of, solution_of
from ddp_course.rehearsal.exercise_programs import ONE_DEVICE
from judges.your_own_program import running, whole_step
from judges.your_own_program.incident import LEVEL, logs


def solved(rank, world_size, act, id, name, case):
    return act(function_of(id, name, solution_of(id)), case, rank, world_size)


def numbers_in(text, words):
    return [float(number) for number in re.findall(rf"(?:{words}) ([\d.]+)", text)]


def test_both_programs_train_as_the_one_for_one_device_does(ranks, tmp_path):
    command = [sys.executable, "-c", ONE_DEVICE, "2", "7"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    right = torch.cat([value.flatten() for value in torch.load(tmp_path / "model.pt", weights_only=True).values()])
    for id, name, words in (("11.1", "program", "loss|error"), ("11.3", "repaired", "error")):
        note, _ = ranks(2).run(solved, (running.act, id, name, (str(tmp_path / name), 2, 7)))
        state = torch.load(tmp_path / name / ("state.pt" if name == "repaired" else "model.pt"), weights_only=True)
        found = torch.cat([value.flatten() for value in state.get("model", state).values()])
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
        assert numbers_in("\n".join(note["lines"]), words) == pytest.approx(numbers_in(lines, words), abs=2e-6)


def test_a_whole_step_is_that_of_one_process_with_torchs_batchnorm(ranks):
    case = ([3, 5, 8], 2, "float64")
    model, _ = whole_step.made(case, 0)
    by_rank = [whole_step.made(case, rank)[1] for rank in (0, 1)]
    for step in range(whole_step.STEPS):
        model.zero_grad()
        for piece in (0, 1):
            x, labels = (torch.cat([each[step][part].chunk(2)[piece] for each in by_rank]) for part in (0, 1))
            (F.cross_entropy(model(x), labels) / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= whole_step.LR * parameter.grad
    note, _ = ranks(2).run(solved, (whole_step.act, "11.5", "train_steps", case))
    for found, parameter in zip(note["weights"], model.parameters(), strict=True):
        assert torch.tensor(found, dtype=torch.float64).allclose(parameter, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_faults_of_an_incident_are_those_that_were_drawn(seed):
    assert function_of("11.4", "faults_of", solution_of("11.4"))(logs(seed)) == drawn(LEVEL, seed).faults
