"""18.1 `CutLayers`: two linear layers and an activation, each rank with 1/W of both: same output, same gradients?

The parts are found by the names that the text asks for. The gradient of x is looked at with another use of x, and what
is kept of the layers by their storage.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
Read next: `programs/train_parallel.py`.
"""

from __future__ import annotations

import weakref
from operator import itemgetter as noted
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary import observe, tasks
from ddp_course.grading.vocabulary.rounds import Note, Round

NAMES = ("first_weight", "first_bias", "second_weight", "second_bias")
Case = tuple[tuple[int, int, int, int], int, float, bool]  # rows and widths, a seed, the second bias, is x data alone


def act(cls, case: Case, rank: int, world_size: int) -> Note:
    """Run forward and backward twice; note of the second time results and what travelled, and what is kept."""
    (rows, inputs, hidden, outputs), seed, bias, data = case
    first, _, second = tasks.net(seed, inputs, hidden, outputs)
    second.bias.data.fill_(bias)
    chance = torch.Generator().manual_seed(seed + 1)
    x, gradient = (torch.randn(rows, width, generator=chance, dtype=torch.float64) for width in (inputs, outputs))
    model = cls(rank, world_size, first, second)
    parts = {name: getattr(model, name, None) for name in NAMES}
    held = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    given = [*first.parameters(), *second.parameters()]
    views, whole = _views(held, given), [weakref.ref(parameter) for parameter in given]
    del first, _, second, given
    for _ in range(2):
        for part in held.values():
            part.grad = None
        x = x.detach().requires_grad_(not data)
        with observe.Collectives() as seen:
            output = model(x)
            forward = len(seen.calls)
            kept = plain(output.detach()) if isinstance(output, torch.Tensor) else plain(output)
            ends = [output, x.sum()][: 2 - data]  # a gradient of ones comes to x past the layers
            torch.autograd.backward(ends, [gradient, None][: len(ends)])
    calls = [f"{call.op} of {call.n_bytes} bytes" for call in seen.calls]
    others = _others(model, parts) or any(ref() is not None for ref in whole)
    return Note(
        output=kept,
        input=None if x.grad is None else plain(x.grad - 1),
        messages={"forward": calls[:forward], "backward": calls[forward:]},
        parts={
            "an nn.Module": isinstance(model, nn.Module),
            **{name: _shown(part) for name, part in parts.items()},
            "views, not copies": views,
            "more of the layers is kept": others,
        },
        gradients={name: plain(getattr(part, "grad", None)) for name, part in parts.items()},
    )


def _shown(part: Any) -> Any:
    if not isinstance(part, nn.Parameter):
        return type(part).__name__
    return {"shape": str(list(part.shape)), "numbers": plain(part.detach())}


def _others(model: Any, parts: dict[str, Any]) -> bool:
    """Whether the module holds tensors beside what the text asks for."""
    if not isinstance(model, nn.Module):
        return False
    held = (*model.parameters(), *model.buffers(), *(v for v in vars(model).values() if isinstance(v, torch.Tensor)))
    return any(t.numel() and all(t is not part for part in parts.values()) for t in held)


def _views(parts: dict[str, torch.Tensor], given: list[nn.Parameter]) -> list[str]:
    """The parts whose storage is no copy of their own: that of a layer, or of a whole copy."""
    storages = {name: part.untyped_storage() for name, part in parts.items()}
    layers_own = {parameter.untyped_storage().data_ptr() for parameter in given}
    # All parts may lie in one storage, as long as nothing else does.
    unique = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
    roomy = sum(unique.values()) > sum(part.nbytes for part in parts.values())
    return [
        name
        for name, storage in storages.items()
        if storage.data_ptr() in layers_own or (roomy and storage.nbytes() > parts[name].nbytes)
    ]


def cases(rng: Random) -> list[Round]:
    """Without a second bias and with one, on two numbers of ranks, with other widths."""
    chosen = []
    for name, world_size in zip("ab", rng.sample((2, 3, 4), 2), strict=True):
        rows, inputs, outputs = rng.sample(range(5, 12), 3)
        sizes, seed = (rows, inputs, world_size * rng.randint(2, 4), outputs), rng.randint(0, 10**6)
        named = [(f"plain-{name}", (sizes, seed, 0.0, False)), (f"bias-{name}", (sizes, seed, 1.5, False))]
        chosen.append(Round(world_size, named + [("data", (sizes, seed, 1.5, True))] * (name == "a")))
    return chosen


