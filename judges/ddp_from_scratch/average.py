"""06.2 `average_gradients(rank, world_size, model)`: are the gradients those of one process on the whole batch?

A run where every rank has every gradient comes first, then one in which some ranks lack some, which is where answers
hang. Read next: `own_ddp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from ddp_course.grading import observe
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.ddp_from_scratch import nets
from judges.ddp_from_scratch.causes import bytes_brought, first_fault
from judges.ddp_from_scratch.start import HANGS

STEPS = range(2)
ROOM = 1.7  # times the bytes of the gradients; a tied weight that is sent twice needs more


def average_driver(rank: int, world_size: int, function: Callable, task: nets.Task) -> dict:
    """Train with the function between backward and step; note the gradients, and what was sent."""
    model, memory, steps = task.model(), {}, []
    named = dict(model.named_parameters())
    for step in range(len(task.uses)):
        model.zero_grad()
        task.loss(model, rank, step).backward()
        with observe.Collectives() as seen:
            function(rank, world_size, model)
        moved = {"sent": bytes_brought(seen.calls), "all": sum(call.n_bytes for call in seen.calls)}
        steps.append({"gradients": nets.gradients_of(named), **moved, "calls": len(seen.calls)})
        nets.descend(list(named.values()), memory, task.adam)
    return {"steps": steps}


def average_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Two steps with all gradients; then two in which some are missing on some ranks, and some on all."""
    first, second = rng.choice(nets.WORLDS)
    task = nets.Task(24, rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((),) * first,) * 2, tied=True)
    notes, whole = answer.run(average_driver, first, task, init=True), nets.truth(task, first)
    yield "mean", first_fault(task, notes, whole, STEPS)
    yield "once", _once_fault(task, notes)
    task = nets.Task(4, task.rows, rng.randint(1, 10**6), uneven(second, rng))
    notes, whole = answer.run(average_driver, second, task, init=True), nets.truth(task, second)
    yield "some", first_fault(task, notes, whole, STEPS, missing=False)
    yield "none", first_fault(task, notes, whole, STEPS, missing=True)


def uneven(world_size: int, rng: Random) -> tuple:
    """One adapter for one rank only, one for all but one rank, one for nobody; then others, and one for everybody."""
    one, other = rng.sample(range(world_size), 2)
    a, b, c = rng.sample(range(nets.ADAPTERS), 3)
    first = tuple((a,) * (rank == one) + (b,) * (rank != other) for rank in range(world_size))
    second = tuple((c,) + (b,) * (rank == other) for rank in range(world_size))
    return (first, second)


def _once_fault(task: nets.Task, notes: list[dict]) -> Fault | None:
    n_bytes = sum(p.nbytes for p in task.model().parameters() if p.requires_grad)
    firsts = [note["steps"][0] for note in notes]
    if max(step["all"] for step in firsts) < n_bytes // 2:
        found = f"{firsts[0]['all']} bytes"
        return Fault(f"gradients of {n_bytes} bytes that travel", found, 0, "no gradient went into a collective")
    return next(filter(None, (once_fault(n_bytes, step["sent"], rank) for rank, step in enumerate(firsts))), None)


def once_fault(n_bytes: int, sent: int, rank: int) -> Fault | None:
    """Judge how many bytes a rank gave to collectives that bring gradients together."""
    expected = f"about {n_bytes} bytes, which is each gradient once"
    if sent <= ROOM * n_bytes:
        return None
    cause = "some gradient travels twice: a tied weight has two names and is one parameter; parameters() gives it once"
    return Fault(expected, f"{sent} bytes", rank, cause)


AVERAGE = Exercise(
    "06.2",
    "Average the gradients",
    "average_gradients",
    20,
    (
        Check("mean", "the gradients are those of one process on the whole batch", 2),
        Check("once", "each gradient travels once, also that of a tied weight", 1),
        Check("some", "a gradient that is missing on some ranks counts as zero there", 2),
        Check("none", "a gradient that is missing on all ranks stays None", 1),
    ),
    average_judge,
    refused=(
        "torch.nn.parallel.DistributedDataParallel",
        "ddp_course.parallel.naive.NaiveDDP",
        "ddp_course.parallel.ddp.BucketedDDP",
        "ddp_course.parallel.naive.average_gradients",
        "ddp_course.parallel.naive.average_gradients_flat",
    ),
    hints=(
        (
            r"'NoneType' object has no attribute|unsupported operand.*NoneType|NoneType.*not subscriptable|"
            r"got NoneType|found None|cannot be None|\(NoneType",
            "a parameter without a gradient has .grad None: frozen, or not used on this rank; think of both",
        ),
        (
            r"(?s)never entered|lost the connection|disagree about collective|no result after.*waited in",
            "the ranks do not call the same collectives: a gradient that is None on one rank is there on another, or "
            "there is a branch on the rank; let the ranks first agree on who has what",
        ),
        *HANGS,
        (
            r"(?i)different sizes|enforce fail|Connection closed",
            "the ranks sent tensors of different sizes: a gradient is None on one rank and there on another; "
            "all must call the same collectives",
        ),
    ),
)
