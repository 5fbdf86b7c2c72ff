"""The solutions of lesson 09 are held to what one process finds that has all rows."""

import json

import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score

from ddp_course.grading.source import function_of, solution_of

SIZES = [5, 12]
LOSSES = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(0)) - 3
GUESSES, LABELS = torch.randint(0, 3, (2, sum(SIZES)), generator=torch.Generator().manual_seed(1))


def answer(exercise: str, name: str):
    return function_of(exercise, name, solution_of(exercise))


def results(rank: int, world_size: int) -> tuple:
    loss_N, guess_N, label_N = (whole.split(SIZES)[rank] for whole in (LOSSES, GUESSES, LABELS))
    mean = answer("09.1", "mean_loss")(rank, world_size, loss_N)
    return mean, *answer("09.3", "evaluate")(rank, world_size, loss_N, guess_N, label_N, 3)


def test_mean_worst_confusion_and_f1_are_those_of_all_rows(ranks):
    for mean, again, worst, confusion, f1 in ranks(2).run(results):
        assert mean == pytest.approx(LOSSES.double().mean().item()) == pytest.approx(float(again))
        assert worst == LOSSES.max()
        assert confusion.tolist() == confusion_matrix(LABELS, GUESSES).tolist()
        assert f1.tolist() == pytest.approx(f1_score(LABELS, GUESSES, average=None))


def written(rank: int, world_size: int, path: str) -> None:
    steps = ((loss, 1 + rank) for loss in LOSSES.split(SIZES)[rank][:5])
    answer("09.2", "write_log")(rank, world_size, steps, 2, path)


def test_09_2_weighs_each_step_by_its_rows(ranks, tmp_path):
    ranks(2).run(written, (f"{tmp_path}/log",))
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    for line, part in zip(lines, (slice(0, 2), slice(2, 4)), strict=True):
        one, two = (losses[part].double() for losses in LOSSES.split(SIZES))
        assert line["loss"] == pytest.approx(((one.sum() + 2 * two.sum()) / 6).item())
