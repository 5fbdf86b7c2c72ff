"""17.2 `ShardedStep`: does each rank keep a share of the optimizer's state, and do all end with the same parameters?

The optimizer is written here: every rank would have to load torch.optim first. It counts its own state, so the judge
sees who keeps what. How the parameters are dealt, and in how many messages they travel, is free.

Read next: `shard_and_save.py`.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import observe
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen

STEPS, RATE = 3, 0.1
SUMS = ("all_reduce", "reduce", "reduce_scatter", "all_to_all")
Case = tuple[list[int], int]  # how many elements each parameter has, and a seed


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
    sizes, seed = case
    chance = torch.Generator().manual_seed(seed)
    # Two dimensions, as most weights have; a learner may have to flatten them.
    parameters = [nn.Parameter(torch.randn(n // 2, 2, generator=chance, dtype=torch.float64)) for n in sizes]
    numbers, made = {parameter: number for number, parameter in enumerate(parameters)}, []

    def make_optimizer(chosen: Any) -> Adam:
        made.append(Adam(list(chosen)))
        return made[-1]

    with observe.Collectives() as dealt:
        optimizer = cls(rank, world_size, parameters, make_optimizer)
    values, sent = [_plain(parameters)], []
    for _ in range(STEPS):
        for parameter in parameters:  # as DDP leaves it: equal on every rank
            parameter.grad = torch.randn(parameter.shape, generator=chance, dtype=torch.float64) + 0.3
        with observe.Collectives() as seen:
            optimizer.step()
        values.append(_plain(parameters))
        sent.append([(call.op, call.n_bytes) for call in seen.calls])
    return Note(
        same=list(map(id, parameters)) == list(map(id, numbers)),
        kept=[numbers[parameter] for each in made for parameter in each.state if parameter in numbers],
        strangers=any(parameter not in numbers for each in made for parameter in each.parameters),
        dealt=[call.op for call in dealt.talks],
        values=values,
        sent=sent,
    )


def _plain(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [plain(parameter.detach().flatten()) for parameter in parameters]


def cases(rng: Random) -> list[Round]:
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
        Round(world, [(name, (sizes, rng.randint(0, 10**6))) for name, sizes in named])
        for world, named in chosen.items()
    ]


def share(seen: Seen) -> dict[str, Any]:
    kept = [number for each in seen.everyone for number in each["kept"]]
    return {
        "the list holds the same parameters": seen["same"],
        "make_optimizer is given other tensors": seen["strangers"],
        "how often the state of each parameter is kept": [kept.count(number) for number in range(len(seen.case[0]))],
    }


def _loads(seen: Seen) -> list[int]:
    return [sum(seen.case[0][number] for number in set(each["kept"])) for each in seen.everyone]


def balance(seen: Seen) -> str:
    (sizes, _), loads = seen.case, _loads(seen)
    if not any(loads):
        return "no state on any rank"
    fits = loads[seen.rank] <= sum(sizes) / seen.world_size + max(sizes)
    return "at most the mean and the largest parameter" if fits else f"{loads[seen.rank]} of {sum(sizes)} elements"


def values(seen: Seen) -> dict[str, dict]:
    return {
        f"after step {step}," if step else "before the first step,": {f"parameter {n}": x for n, x in enumerate(found)}
        for step, found in enumerate(seen["values"])
    }


def messages(seen: Seen) -> dict[str, Any]:
    """Count what arrives: a broadcast brings its bytes, an all_gather as many as each rank gives, times the ranks."""
    need, w, fullest = 8 * sum(seen.case[0]), seen.world_size, 8 * max(_loads(seen))
    # Room for an all_gather that pads all shares to the fullest one, and for objects, which travel packed.
    most = max(1.7 * need, 1.1 * fullest * w if fullest < need else 0) + 1500
    came = [sum(n_bytes * (w if "gather" in op else 1) for op, n_bytes in calls) for calls in seen["sent"]]
    odd = next((n for n in came if not need * (w - 1) / w / 2 <= n <= most), need)
    sums = sorted({op for calls in seen["sent"] for op, _ in calls if op in SUMS})
    return {"before the first step": seen["dealt"], "in a step": sums or f"{odd} bytes"}


def stale(seen: Seen) -> str:
    steps = (zip(before, after, strict=True) for before, after in pairwise(seen["values"]))
    if any(one == other for step in steps for one, other in step):
        return "the value of before this step: send after the step, from its owner, and write it into the parameter"
    return "the owner's new value, bit for bit, belongs here"


ELEMENTS = "deal out elements, not numbers of parameters: the next one goes to the rank with fewest elements so far"
MISTAKES = """
all state on every rank | share balance messages
| every rank keeps the state of all parameters; make the optimizer of this rank's share alone
    [p for p, owner in self.owner.items() if owner == rank] => parameters
    dist.broadcast(parameter.detach(), src=owner) => pass
copies | share balance values | give make_optimizer the parameters themselves: no copies, and no views
    [p for p, owner => [p.clone() for p, owner
the list gets new parameters | share values
| write into the parameters; a model and the next step hold these, not new ones
    self.owner, loads => self.parameters = parameters
    self.owner, loads
    src=owner) => src=owner)
    self.parameters[:] = [nn.Parameter(p.detach().clone()) for p in self.owner]
an optimizer for each step | share values
| an optimizer made again in each step forgets its moments; make it once, in __init__
    self.optimizer = make => self.make = lambda: make
    self.optimizer.step() => self.make().step()
