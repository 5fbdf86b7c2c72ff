"""06.1 `same_start(rank, world_size, model)`: does every rank hold rank 0's model, and is it still its own model?

The models hold what is easily forgotten: frozen and tied parameters, counters, a buffer that is not saved. Every rank
begins with other values, and must end with rank 0's, bit for bit. Read next: `nets.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

import torch
from torch import nn

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.compare import close, flat
from ddp_course.grading.vocabulary.expect import Expect, alike, all_of, equals, exercise, first_fault, nothing
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.ddp_from_scratch.nets import TOLERANCE, WORLDS, Values

BIG = 2**53 + 1  # the first whole number that float64 cannot hold
AWAY = "this rank took part in no collective: dist.broadcast must be called by every rank, also by receivers"
HINTS = {
    "limit: waited in": "some ranks wait in a collective that another one skips, or calls at another "
    "place; look for a branch on the rank, or on what only this rank has",
    r"leaf Variable that requires grad|view of a leaf": "autograd is not to record this: use parameter.detach(), or "
    "torch.no_grad()",
    "sizes; disagree: different sizes; (?i)enforce fail|Connection closed": "the ranks sent tensors of different "
    "sizes, or in another "
    "order; all must call the same collectives",
}
READY = (
    *("torch.nn.parallel.DistributedDataParallel", "torch.distributed.utils._sync_module_states"),
    *("torch.distributed.utils._sync_params_and_buffers", "ddp_course.parallel.naive.NaiveDDP"),
    *("ddp_course.parallel.ddp.BucketedDDP", "ddp_course.parallel.replicas.broadcast_module"),
    *("ddp_course.parallel.replicas.broadcast_buffers", "ddp_course.parallel.naive.average_gradients"),
    "ddp_course.parallel.naive.average_gradients_flat",
)


class Mixed(nn.Module):
    """Parameters and buffers of every kind, drawn from a seed; `seen` counts in whole numbers."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.norm, self.tied = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.tied.weight = self.layer.weight
        self.frozen = nn.Parameter(torch.empty(width), requires_grad=False)
        self.register_buffer("seen", torch.tensor([0, 0]))
        self.register_buffer("scratch", torch.empty(3), persistent=False)
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            else:
                count = torch.randint(1, 10**6, tensor.shape, generator=generator)
                tensor.copy_(BIG + 2 * count)  # odd, so that float64 would lose it
        self.frozen.data[0] = -0.0

    def values(self) -> dict[str, Values]:
        """Return parameters and buffers as plain data; whole numbers less BIG, so that none loses a digit."""

        def plain(named: Iterable) -> Values:
            return {n: (t - (0 if t.is_floating_point() else BIG)).tolist() for n, t in named}

        with torch.no_grad():
            return {"parameters": plain(self.named_parameters()), "buffers": plain(self.named_buffers())}


def act(function, case: tuple[int, list[int]], rank: int, world_size: int) -> Note:
    """Call the function on a model of the rank's own; note what the model holds then, and what is wrong with it."""
    width, seeds = case
    model = Mixed(width, seeds[rank])
    held, flags = dict(model.named_parameters()), [p.requires_grad for p in model.parameters()]
    places = _places(model)
    with Collectives() as seen:
        result = function(rank, world_size, model)
    now = dict(model.named_parameters())
    other = ", ".join(name for name, parameter in held.items() if now.get(name) is not parameter)
    return Note(
        model.values(),
        silent="" if seen.calls else "no collective",
        new=isinstance(result, nn.Module) and result is not model,
        other=other and f"{other} replaced by another object",
        moved=", ".join(name for name, place in _places(model).items() if places.get(name) != place),
        sign="" if model.frozen[0].signbit() else "0.0",
        untied="" if model.tied.weight is model.layer.weight else "two objects",
        flags="" if [p.requires_grad for p in model.parameters()] == flags else "a different one",
        dirty=", ".join(f"a .grad or a grad_fn in {n}" for n, p in now.items() if p.grad is not None or p.grad_fn),
    )


