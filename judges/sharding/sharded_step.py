"""17.2 `ShardedStep`: does each rank keep a share of the optimizer's state, and do all end with the same parameters?

The optimizer is written here: every rank would have to load torch.optim first. It counts its own state, so the judge
sees who keeps what. What travels is counted in bytes: each value is needed by every other rank, once.

Read next: `cut_layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.compare import close, short
from ddp_course.grading.vocabulary.expect import exercise, once
from ddp_course.grading.vocabulary.play import Note, Round, Seen

STEPS, RATE, TOLERANCE = 3, 0.1, 1e-10
SUMS = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
FORGETS = "an optimizer made again in each step forgets its moments; make it once, in __init__"


class Case(NamedTuple):
    """How many elements each parameter has; the same parameters and gradients on every rank."""

    sizes: list[int]
    seed: int

    def start(self) -> list[nn.Parameter]:
        """Return the parameters as every rank begins with them."""
        chance = torch.Generator().manual_seed(self.seed)
        # Two dimensions, as most weights have; a learner may have to flatten them.
        return [nn.Parameter(torch.randn(n // 2, 2, generator=chance, dtype=torch.float64)) for n in self.sizes]

    def give_gradients(self, parameters: list[nn.Parameter], step: int) -> None:
        """Fill .grad as DDP leaves it: equal on every rank."""
        chance = torch.Generator().manual_seed(1000 * step + self.seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=chance, dtype=torch.float64) + 0.3


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


def act(cls, case: Case, rank: int, world_size: int) -> Note:
    """Take some steps; note who keeps state, the parameters after each, and what travelled."""
    parameters, made, strangers = case.start(), [], []
    numbers = {parameter: number for number, parameter in enumerate(parameters)}

    def make_optimizer(chosen: Any) -> Adam:
        made.append(Adam(list(chosen)))
        strangers.extend(parameter for parameter in made[-1].parameters if parameter not in numbers)
        return made[-1]

    with observe.Collectives() as dealt:
        optimizer = cls(rank, world_size, parameters, make_optimizer)
    values, sent = [_plain(parameters)], []
    for step in range(STEPS):
        case.give_gradients(parameters, step)
        with observe.Collectives() as seen:
            optimizer.step()
        values.append(_plain(parameters))
        sent.append([(call.op, call.n_bytes) for call in seen.calls])
    kept = [numbers[parameter] for each in made for parameter in each.state if parameter in numbers]
    same = list(map(id, parameters)) == list(map(id, numbers))
    dealt = ", ".join(call.op for call in dealt.talks)
    return Note(same=same, kept=kept, values=values, sent=sent, made=len(made), strangers=len(strangers), dealt=dealt)


def _plain(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [plain(parameter.detach().flatten()) for parameter in parameters]


def rounds(rng: Random) -> list[Round]:
    """A model with few large parameters, and one with many of about the same size, on other numbers of ranks.

    On the larger number also one of equal parameters: filling one rank after the other leaves too many for the last.
    """
    # Sizes that fall: who deals them out in turn, or cuts the list into equal numbers, gives rank 0 too much.
    large = [2 * rng.randint(400, 500) for _ in range(3)] + [2 * rng.randint(20, 60) for _ in range(9)]
    worlds = rng.sample((2, 3, 4), 2)
    # Each world_size-th is a large one: who deals them out in turn gives all of these to one rank.
    mixed = [2 * (rng.randint(100, 150) if n % worlds[1] else rng.randint(380, 400)) for n in range(5 * worlds[1] + 1)]
    models = {"falling": sorted(large, reverse=True), "mixed": mixed}
    chosen = {world: [(name, sizes)] for (name, sizes), world in zip(models.items(), worlds, strict=True)}
    chosen[max(worlds)].append(("equal", [2 * rng.randint(20, 60)] * (2 * max(worlds) - 1)))
    return [
        Round(world, [(name, Case(sizes, rng.randint(0, 10**6))) for name, sizes in cases])
        for world, cases in chosen.items()
    ]


def _all_ranks(seen: Seen) -> list[Seen]:
    return [seen.of(rank) for rank in range(seen.world_size)]


def share(seen: Seen) -> Fault | None:
    """Each parameter is in the state of exactly one rank."""
    count = len(seen.case.sizes)
    expected = f"of {count} parameters, each in the state of exactly one rank"
    for each in _all_ranks(seen):
        if len(set(each["kept"])) == count:
            cause = "every rank keeps the state of all parameters; make the optimizer of this rank's share alone"
            return Fault(expected, f"{count} parameters", each.rank, cause)
        if not each["same"]:
            cause = "write into the parameters; a model and the next step hold these, not new ones"
            return Fault("the list with the same parameters", "other objects in it", each.rank, cause)
        if each["strangers"]:
            cause = "give make_optimizer the parameters themselves: no copies, and no views"
            return Fault(expected, f"{each['strangers']} tensors that are none of the parameters", each.rank, cause)
        if each["made"] > 1 and len(each["kept"]) > len(set(each["kept"])):
            return Fault(expected, f"{each['made']} optimizers", each.rank, FORGETS)
    for number in range(count):
        owners = [each.rank for each in _all_ranks(seen) if number in each["kept"]]
        if not owners:
            cause = "nobody steps it; every parameter needs an owner, also when the count does not divide evenly"
            return Fault(expected, f"parameter {number} on no rank", cause=cause)
        if len(owners) > 1:
            cause = "two ranks step it; the shares must be disjoint, and every rank must deal them out in the same way"
            return Fault(expected, f"parameter {number} on the ranks {owners}", cause=cause)
    return None


def _loads(seen: Seen) -> list[int]:
    return [sum(seen.case.sizes[number] for number in set(each["kept"])) for each in _all_ranks(seen)]


def balance(seen: Seen) -> Fault | None:
    """No rank keeps more than the mean and the largest parameter."""
    sizes, kept = seen.case.sizes, _loads(seen)
    limit, rank = sum(sizes) / seen.world_size + max(sizes), kept.index(max(kept))
    expected = f"at most {limit:.0f} elements on a rank, the mean and the largest parameter"
    if not sum(kept):
        return Fault(expected, "no state on any rank", cause="nobody has stepped the optimizer it made")
    if kept[rank] <= limit:
        return None
    cause = (
        "this rank keeps the state of all parameters"
        if len(set(seen.of(rank)["kept"])) == len(sizes)
        else "deal out elements, not numbers of parameters: the next one goes to the rank with fewest elements so far"
    )
    return Fault(expected, f"{kept[rank]} of {sum(sizes)} elements", rank, cause)


def truth(case: Case, forgetful: bool = False) -> list[list[list[float]]]:
    """Return all parameters at the start and after each step in one process."""
    parameters = case.start()
    found, optimizer = [_plain(parameters)], Adam(parameters)
    for step in range(STEPS):
        case.give_gradients(parameters, step)
        optimizer = Adam(parameters) if forgetful else optimizer
        optimizer.step()
        found.append(_plain(parameters))
    return found


def values(seen: Seen) -> Fault | None:
    """All parameters, on all ranks, are those of one process after each step."""
    right = truth(seen.case)
    for step, wanted in enumerate(right):
        for each in _all_ranks(seen):
            for number, expected in enumerate(wanted):
                found = each["values"][step][number]
                if not close(found, expected, TOLERANCE):
                    shown = f"after step {step}, parameter {number} is {short(expected)}"
                    causes = (cause for cause, value in _slips(each, step, number) if close(found, value, TOLERANCE))
                    otherwise = "the owner's new value, bit for bit, belongs here"
                    return Fault(shown, short(found), each.rank, next(causes, otherwise))
    return None


def _slips(seen: Seen, step: int, number: int) -> Iterator[tuple[str, list[float]]]:
    found = seen["values"][step][number]
    yield (
        (
            "its owner has not stepped it, or an old value came back over the new one"
            if number in seen["kept"]
            else "the value of before this step: the new one has not arrived. Send after the step, from its owner, and "
            "write it into the parameter"
        ),
        seen["values"][step - 1][number],
    )
    yield FORGETS, truth(seen.case, forgetful=True)[step][number]
    if not any(each["sent"][step - 1] for each in _all_ranks(seen)):
        yield "nothing was sent", found
    for other, theirs in enumerate(truth(seen.case)[step]):
        if other != number:
            yield f"this is parameter {other}: send and unpack in the same order on every rank", theirs[: len(found)]
    everyones = zip(*(each["values"][step][number] for each in _all_ranks(seen)), strict=True)
    mean = [sum(value) / seen.world_size for value in everyones]
    yield "the owner's value was mixed with the old ones of the other ranks; a broadcast mixes nothing", mean


def messages(seen: Seen) -> Fault | None:
    """Count what arrives: a broadcast brings its bytes, an all_gather as many as each rank gives, times the ranks."""
    if seen["dealt"]:
        cause = "all ranks have the same list, so the same rule deals it alike on all of them"
        return Fault("no message before the first step", seen["dealt"], seen.rank, cause)
    need, w, fullest = 8 * sum(seen.case.sizes), seen.world_size, 8 * max(_loads(seen))
    # Room for an all_gather that pads all shares to the fullest one, and for objects, which travel packed.
    most = max(1.7 * need, 1.1 * fullest * w if fullest < need else 0) + 1500
    for calls in seen["sent"]:
        came = sum(n_bytes * (w if "gather" in op else 1) for op, n_bytes in calls)
        if found := next((op for op, _ in calls if op in SUMS), ""):
            cause = (
                "the gradients are averaged already, and new values need no sum: an all_reduce sends about twice the "
                "bytes. Let each owner broadcast, or use all_gather"
            )
        elif came > most:
            cause = "send the parameters alone, each from its owner: no moments, no gradients, nothing twice"
        elif came < need * (w - 1) / w / 2:
            cause = "too little was sent: the other ranks lack the new values"
        else:
            continue
        expected = f"in each step the new values travel once, {need} bytes, and nothing else"
        return Fault(expected, found or f"{came} bytes", seen.rank, cause)
    return None


SHARDED_STEP = exercise(
    "17.2",
    "A share of the optimizer",
    "ShardedStep",
    30,
    act=act,
    rounds=rounds,
    checks={
        "share": ("each parameter's state is on one rank", 2, once(share), "falling mixed"),
        "balance": ("no rank keeps much more than the others", 1, once(balance), "falling mixed equal"),
        "values": ("all parameters, on all ranks, are those of one process", 2, once(values), "falling mixed"),
        "messages": ("the new values travel once, and nothing else", 2, messages, "falling mixed"),
    },
    refused=("ddp_course.beyond.sharded_optimizer.ShardedOptimizer", "ddp_course.beyond.sharded_optimizer.deal"),
    hints={
        r"leaf Variable that requires grad|view of a leaf": "autograd is not to record this: use parameter.detach(), "
        "or torch.no_grad()",
        r"has no attribute 'param_groups'|has no attribute 'zero_grad'": "the optimizer here has step() alone",
        "disagree: (?s)called broadcast.*called broadcast": "every rank calls each broadcast, the "
        "owner and the receivers, in one order and with one shape",
        r"waited in": "a rank waits in a collective that another one never calls: every rank calls each broadcast, the "
        "owner and the receivers",
        "sizes; disagree: different sizes; (?i)enforce fail|Connection closed|size mismatch|same shape|same size": ""
        "the ranks sent "
        "tensors of different sizes; a broadcast needs a tensor of one shape on every rank, and an all_gather the same "
        "size from every rank",
    },
)
