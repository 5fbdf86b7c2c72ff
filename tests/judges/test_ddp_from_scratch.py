"""Do the solutions of lesson 06 start and train as one process does, which has all rows?"""

import pytest
import torch

from ddp_course.grading.source import function_of, solution_of
from judges.ddp_from_scratch.nets import Task
from judges.ddp_from_scratch.start import Mixed

WORLD = 2
TASK = Task(4, 5, 3, (((0,), (0, 1)), ((), (1,)), ((0, 1, 2), (2,))))  # adapters for one rank, for both, for none


def start(rank: int, world_size: int) -> bool:
    model, first = Mixed(3, seed=rank), Mixed(3, seed=0)
    function_of("06.1", "same_start", solution_of("06.1"))(rank, world_size, model)
    pairs = zip((*model.parameters(), *model.buffers()), (*first.parameters(), *first.buffers()), strict=True)
    return all(torch.equal(mine, right) for mine, right in pairs) and bool(model.frozen[0].signbit())


def test_a_start_is_rank_0s(ranks):
    assert ranks(WORLD).run(start) == [True] * WORLD


def train(rank: int, world_size: int, id: str, name: str, task: Task) -> dict:
    answer, model = function_of(id, name, solution_of(id)), task.model(0 if id == "06.2" else rank)
    replica = model if id == "06.2" else answer(model)

    def backward(step: int) -> None:
        task.loss(replica, rank, step).backward()
        if id == "06.2":
            answer(rank, world_size, model)

    return task.train(model, backward)


@pytest.mark.parametrize(("id", "name"), [("06.2", "average_gradients"), ("06.3", "MyDDP"), ("06.4", "PatientDDP")])
def test_gradients_are_those_of_one_process(ranks, id, name):
    task = Task(4, 5, 3, (((),) * WORLD,) * 3, tied=True) if id == "06.3" else TASK
    model = task.model()
    right = task.train(model, lambda step: sum(task.loss(model, r, step) / WORLD for r in range(WORLD)).backward())
    for found in ranks(WORLD).run(train, (id, name, task)):
        for step, gradients in right.items():
            assert found[step] == {n: g if g is None else pytest.approx(g) for n, g in gradients.items()}