the rest has no owner | share balance values
| nobody steps it; every parameter needs an owner, also when the count does not divide evenly
    self.optimizer = make => each = (len(parameters) - 1) // world_size
    self.owner = {p: i // each for i, p in enumerate(parameters) if i // each < world_size}
    self.optimizer = make
dealt in turn | balance | deal out elements, not numbers of parameters: the next one goes to the rank with fewest
    loads.index(min(loads)) => len(self.owner) % world_size
the last rank gets what is left | balance
| the ranks are filled one after the other; the next one goes to the rank with fewest elements so far
    self.owner[parameter] = loads.index(min(loads)) => last = max(sum(map(bool, loads)) - 1, 0)
    full = loads[last] and loads[last] + parameter.numel() > sum(p.numel() for p in parameters) / world_size
    self.owner[parameter] = min(last + bool(full), world_size - 1)
sent before the step | values | send after the step, from its owner, and write it into the parameter
    self.optimizer.step() => for parameter, owner in self.owner.items():
        dist.broadcast(parameter.detach(), src=owner)
    self.optimizer.step()
    return
all from rank 0 | values | its owner has stepped it, and an old value came back over the new one: send from its owner
    src=owner => src=0
received into a copy | values | the new value is not in the parameter: receive it into the parameter, or copy_ it there
    dist.broadcast(parameter.detach() => dist.broadcast(parameter.detach().clone()
nothing is sent | values messages | the new values have not arrived: nothing was sent
    dist.broadcast(parameter.detach(), src=owner) => pass
summed with zeros | messages
| new values need no sum, and gradients are averaged already: an all_reduce sends about twice the bytes; broadcast
    dist.broadcast(parameter.detach(), src=owner) => parameter.data *= owner == dist.get_rank()
    dist.all_reduce(parameter.data)
averaged | values messages
| the owner's value was mixed with the old ones of the other ranks; a broadcast mixes nothing
    dist.broadcast(parameter.detach(), src=owner) => dist.all_reduce(parameter.data)
    parameter.data /= dist.get_world_size()
gradients travel | messages | send the parameters alone, each from its owner: no moments, no gradients, nothing twice
    src=owner) => src=owner)
    dist.broadcast(parameter.grad, src=0)
the owners are sent round | messages
| all ranks have the same list, so the same rule deals it alike on all of them: no message before the first step
    self.optimizer = make => dist.broadcast_object_list([*self.owner.values()])
    self.optimizer = make
into a leaf | all | autograd is not to record this: use parameter.detach(), or torch.no_grad()
    dist.broadcast(parameter.detach(), src=owner) => new = parameter.detach().clone()
    dist.broadcast(new, src=owner)
    parameter.copy_(new)
the last rank leaves | all | a rank waits in a collective that another one never calls | hangs
    for parameter, owner in self.owner.items(): => if dist.get_rank() == dist.get_world_size() - 1:
        return
    for parameter, owner in self.owner.items():
only the values are dealt | share balance | make the optimizer of this rank's share alone | tests
    class ShardedStep:
        def __init__(self, rank, world_size, parameters, make_optimizer):
            self.world_size, self.parameters, self.optimizer = world_size, parameters, make_optimizer(parameters)

        def step(self):
            self.optimizer.step()
            for number, parameter in enumerate(self.parameters):
                dist.broadcast(parameter.data, src=number % self.world_size)
every rank steps all | share balance messages | make the optimizer of this rank's share alone | tests
    class ShardedStep:
        def __init__(self, rank, world_size, parameters, make_optimizer):
            self.optimizer = make_optimizer(parameters)

        def step(self):
            self.optimizer.step()
"""

SHARDED_STEP = exercise(
    *("17.2", "A share of the optimizer", "ShardedStep", 30),
    cases=cases,
    act=act,
    tolerance=1e-10,
    said=lambda seen: f"{len(seen.case[0])} parameters on {seen.world_size} ranks:",
    mistakes=MISTAKES,
    checks={
        "share": ("each parameter's state is on one rank", 2, "falling mixed", share,
                  "deal disjoint shares, in the same way on every rank, and each parameter to one of them"),
        "balance": ("no rank keeps much more than the others", 1, "falling mixed equal", balance, ELEMENTS),
        "values": ("all parameters, on all ranks, are those of one process", 2, "falling mixed", values, stale),
        "messages": ("the new values travel once, and nothing else", 2, "falling mixed", messages,
                     "each new value travels once, from its owner to all ranks: by a broadcast, or an all_gather"),
    },
    hints={
        r"leaf Variable that requires grad|view of a leaf": "autograd is not to record this: use parameter.detach(), "
        "or torch.no_grad()",
        r"has no attribute 'param_groups'|has no attribute 'zero_grad'": "the optimizer here has step() alone",
        "disagree: (?s)called broadcast.*called broadcast": "every rank calls each broadcast, the owner and the "
        "receivers, in one order and with one shape",
        r"waited in": "a rank waits in a collective that another one never calls: every rank calls each broadcast, the "
        "owner and the receivers",
        "sizes; disagree: different sizes; (?i)enforce fail|Connection closed|size mismatch|same shape|same size": ""
        "the ranks sent tensors of different sizes; a broadcast needs a tensor of one shape on every rank, and an "
        "all_gather the same size from every rank",
    },
)  # fmt: skip
