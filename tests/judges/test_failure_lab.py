"""The solutions of lesson 12 are held to failures provoked here and to one process: their judges ask no one else."""

import pytest
import torch
import torch.nn.functional as F

from ddp_course.diagnose.error_texts import PROGRAMS, Case, provoke
from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary import tasks


def answer(exercise: str, name: str):
    return function_of(exercise, name, solution_of(exercise))


def test_12_1_names_each_failure_and_its_rank():
    cases = [Case(name, number % 3, detail) for number, (name, (detail, _)) in enumerate([*PROGRAMS.items()] * 2)]
    for case, said in zip(cases, provoke(cases, 3), strict=True):
        assert answer("12.1", "diagnose")(said) == (case.name, case.bad)


def batches(rank: int, count: int) -> list[tasks.Batch]:
    return [tasks.batch(0, rank, step, 3, 1) for step in range(count)]


HELD_OUT = tasks.batch(0, 0, 99, 5, 1)


def validated(rank: int, world_size: int) -> tuple:
    function = answer("12.2", "train_and_validate")
    return function(rank, world_size, tasks.net(0, 1, 1), batches(rank, 20), HELD_OUT, 2)


def test_12_2_stops_as_one_process(ranks):
    model, losses, step = tasks.net(0, 1, 1), [], 0
    while len(losses) < 2 or losses[-1] <= losses[-2]:
        for _ in range(2):
            gradients = [tasks.gradient(model, batches(rank, 20)[step]) for rank in range(2)]
            tasks.descend(model, sum(gradients) / 2, 0.05)
            step += 1
        losses.append(F.mse_loss(model(HELD_OUT[0]), HELD_OUT[1]).item())
    assert ranks(2).run(validated) == [(pytest.approx(losses[-2]), step)] * 2


COUNTS = (2, 0, 3)


def uneven(rank: int, world_size: int) -> tuple[int, list[float]]:
    model = tasks.net(0, 1, 1)
    function = answer("12.3", "train_uneven")
    return function(rank, world_size, model, iter(batches(rank, COUNTS[rank])), 0.1), tasks.weights(model)


def test_12_3_takes_the_steps_of_one_process(ranks):
    model = tasks.net(0, 1, 1)
    for step in range(max(COUNTS)):
        present = [batches(rank, COUNTS[rank])[step] for rank in range(3) if step < COUNTS[rank]]
        tasks.descend(model, tasks.gradient(model, tuple(map(torch.cat, zip(*present, strict=True)))), 0.1)
    assert ranks(3).run(uneven) == [(15, pytest.approx(tasks.weights(model)))] * 3
