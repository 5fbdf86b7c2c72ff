"""The solutions of lesson 07 are held to torch's own plan and to one process: their judges ask nothing but them."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course.grading.source import function_of, solution_of
from ddp_course.grading.vocabulary import tasks

WIDTHS, ROWS = (4, 4, 4), 3


def answer(exercise: str, name: str):
    return function_of(exercise, name, solution_of(exercise))


def test_07_1_plans_as_torch():
    rng = random.Random(0)
    sizes = [rng.randrange(1, 100) for _ in range(40)]
    dtypes = [rng.choice((torch.float32, torch.float16, torch.bfloat16)) for _ in sizes]
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    torchs, _ = dist._compute_bucket_assignment_by_size(tensors[::-1], [200, 500])
    found = answer("07.1", "plan_buckets")([tensor.nbytes for tensor in tensors], dtypes, 500, 200)
    assert found == [[len(sizes) - 1 - index for index in bucket] for bucket in torchs]


def averaged(rank: int, world_size: int) -> list[list[float]]:
    """The gradients of two steps with OverlappedDDP; then those of two accumulated micro-batches."""
    model, found = tasks.net(0, *WIDTHS), []
    replica = answer("07.2", "OverlappedDDP")(model, 100)
    for step in (0, 1):
        model.zero_grad()
        x, y = tasks.batch(0, rank, step, ROWS, WIDTHS[0])
        nn.functional.mse_loss(replica(x), y).backward()
        replica.finish_gradient_sync()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).tolist())
    model = tasks.net(0, *WIDTHS)
    batches = [tasks.batch(0, rank, step, ROWS, WIDTHS[0]) for step in (0, 1)]
    answer("07.3", "accumulate")(DistributedDataParallel(model), nn.functional.mse_loss, batches)
    return [*found, torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()]


def test_07_2_and_07_3_have_the_gradients_of_one_process(ranks):
    model = tasks.net(0, *WIDTHS)
    steps = [[tasks.gradient(model, tasks.batch(0, rank, step, ROWS, WIDTHS[0])) for rank in (0, 1)] for step in (0, 1)]
    means = [sum(of_ranks) / 2 for of_ranks in steps]
    for found in ranks(2).run(averaged):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), torch.stack([*means, sum(means) / 2]))


def added_up(rank: int, world_size: int) -> float:
    """What comes back over 1000 steps of gradients that are each less than half of the smallest float16."""
    model = nn.Linear(1, 1, bias=False)  # its gradient is its input
    replica, total = DistributedDataParallel(model), 0.0
    replica.register_comm_hook({}, answer("07.4", "half_hook"))
    for _ in range(1000):
        replica.zero_grad()
        replica(torch.tensor([(0.3 + 0.2 * rank) * 2.0**-24])).backward()
        total += model.weight.grad.item()
    return total / 2.0**-24


def test_07_4_loses_nothing_for_good(ranks):
    assert all(abs(total - 400) <= 2 for total in ranks(2).run(added_up))