def _places(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return where the numbers of parameters are, and which objects the buffers are."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: (t.data_ptr(), 0 if isinstance(t, nn.Parameter) else id(t)) for n, t in named}


def rounds(rng: Random) -> list[Round]:
    """Start with two numbers of ranks."""
    return [
        Round(ranks, [(name, (rng.randint(3, 6), rng.sample(range(1, 10**6), ranks)))])
        for name, ranks in zip(("one", "two"), rng.choice(WORLDS), strict=True)
    ]


def rank_0s(
    of: str, drawn: Callable[[Seen], list[Values]], untouched: Callable[[Seen], str], kept: Mapping[str, str]
) -> Expect:
    """Expect in a note what rank 0 has drawn.

    Args:
        drawn: what each rank has begun with.
        untouched: the cause where all values of a rank are its own still.
        kept: by name, the cause where it is this value.
    """

    def expect(seen: Seen) -> Fault | None:
        begun, found = drawn(seen), seen[of]

        def of_one(name: str) -> Fault | None:
            values = torch.tensor([own[name] for own in begun], dtype=torch.float64)
            words = f"{name} is as this rank has drawn it: every rank must get all of rank 0's parameters and buffers"
            slips = [
                (untouched(seen) if found == begun[seen.rank] else kept.get(name, words), values[seen.rank]),
                ("this is the mean over the ranks; the start is rank 0's, copied", values.mean(0)),
                ("this is the sum over the ranks; the start is rank 0's, copied", values.sum(0)),
                *(
                    (f"this is rank {rank}'s value; the source is rank 0: src=0", own)
                    for rank, own in enumerate(values)
                ),
            ]
            near = "nearly, but not exactly: the numbers went through another dtype; send each tensor in its own"
            mixed = "the values of other tensors, or of no rank: pieces came into the wrong places, or were never sent"
            shape = "its shape is different now; write the values into the tensor that is there"
            return equals(
                f"rank 0's {name}:",
                lambda seen: begun[0][name],
                lambda seen: slips,
                lambda seen, value: near if close(value, values[0], 0.01) else mixed,
                of=lambda seen: found.get(name, []),
                tolerance=TOLERANCE,
                form=lambda value: "" if torch.tensor(value).shape == values[0].shape else shape,
                shown=flat,
            )(seen)

        return first_fault(map(of_one, begun[0]))

    return expect


def values(kind: str, untouched: str, kept: Mapping[str, str]) -> Expect:
    """Expect rank 0's "parameters", or "buffers"."""

    def why(seen: Seen) -> str:
        if seen["new"]:
            return "this model is unchanged; write into the model that was given, the optimizer holds its parameters"
        return AWAY if seen["silent"] else untouched

    drawn = rank_0s(kind, lambda seen: [Mixed(seen.case[0], seed).values()[kind] for seed in seen.case[1]], why, kept)
    return all_of(drawn, alike("rank 0's values are to be copied, not computed", of=kind))


COUNTERS = "buffers of whole numbers were left out; they belong to the start, too"
parameters = all_of(
    values(
        "parameters",
        "nothing arrived in the parameters; broadcast writes into the tensor that it is given: give it "
        "parameter.detach(), not a copy",
        {"frozen": "frozen parameters belong to the start, too: do not ask for requires_grad"},
    ),
    nothing("sign", "-0.0 in frozen, as on rank 0", "-0.0 and 0.0 add up to 0.0; a sum is no copy: broadcast"),
)
buffers = values(
    "buffers",
    "buffers are no parameters: go through model.buffers(), too",
    {
        "scratch": "state_dict() leaves out a buffer with persistent=False; model.buffers() has them all",
        **dict.fromkeys(("seen", "norm.num_batches_tracked"), COUNTERS),
    },
)
same_model = all_of(
    nothing(
        *("other", "the same Parameter objects as before"),
        "an optimizer made before would go on with the old ones; write into the tensor: copy_, or broadcast itself",
    ),
    nothing(
        *("moved", "parameters in the memory where they were, and the same buffers"),
        "write into the tensors that are there: copy_, or broadcast itself; what is assigned is another tensor",
    ),
    nothing("untied", "tied weights are one object still", "write into the tensors that are there"),
    nothing("flags", "each requires_grad as before", "leave requires_grad as it was: use detach(), or torch.no_grad()"),
    nothing(
        *("dirty", "no gradient, no history"),
        "copy the values where autograd does not see it: parameter.detach(), or torch.no_grad()",
    ),
    nothing("silent", "a start that was sent", AWAY),
)

START = exercise(
    *("06.1", "The same start", "same_start", 10),
    act=act,
    rounds=rounds,
    checks={
        "parameters": ("every rank has rank 0's parameters", 2, parameters, "one two"),
        "buffers": ("every rank has rank 0's buffers", 2, buffers, "one two"),
        "model": ("the model is still the same object inside, ready for its optimizer", 1, same_model, "one two"),
    },
    refused=READY,
    hints=HINTS,
)
