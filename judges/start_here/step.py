"""00.3 `parallel_step(rank, world_size, model, x, y, lr)`: is it a step of one process with all rows, and so the next?

All is float64. Read next: `judges/why_data_parallel/`.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import tasks
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

COLUMNS = 5  # of inputs and targets


class Case(NamedTuple):
    seed: int
    rows: int
    lr: float


def cases(rng: Random) -> list[Round]:
    """Three ranks, then another number, with two models in turn."""
    case = Case(rng.randrange(10**6), rng.randint(5, 7), rng.choice((0.01, 0.02)))
    return [Round(3, [("three", case)]), Round(rng.choice((2, 4)), [("more", case), ("more", case._replace(lr=0.05))])]


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Take two steps with the function; note by how much the weights have changed after each."""
    model = tasks.net(case.seed, COLUMNS, 4, COLUMNS)
    own, start, changes = list(model.parameters()), tasks.weights(model), []
    for step in range(2):
        function(rank, world_size, model, *tasks.batch(case.seed, rank, step, case.rows, COLUMNS), case.lr)
        changes.append([after - before for after, before in zip(tasks.weights(model), start, strict=True)])
    replaced = any(before is not after for before, after in zip(own, model.parameters(), strict=True))
    return Note(first=changes[0], second=changes[1], replaced=replaced)


def together(seen: Seen) -> str:
    if seen["replaced"]:
        return "new parameters in the place of the model's own"
    if not any(seen["second"]):
        return "the weights of the start"
    alike = close(seen["second"], seen.of(0)["second"], 1e-10)  # an order of adding may cost a last bit
    return "the model's parameters, changed as on rank 0" if alike else "other weights than rank 0's"


def first(seen: Seen) -> list[float]:
    return seen["first"]


def second(seen: Seen) -> list[float]:
    return seen["second"]


def both(seen: Seen) -> list[list[float]]:
    return [seen["first"], seen["second"]]


MISTAKES = """
sum instead of mean | first second ranks | the gradients are summed over the ranks, not averaged: divide by world_size
    / world_size =>
divided by the rows of the shard | first second ranks
| the loss is a mean over the shard's rows already: divide by world_size
    / world_size => / len(x)
its own gradient | all | the replicas drift apart: every rank must apply the same averaged gradient
    dist.all_reduce(parameter.grad) => pass
    / world_size =>
uphill | first second ranks | the step goes uphill: subtract the gradient
    -= => +=
no learning rate | first second ranks | the learning rate is missing
    lr * => 1 *
sum over the rows | first second ranks | this is the gradient of a sum over rows; the loss is a mean
    .mean() => .sum()
divided by the rows only | first second ranks | mean() divides by all numbers, so by the columns, too
    .mean() => .sum().div(len(x))
old gradients kept | second ranks | the first step's gradient is still in .grad, and backward adds to it: clear it
    model.zero_grad() => pass
old gradients kept, as averages | second ranks | the first step's gradient is still in .grad, and backward adds to it
    model.zero_grad() => pass
    dist.all_reduce(parameter.grad) => dist.all_reduce(parameter.grad)
    parameter.grad /= world_size
    parameter.grad / world_size => parameter.grad
the first call's learning rate | ranks | each call has its own learning rate
    model.zero_grad() => global first
    lr = first = globals().get("first", lr)
    model.zero_grad()
new tensors | all | the weights have not changed: the step must be written into the model's own parameters, in place
    parameter -= lr => parameter = parameter - lr
new Parameter objects | same | an optimizer, or DDP, holds the model's own parameters: change these, in place
    model.zero_grad() => for module in model:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(parameter.detach()))
a leaf in place | all | change the weights under torch.no_grad() | tests
    with torch.no_grad(): => with torch.enable_grad():
torch's DDP | all | this exercise is to write what it does | tests
    def parallel_step(rank, world_size, model, x, y, lr):
        replica = torch.nn.parallel.DistributedDataParallel(model)
        replica.zero_grad()
        (replica(x) - y).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=lr).step()
endless loop | all | an endless loop | hangs
    model.zero_grad() => while True:
        pass
"""

WORDS = "this is a rank's own gradient, or a mix of some; average the gradients of all ranks before the step"
AGAIN = "what the first step left, such as .grad, must not reach the second; or the first step was wrong already"
STEP = exercise(
    *("00.3", "One data parallel step (stretch)", "parallel_step", 20),
    cases=cases,
    act=act,
    said=lambda seen: f"as one process with the rows of {seen.world_size} ranks, lr {seen.case.lr}:",
    mistakes=MISTAKES,
    tolerance=1e-9,
    checks={
        "same": ("the replicas stay equal", 1, "three", together, "every rank must apply the same averaged gradient"),
        "first": ("the step is that of one process with all rows", 2, "three", first, WORDS),
        "second": ("so is the second step", 1, "three", second, AGAIN),
        "ranks": ("and so it is with another number of ranks", 1, "more", both, WORDS),
    },
    hints={
        r"a leaf Variable that requires grad is being used in an in-place": "change the weights under torch.no_grad(), "
        "so that autograd does not record it",
    },
    refused=(
        "torch.nn.parallel.distributed.DistributedDataParallel",
        *(f"ddp_course.parallel.{name}" for name in ("naive.NaiveDDP", "ddp.BucketedDDP", "naive.average_gradients")),
    ),
    right="""
the weights averaged after the step
    def parallel_step(rank, world_size, model, x, y, lr):
        gradients = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.data -= lr * gradient
            dist.all_reduce(parameter.data)
            parameter.data /= world_size
""",
)  # fmt: skip
