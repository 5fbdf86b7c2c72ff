"""06.2 `average_gradients(rank, world_size, model)`: are the gradients those of one process on the whole batch?

A run where every rank has every gradient comes first, then one in which some ranks lack some, which is where answers
hang. The notes are "gradients", of each step by name, and "sent", the collectives of each step.
Read next: `own_ddp.py`.
"""

from __future__ import annotations

from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.rounds import Note, Round
from judges.ddp_from_scratch.nets import READY, TOLERANCE, WORLDS, Task, gradients, travels, uneven


def cases(rng: Random) -> list[Round]:
    """Two steps with all gradients; then two in which some are missing on some ranks, and some on all."""
    first, second = rng.choice(WORLDS)
    whole = Task(24, rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((),) * first,) * 2, tied=True)
    uses, alone = uneven(second, rng)
    some = Task(4, whole.rows, rng.randint(1, 10**6), uses, blank=((1, alone),))
    return [Round(first, [("whole", whole)]), Round(second, [("uneven", some)])]


def act(function, task: Task, rank: int, world_size: int) -> Note:
    """Train with the function between backward and step; note the gradients, and what was sent."""
    model, sent = task.model(), []

    def backward(step: int) -> None:
        task.loss(model, rank, step).backward()
        with Collectives() as seen:
            function(rank, world_size, model)
        sent.append(seen.talks)

    return Note(gradients=task.train(model, backward), sent=sent)


MISTAKES = """
sum | mean some | gradients are summed over the ranks, not averaged: divide by the world size
    parameter.grad /= world_size => pass
divided before and after | mean some
| gradients are divided by the world size twice; once is enough, before the sum or after it
    dist.all_reduce(parameter.grad) => dist.all_reduce(parameter.grad)
    parameter.grad /= world_size
divided by the ranks that have it | some
| this is the mean over the ranks that have the gradient; divide by the number of all ranks
    /= world_size => /= ranks
zeros, always | none
| no rank has this gradient, so it must stay None; with zeros, momentum or weight decay would move the weight
    if ranks == 0: => if not parameter.requires_grad:
a tied weight travels twice | once
| some gradient travels twice: a tied weight has two names, and is one parameter in parameters()
    list(model.parameters()) => [p for _, p in model.named_parameters(remove_duplicate=False)]
a gradient of zeros counts as none | some | a gradient that is missing on some ranks counts as zero there
    int(parameter.grad is not None) => int(parameter.grad is not None and bool(parameter.grad.any()))
a copy is averaged | mean some | this is the rank's own gradient; the mean must come into .grad itself, not into a copy
    parameter.grad /= world_size => dist.all_reduce(parameter.grad / world_size)
    continue
not summed | mean once some | this is the rank's own gradient, divided: the sum over the ranks did not come into .grad
    dist.all_reduce(parameter.grad) => pass
reduced to rank 0 only | mean some | rank 0 has the mean, the others have not: reduce leaves it on dst only
    dist.all_reduce(parameter.grad) => dist.reduce(parameter.grad, dst=0)
rank 0's gradient for all | mean some | this is rank 0's gradient; a mean needs a sum over the ranks, not a broadcast
    parameter.grad /= world_size => dist.broadcast(parameter.grad, src=0)
    continue
vectors are forgotten | mean some | some gradients are averaged, and others are not: go through all parameters
    if ranks == 0: => if ranks == 0 or parameter.dim() == 1:
matrices are forgotten | mean once some | some gradients are averaged, and others are not: go through all parameters
    if ranks == 0: => if ranks == 0 or parameter.dim() > 1:
the first step's parameters for ever | some none | which ranks have a gradient may change: ask again in each step
    dist.all_reduce(used) => dist.all_reduce(used)
    used = model.__dict__.setdefault("used", used)
flat, without a thought of None | some none | a parameter without a gradient has .grad None | tests
    def average_gradients(rank, world_size, model):
        trained = [p for p in model.parameters() if p.requires_grad]
        flat = torch.cat([p.grad.flatten() for p in trained])
        dist.all_reduce(flat)
        for p, piece in zip(trained, (flat / world_size).split([p.numel() for p in trained])):
            p.grad.copy_(piece.view_as(p))
zeros on the ranks that lack it, by a broadcast of the sum | once | some gradient travels twice | tests
    def average_gradients(rank, world_size, model):
        for p in model.parameters():
            parts = [None] * world_size
            dist.all_gather_object(parts, p.grad)
            parts = [part for part in parts if part is not None]
            p.grad = sum(parts) / world_size if parts else None
            if parts:
                dist.all_reduce(p.grad / world_size)
skips what is None | some none | a gradient that is None on one rank is there on another | hangs
    if ranks == 0: => if parameter.grad is None:
"""

MEAN = "the mean over all ranks belongs into the .grad of each of the module's own parameters"
AVERAGE = exercise(
    *("06.2", "Average the gradients", "average_gradients", 20),
    cases=cases,
    act=act,
    said=lambda seen: f"{seen.world_size} ranks,",
    tolerance=TOLERANCE,
    mistakes=MISTAKES,
    checks={
        "mean": ("the gradients are those of one process on the whole batch", 2, "whole",
                 lambda seen: gradients(seen, 1, 2), MEAN),
        "once": ("each gradient travels once, also that of a tied weight", 1, "whole", travels,
                 "no gradient went into a collective, or some more than once"),
        "some": ("a gradient that is missing on some ranks counts as zero there", 2, "uneven",
                 lambda seen: gradients(seen, 1, 2, missing=False), MEAN),
        "none": ("a gradient that is missing on all ranks stays None", 1, "uneven",
                 lambda seen: gradients(seen, 1, 2, missing=True), "no rank has this gradient, so it must stay None"),
    },
    refused=READY,
    hints={
        r"'NoneType' object has no attribute|unsupported operand.*NoneType|NoneType.*not subscriptable|"
        r"got NoneType|found None|cannot be None|\(NoneType": "a parameter without a gradient has .grad None: frozen, "
        "or not used on this rank; think of both",
        "absent|cut-off|disagree; limit: waited in": "the ranks do "
        "not call the same collectives: a gradient that is None on one rank is there on another, or there is a branch "
        "on the rank; let the ranks first agree on who has what",
        "sizes; disagree: different sizes; (?i)enforce fail|Connection closed": "the ranks sent tensors of different "
        "sizes: a gradient "
        "is None on one rank and there on another; all must call the same collectives",
    },
)  # fmt: skip
