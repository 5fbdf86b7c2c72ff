"""17.2 `ShardedStep`: does each rank keep a share of the optimizer's state, and do all end with the same parameters?

The optimizer is written here: every rank would have to load torch.optim first. It counts its own state, so the judge
sees who keeps what. What travels is counted in bytes: each value is needed by every other rank, once.

Read next: `cut_layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

STEPS, RATE, TOLERANCE = 3, 0.1, 1e-10
SUMS = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
Case = tuple[list[int], int]  # elements of each parameter, seed


class Adam:
    """A small Adam over a list of parameters; one that has no gradient is left alone."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = list(parameters)
        self.state: dict[nn.Parameter, list[torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters in place."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            moments = self.state.setdefault(parameter, [torch.zeros_like(parameter) for _ in range(2)])
            moments[0].mul_(0.9).add_(parameter.grad)
            moments[1].mul_(0.8).add_(parameter.grad**2)
            parameter -= RATE * moments[0] / (moments[1].sqrt() + 0.1)


def start(case: Case) -> list[nn.Parameter]:
    """Return the parameters as every rank begins with them."""
    sizes, seed = case
    generator = torch.Generator().manual_seed(seed)
    # Two dimensions, as most weights have; a learner may have to flatten them.
    return [nn.Parameter(torch.randn(size // 2, 2, generator=generator, dtype=torch.float64)) for size in sizes]


def give_gradients(case: Case, parameters: list[nn.Parameter], step: int) -> None:
    """Fill .grad as DDP leaves it: equal on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + case[1])
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + 0.3


def step_driver(rank: int, world_size: int, cls: Callable, case: Case) -> dict:
    """Take some steps; note who keeps state, the parameters after each, and what travelled."""
    parameters, made, strangers = start(case), [], []
    numbers = {parameter: number for number, parameter in enumerate(parameters)}

    def make_optimizer(chosen: Any) -> Adam:
        made.append(Adam(list(chosen)))
        strangers.extend(1 for parameter in made[-1].parameters if parameter not in numbers)
        return made[-1]

    optimizer = cls(rank, world_size, parameters, make_optimizer)
    values, sent = [], []
    for step in range(STEPS):
        give_gradients(case, parameters, step)
        with observe.Collectives() as seen:
            optimizer.step()
        values.append([plain(p.detach().flatten()) for p in parameters])
        sent.append([(call.op, call.n_bytes) for call in seen.calls])
    kept = [numbers[parameter] for each in made for parameter in each.state if parameter in numbers]
    return {"kept": kept, "values": values, "sent": sent, "made": len(made), "strangers": len(strangers)}


def step_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """A model with one large parameter, and one with many of about the same size, on other numbers of ranks."""
    worlds = rng.sample((2, 3, 4), 2)
    cases = [_sorted_case(rng), _mixed_case(rng)]
    runs = [(case, answer.run(step_driver, world, case, init=True)) for case, world in zip(cases, worlds, strict=True)]
    for key, fault_of in (("share", _share), ("balance", _balance), ("values", _values), ("messages", _messages)):
        faults = (fault_of(case, notes) for case, notes in runs)
        yield key, next(filter(None, faults), None)


def _sorted_case(rng: Random) -> Case:
    """Sizes that fall: who deals them out in turn, or cuts the list into equal numbers, gives rank 0 too much."""
    sizes = [2 * rng.randint(400, 500) for _ in range(3)] + [2 * rng.randint(20, 60) for _ in range(9)]
    return sorted(sizes, reverse=True), rng.randint(0, 10**6)


def _mixed_case(rng: Random) -> Case:
    return [2 * rng.randint(100, 400) for _ in range(rng.randint(8, 11))], rng.randint(0, 10**6)


def _share(case: Case, notes: list[dict]) -> Fault | None:
    count = len(case[0])
    expected = f"of {count} parameters, each in the state of exactly one rank"
    for rank, note in enumerate(notes):
        if len(set(note["kept"])) == count and len(notes) > 1:
            cause = "every rank keeps the state of all parameters; make the optimizer of this rank's share alone"
            return Fault(expected, f"{count} parameters", rank, cause)
        if note["strangers"]:
            cause = "give make_optimizer the parameters themselves: no copies, and no views"
            return Fault(expected, f"{note['strangers']} tensors that are none of the parameters", rank, cause)
        if note["made"] > 1 and len(note["kept"]) > len(set(note["kept"])):
            cause = "an optimizer made anew in each step forgets its moments; make it once, in __init__"
            return Fault(expected, f"{note['made']} optimizers", rank, cause)
    for number in range(count):
        owners = [rank for rank, note in enumerate(notes) if number in note["kept"]]
        if len(owners) != 1:
            found = f"parameter {number} on {'no rank' if not owners else f'the ranks {owners}'}"
            cause = (
                "two ranks step it; the shares must be disjoint, and every rank must deal them out in the same way"
                if owners
                else "nobody steps it; every parameter needs an owner, also when the count does not divide evenly"
            )
            return Fault(expected, found, cause=cause)
    return None


def _balance(case: Case, notes: list[dict]) -> Fault | None:
    sizes = case[0]
    limit = sum(sizes) / len(notes) + max(sizes)
    loads = [sum(sizes[number] for number in set(note["kept"])) for note in notes]
    rank = loads.index(max(loads))
    if loads[rank] <= limit and sum(loads) > 0:
        return None
    expected = f"at most {limit:.0f} elements on a rank, the mean and the largest parameter"
    if not sum(loads):
        return Fault(expected, "no state on any rank", cause="nobody has stepped the optimizer it made")
    cause = (
        "deal out elements, not numbers of parameters: the next one goes to the rank that has fewest elements so far"
    )
    if len(set(notes[rank]["kept"])) == len(sizes):
        cause = "this rank keeps the state of all parameters"
    return Fault(expected, f"{loads[rank]} of {sum(sizes)} elements", rank, cause)


def truth(case: Case, forgetful: bool = False) -> list[list[list[float]]]:
    """Return all parameters after each step in one process."""
    parameters, found = start(case), []
    optimizer = Adam(parameters)
    for step in range(STEPS):
        give_gradients(case, parameters, step)
        optimizer = Adam(parameters) if forgetful else optimizer
        optimizer.step()
        found.append([p.detach().flatten().tolist() for p in parameters])
    return found


def _values(case: Case, notes: list[dict]) -> Fault | None:
    right = truth(case)
    for step in range(STEPS):
        for rank, note in enumerate(notes):
            for number, expected in enumerate(right[step]):
                found = note["values"][step][number]
                if not close(found, expected, TOLERANCE):
                    shown = f"after step {step + 1}, parameter {number} is {short(flat(expected))}"
                    return Fault(shown, short(flat(found)), rank, _cause(case, notes, rank, step, number))
    return None


def _cause(case: Case, notes: list[dict], rank: int, step: int, number: int) -> str:
    found, mine = notes[rank]["values"][step][number], number in notes[rank]["kept"]
    before = notes[rank]["values"][step - 1] if step else [p.detach().flatten().tolist() for p in start(case)]
    if close(found, before[number], TOLERANCE):
        if mine:
            return "its owner has not stepped it, or an old value came back over the new one"
        return (
            "the value of before this step: the new one has not arrived. Send after the step, from its owner, and "
            "write it into the parameter"
        )
    if close(found, truth(case, forgetful=True)[step][number], TOLERANCE):
        return "an optimizer made anew in each step forgets its moments; make it once, in __init__"
    if not any(note["sent"][step] for note in notes):
        return "nothing was sent"
    for other, values in enumerate(truth(case)[step]):
        if other != number and len(values) >= len(found) and close(found, values[: len(found)], TOLERANCE):
            return f"this is parameter {other}: send and unpack in one order, the same on every rank"
    total = [sum(v) for v in zip(*(note["values"][step][number] for note in notes), strict=True)]
    if close(found, [v / len(notes) for v in total], TOLERANCE):
        return "the owner's value was mixed with the old ones of the other ranks; a broadcast mixes nothing"
    return "the owner's new value, bit for bit, belongs here"


def _messages(case: Case, notes: list[dict]) -> Fault | None:
    """Count what arrives: a broadcast brings its bytes, an all_gather as many as each rank gives, times the ranks."""
    need = 8 * sum(case[0])
    fullest = max(sum(case[0][number] for number in set(note["kept"])) for note in notes)
    # Room for an all_gather that pads all shares to the fullest one, and for objects, which travel packed.
    most = max(1.7 * need, 1.1 * 8 * fullest * len(notes) if fullest < sum(case[0]) else 0) + 1500
    expected = f"in each step the new values travel once, {need} bytes, and nothing else"
    for rank, note in enumerate(notes):
        for calls in note["sent"]:
            summed = next((op for op, _ in calls if op in SUMS), None)
            if summed:
                cause = (
                    "the gradients are averaged already, and new values need no sum: an all_reduce sends about twice "
                    "the bytes. Let each owner broadcast, or use all_gather"
                )
                return Fault(expected, f"{summed}", rank, cause)
            came = sum(_arriving(op, n_bytes, len(notes)) for op, n_bytes in calls)
            if came > most:
                cause = "send the parameters alone, each from its owner: no moments, no gradients, nothing twice"
                return Fault(expected, f"{came} bytes", rank, cause)
            if came < need * (len(notes) - 1) / len(notes) / 2:
                return Fault(
                    expected, f"{came} bytes", rank, "too little was sent: the other ranks lack the new values"
                )
    return None


def _arriving(op: str, n_bytes: int, world_size: int) -> int:
    return n_bytes * (world_size if "gather" in op else 1)


SHARDED_STEP = Exercise(
    "17.2",
    "A share of the optimizer",
    "ShardedStep",
    30,
    (
        Check("share", "each parameter's state is on one rank", 2),
        Check("balance", "no rank keeps much more than the others", 1),
        Check("values", "all parameters, on all ranks, are those of one process", 2),
        Check("messages", "the new values travel once, and nothing else", 2),
    ),
    step_judge,
    refused=(
        "ddp_course.beyond.sharded_optimizer.ShardedOptimizer",
        "ddp_course.beyond.sharded_optimizer.deal",
    ),
    hints=(
        (
            r"leaf Variable that requires grad|view of a leaf",
            "autograd is not to record this: use parameter.detach(), or torch.no_grad()",
        ),
        (r"has no attribute 'param_groups'|has no attribute 'zero_grad'", "the optimizer here has step() alone"),
        (
            r"(?s)disagree about collective.*called broadcast.*called broadcast",
            "every rank calls each broadcast, the owner and the receivers, in one order and with one shape",
        ),
        (
            r"waited in",
            "a rank waits in a collective that another one never calls: every rank calls each broadcast, the owner and "
            "the receivers",
        ),
        (
            r"(?i)different sizes|enforce fail|Connection closed|size mismatch|same shape|same size",
            "the ranks sent tensors of different sizes; a broadcast needs a tensor of one shape on every rank, and an "
            "all_gather the same size from every rank",
        ),
    ),
)