AFTER = "add the second bias after the sum, on every rank: then each has its whole gradient"
VIEW = "a view keeps all of the tensor alive that it looks into: let each part be a clone()"
CUT_OFF = "let autograd see the way from x to the output: no detach, no no_grad"
MISTAKES = f"""
not summed | output bias messages | this is what this rank's inputs give; the output is the sum over the ranks
    Leave.apply( => (
gathered | messages | a gather brings all parts to every rank, W times the bytes; an all_reduce adds them on the way
    dist.all_reduce(x) => parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    x = sum(parts)
the bias W times | bias | the second bias is added on every rank and summed: it counts W times. Add it after the sum
    second_weight)) + self.second_bias => second_weight, self.second_bias))
no bias | bias gradients | the second bias is missing: add it after the sum, on every rank
    + self.second_bias =>
the bias on rank 0 | gradients | {AFTER}
    second_weight)) + self.second_bias => second_weight, None if dist.get_rank() else self.second_bias))
a W-th of the bias | gradients | {AFTER}
    second_weight)) + self.second_bias => second_weight, self.second_bias / dist.get_world_size()))
the input's gradient not summed | input messages
| this is what comes back through this rank's part; the gradient of x is the sum over the ranks
    Enter.apply(x) => x
a mean in backward | input | this is a mean over the ranks; each has a part, and the parts belong in a sum
    dist.all_reduce(grad) => dist.all_reduce(grad)
    grad /= dist.get_world_size()
a hook on x itself | input
| what x gets on other ways, past the layers, is summed too: sum the gradient of a view of x, not of x itself
    Enter.apply(x) => x
    hidden = => if x.requires_grad:
        x.register_hook(lambda gradient: Enter.backward(None, gradient))
    hidden =
detached | input messages | {CUT_OFF}
    Enter.apply(x) => Enter.apply(x.detach())
summed in backward again | gradients input messages
| backward sums what forward has summed: the gradient of the output is whole on every rank; only that of x is not
    Leave.apply(nn => Leave.apply(Enter.apply(nn
    second_weight)) => second_weight)))
sums for data | messages
| x is data here and needs no gradient, so nobody asks for its sum: look at x.requires_grad
    hidden = => x = x if x.requires_grad else x.detach().requires_grad_()
    hidden =
cut the other way | all | torch stores a weight as (outputs, inputs)
    part(first.weight, 0) => part(first.weight, 1)
every W-th row | parts gradients | the rows or columns of a rank are neighbours, in order: chunk(world_size, dim)[rank]
    .chunk(world_size, dim)[rank] => .transpose(0, dim)[rank::world_size].transpose(0, dim)
the whole layer kept | parts | keep this rank's part alone: no whole layer as an attribute
    self.second_bias = => self.layers = [first, second]
    self.second_bias =
views of the layers | parts | {VIEW}
    [rank].clone() => [rank]
nothing cut | parts gradients messages | this is the whole layer's; each rank keeps 1/W of it
    .chunk(world_size, dim)[rank] =>
    Enter.apply(x) => x
    Leave.apply( => (
the last rank skips | all | here one rank skips it | hangs
    dist.all_reduce(x) => dist.get_rank() == dist.get_world_size() - 1 or dist.all_reduce(x)
by hooks, the bias on its way too early | bias | it counts W times. Add it after the sum | tests
    def summed(grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

    class CutLayers(nn.Module):
        def __init__(self, rank, world_size, first, second):
            super().__init__()
            mine = slice(rank * len(first.bias) // world_size, (rank + 1) * len(first.bias) // world_size)
            self.first_weight = nn.Parameter(first.weight.data[mine].clone())
            self.first_bias = nn.Parameter(first.bias.data[mine].clone())
            self.second_weight = nn.Parameter(second.weight.data[:, mine].clone())
            self.second_bias = nn.Parameter(second.bias.data.clone())

        def forward(self, x):
            if x.requires_grad:
                x = x.view_as(x)
                x.register_hook(summed)
            part = torch.tanh(x @ self.first_weight.T + self.first_bias) @ self.second_weight.T + self.second_bias
            return part + (summed(part.detach()) - part.detach())
no sum at all, plain layers | parts output bias gradients input messages | set self.first_weight | tests
    class CutLayers(nn.Module):
        def __init__(self, rank, world_size, first, second):
            super().__init__()
            wide = first.out_features // world_size
            self.first = nn.Linear(first.in_features, wide).double()
            self.second = nn.Linear(wide, second.out_features).double()

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))
"""

CUT_LAYERS = exercise(
    *("18.1", "Two layers, cut", "CutLayers", 35),
    cases=cases,
    act=act,
    tolerance=1e-9,
    said=lambda seen: f"rank {seen.rank} of {seen.world_size}:",
    mistakes=MISTAKES,
    checks={
        "parts": ("each rank keeps its part of both layers", 1, "bias-a bias-b", noted("parts"),
                  "set self.first_weight = nn.Parameter(...), a copy of this rank's part, and so on: first_weight and "
                  "first_bias cut along dimension 0, second_weight along 1, in order; second_bias whole; nothing else"),
        "output": ("the output is that of the whole layers", 2, "plain-a plain-b", noted("output"),
                   "sum over the ranks what each rank's part of the hidden layer gives: second_weight @ tanh(first)"),
        "bias": ("also with a second bias", 1, "bias-a bias-b", noted("output"), AFTER),
        "gradients": ("the parameters' gradients are parts of the whole ones", 1, "bias-a bias-b", noted("gradients"),
                      "it is the same part of the whole layer's gradient as the weight is of the weight"),
        "input": ("the gradient of the input is whole, on every rank", 2, "bias-a bias-b", noted("input"),
                  "every rank adds its part: the sum over the ranks of what comes back through first_weight"),
        "messages": ("one all_reduce forward, one backward", 1, "bias-a bias-b data", noted("messages"),
                     "what the other ranks lack is their part of the output, and backward of the gradient of x"),
    },
    hints={
        r"before Module.__init__": "call super().__init__() first",
        r"returned an incorrect number of gradients": "backward returns one value for each argument of forward",
        r"does not require grad and does not have a grad_fn|element 0 of tensors": "the output has lost its way back: "
        "no detach and no no_grad in forward",
        "absent|sizes; limit: waited in; disagree: different sizes": "every rank calls all_reduce once forward and "
        "once backward; here one rank skips it",
        r"mat1 and mat2|shapes cannot be multiplied|size mismatch": "torch stores a weight as (outputs, inputs)",
        r"modified by an inplace operation|view of a leaf|a leaf Variable that requires grad": "autograd still needs "
        "the old value: all_reduce a clone",
    },
)  # fmt: skip
