"""17.3 `CutLayers`: two linear layers and an activation, each rank with 1/W of both: same output, same gradients?

The parts are found by the names that the text asks for. What is wrong is told by its number: a bias that is added W
times, an output that nobody summed, gradients that are W times too large, a gradient of the input that is a part.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
Read next: `grading/exercise.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary import observe, tasks
from ddp_course.grading.vocabulary.compare import close, flat, short
from ddp_course.grading.vocabulary.expect import Expect, all_of, equals, exercise, turned
from ddp_course.grading.vocabulary.play import Note, Round, Seen

TOLERANCE = 1e-9
NAMES = ("first_weight", "first_bias", "second_weight", "second_bias")
CUT_ALONG = {"first_weight": 0, "first_bias": 0, "second_weight": 1}  # of torch's (out, in); the last is whole


class Case(NamedTuple):
    """Two layers, the same on every rank; the second bias is `bias` everywhere."""

    rows: int
    inputs: int
    hidden: int
    outputs: int
    seed: int
    bias: float
    data: bool = False  # x is data, which needs no gradient

    def layers(self) -> tuple[nn.Linear, nn.Linear]:
        """Return the whole layers."""
        first, _, second = tasks.net(self.seed, self.inputs, self.hidden, self.outputs)
        second.bias.data.fill_(self.bias)
        return first, second

    def batch(self) -> list[torch.Tensor]:
        """Return the rows, and the gradient that comes back to the output."""
        chance, widths = torch.Generator().manual_seed(self.seed + 1), (self.inputs, self.outputs)
        return [torch.randn(self.rows, width, generator=chance, dtype=torch.float64) for width in widths]


def act(cls, case: Case, rank: int, world_size: int) -> Note:
    """Run forward and backward twice; note of the second time results and what travelled, and what is kept."""
    given, (x, gradient) = case.layers(), case.batch()
    model = cls(rank, world_size, *given)
    parts = {name: getattr(model, name, None) for name in NAMES}
    held = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    views, whole = _views(held, given), [weakref.ref(p) for layer in given for p in layer.parameters()]
    del given
    for _ in range(2):
        for part in held.values():
            part.grad = None
        x = x.detach().requires_grad_(not case.data)
        with observe.Collectives() as seen:
            output = model(x)
            forward = len(seen.calls)
            kept = plain(output.detach().flatten()) if isinstance(output, torch.Tensor) else plain(output)
            ends = [output, x.sum()][: 2 - case.data]  # a gradient of ones comes to x past the layers
            torch.autograd.backward(ends, [gradient, None][: len(ends)])
    calls = [(call.op, call.n_bytes) for call in seen.calls]
    return Note(
        output=kept,
        input=None if x.grad is None else x.grad - 1,
        forward=calls[:forward],
        backward=calls[forward:],
        parts={
            name: part.detach() if isinstance(part, nn.Parameter) else type(part).__name__
            for name, part in parts.items()
        },
        grads={name: getattr(part, "grad", None) for name, part in parts.items()},
        others=_others(model, parts) or any(ref() is not None for ref in whole),
        views=views,
    )


def _others(model: Any, parts: dict[str, Any]) -> int:
    """Elements that the module holds beside what the text asks for; less than none where it is no module."""
    if not isinstance(model, nn.Module):
        return -1
    held = (*model.parameters(), *model.buffers(), *(v for v in vars(model).values() if isinstance(v, torch.Tensor)))
    return sum({id(t): t.numel() for t in held if all(t is not part for part in parts.values())}.values())


def _views(parts: dict[str, torch.Tensor], given: tuple[nn.Linear, nn.Linear]) -> dict[str, int]:
    """By name, the bytes of storage behind each part that is no copy of its own: of a layer, or of a whole copy."""
    storages = {name: part.untyped_storage() for name, part in parts.items()}
    layers_own = {p.untyped_storage().data_ptr() for layer in given for p in layer.parameters()}
    # All parts may lie in one storage, as long as nothing else does.
    unique = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
    roomy = sum(unique.values()) > sum(part.nbytes for part in parts.values())
    return {
        name: storage.nbytes()
        for name, storage in storages.items()
        if storage.data_ptr() in layers_own or (roomy and storage.nbytes() > parts[name].nbytes)
    }


def rounds(rng: Random) -> list[Round]:
    """Without a second bias and with one, on two numbers of ranks, with other widths."""
    chosen = []
    for name, world_size in zip("ab", rng.sample((2, 3, 4), 2), strict=True):
        rows, inputs, outputs = rng.sample(range(5, 12), 3)
        sizes = rows, inputs, world_size * rng.randint(2, 4), outputs, rng.randint(0, 10**6)
        cases = [(f"plain-{name}", Case(*sizes, 0.0)), (f"bias-{name}", Case(*sizes, 1.5))]
        chosen.append(Round(world_size, cases))
    chosen[0].cases.append(("data", chosen[0].cases[1][1]._replace(data=True)))
    return chosen


# --- One process, with knobs for what is wrong -----------------------------------------------------


def whole(
    seen: Seen, of: str, ranks: list[int] | None = None, biases: int = 1, times: float = 1, more: float = 0
) -> torch.Tensor:
    """Return the output, or the gradient of "input" or of a parameter's part.

    Args:
        ranks: whose parts of the layers are in it. biases: how often the second bias is. times: a factor too much.
        more: is added to each number.
    """
    (first, second), (x, gradient), w = seen.case.layers(), seen.case.batch(), seen.world_size
    x.requires_grad_()
    cut = list(zip(first.weight.chunk(w), first.bias.chunk(w), second.weight.chunk(w, 1), strict=True))
    parts = (torch.tanh(x @ cut[r][0].T + cut[r][1]) @ cut[r][2].T for r in ranks or range(w))
    output = sum(parts) + biases * second.bias
    if of == "output":
        return times * output.detach()
    output.backward(gradient)
    given = zip(NAMES, (*first.parameters(), *second.parameters()), strict=True)
    gradients = {"input": x.grad, **{name: piece(seen, name, parameter.grad) for name, parameter in given}}
    return times * gradients[of] + more


def piece(seen: Seen, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, or of its gradient."""
    return tensor.chunk(seen.world_size, CUT_ALONG[name])[seen.rank] if name in CUT_ALONG else tensor


def compared(what: str, of: str, mistakes: Callable[[Seen], dict[str, dict]], otherwise: str, missing: str) -> Expect:
    """Expect what one process finds, of as many numbers; `missing` is the cause when there are none."""
    return equals(
        what,
        lambda seen: whole(seen, of),
        turned(lambda seen, **knobs: whole(seen, of, **knobs), mistakes),
        lambda seen, found: otherwise if len(flat(found)) == whole(seen, of).numel() else missing,
        of=lambda seen: seen[of] if of in ("output", "input") else seen["grads"][of],
        tolerance=TOLERANCE,
        form=lambda found: missing if flat(found) is None else "",
        shown=lambda found: found if flat(found) is None else flat(found),
    )


output = compared(
    *("output", "output"),
    lambda seen: {
        "the second bias is added on every rank, and then summed: it counts W times. Add it after the sum":
            {"biases": seen.world_size},
        "the second bias is missing: add it after the sum, on every rank": {"biases": 0},
        "this is what this rank's inputs give; the output is the sum over the ranks": {"ranks": [seen.rank]},
        "this is what this rank's inputs give; the output is the sum over the ranks, and the bias":
            {"ranks": [seen.rank], "biases": 0},
        "the parts are averaged; they belong in a sum": {"times": 1 / seen.world_size},
    },
    "sum over the ranks what each rank's part of the hidden layer gives: second_weight @ tanh(first part)",
    "the output has rows times outputs numbers, on every rank",
)  # fmt: skip
CUT_OFF = "let autograd see the way from x to the output: no detach, no no_grad"
input_gradient = compared(
    *("gradient of x", "input"),
    lambda seen: {
        CUT_OFF: {"times": 0},
        "what x gets on other ways, past the layers, is summed too: sum the gradient of a view of x, not of x itself":
            {"more": seen.world_size - 1},
        "this is a mean over the ranks; each has a part, and the parts belong in a sum": {"times": 1 / seen.world_size},
        "this is what comes back through this rank's part; the gradient of x is the sum over the ranks":
            {"ranks": [seen.rank]},
        "W times too large: something is summed once too often on the way back": {"times": seen.world_size},
        "W * W times too large: something is summed too often on the way back": {"times": seen.world_size**2},
        "a part, W times too large: the sum comes in the wrong place. Sum the gradient of x, not of the output":
            {"ranks": [seen.rank], "times": seen.world_size},
    },
    "every rank adds its part: the sum over the ranks of what comes back through first_weight",
    CUT_OFF,
)  # fmt: skip


def gradient(name: str) -> Expect:
    """Return what is expected of the gradient of a parameter."""
    after = "add the second bias after the sum, on every rank: then each has its whole gradient"
    averaged = "divided by W: nothing is to be averaged, since all ranks see the same rows"
    missing = "no gradient comes here: let autograd see the way from the parameter to the output"
    summed = (
        "W times too large: backward sums what forward has summed already. The gradient of the sum is whole on each "
        "rank, and passes to its part as it is"
    )
    return compared(
        *(f"gradient of {name}", name),
        lambda seen: {
            summed: {"times": seen.world_size},
            after if name == "second_bias" else averaged: {"times": 1 / seen.world_size},
        },
        "it is the same part of the whole layer's gradient as the weight is of the weight",
        after if name == "second_bias" else missing,
    )


# --- What else is expected -------------------------------------------------------------------------


def parts(seen: Seen) -> Fault | None:
    """Each rank keeps its part of both layers, as copies, and nothing else."""
    first, second = seen.case.layers()
    if seen["others"] < 0:
        cause = "let the class be an nn.Module, and call super().__init__() first"
        return Fault("an nn.Module", "another class", seen.rank, cause)
    for name, parameter in zip(NAMES, (*first.parameters(), *second.parameters()), strict=True):
        part, found = piece(seen, name, parameter.detach()), seen["parts"][name]
        expected = f"{name} is a parameter of shape {list(part.shape)}"
        if isinstance(found, str):
            cause = f"set self.{name} = nn.Parameter(...), a copy of this rank's part"
            return Fault(expected, found, seen.rank, cause)
        if found.shape != part.shape:
            return Fault(expected, f"shape {list(found.shape)}", seen.rank, _why_shape(name, parameter, part, found))
        if not close(found, part, TOLERANCE):
            cause = f"the rows or columns of rank {seen.rank} of {seen.world_size}, in order"
            return Fault(f"{expected}, {short(flat(part))}", short(flat(found)), seen.rank, cause)
    for name, n_bytes in seen["views"].items():
        cause = f"a view keeps all of the tensor alive that it looks into: let {name} be a clone() of its part"
        expected = f"{name} is a copy of {seen['parts'][name].nbytes} bytes"
        return Fault(expected, f"a view of {n_bytes} bytes", seen.rank, cause)
    cause = "keep this rank's part alone: no whole layer as an attribute"
    found = "a whole layer" if seen["others"] is True else f"{seen['others']} more elements"
    return Fault("nothing else is kept", found, seen.rank, cause) if seen["others"] else None


def _why_shape(name: str, parameter: torch.Tensor, part: torch.Tensor, found: torch.Tensor) -> str:
    if found.shape == parameter.shape:
        return "this is the whole layer's; each rank keeps 1/W of it"
    if name == "second_bias":
        return "the second bias is added to the whole output: it stays whole"
    if found.shape[::-1] == part.shape:
        return "torch stores a weight as (outputs, inputs); keep that order"
    along = ("its outputs, dimension 0", "its inputs, dimension 1")[CUT_ALONG[name]]
    return f"cut {name} along {along}: torch stores a weight as (outputs, inputs)"


def messages(seen: Seen) -> Fault | None:
    """One all_reduce forward, of the output, and one backward, of the gradient of x."""
    rows, inputs, _, outputs, *_ = seen.case
    if seen.case.data and seen["backward"]:
        cause = "x is data here and needs no gradient, so nobody asks for its sum: look at x.requires_grad"
        return Fault("backward, no collective", f"{len(seen['backward'])}", seen.rank, cause)
    ways = ("forward", outputs, "the output"), ("backward", inputs, "the gradient of x")
    for way, width, what in ways[: 1 if seen.case.data else 2]:
        calls, n_bytes = seen[way], 8 * rows * width
        if calls == [("all_reduce", n_bytes)]:
            continue
        cause = f"{way}, the one thing that the other ranks lack is their part of {what}"
        if way == "backward" and any(size == 8 * rows * outputs for _, size in calls):
            cause = "the gradient of the output is on every rank already; only the gradient of x has to be summed"
        elif any("gather" in op for op, _ in calls):
            cause = "a gather brings all parts to every rank, W times the bytes; an all_reduce adds them on the way"
        found = ", ".join(f"{op} of {size} bytes" for op, size in calls) or "none"
        return Fault(f"{way}, one all_reduce of {n_bytes} bytes", found, seen.rank, cause)
    return None


gradients = all_of(*map(gradient, NAMES))

CUT_LAYERS = exercise(
    "17.3",
    "Two layers, cut (stretch)",
    "CutLayers",
    35,
    act=act,
    rounds=rounds,
    checks={
        "parts": ("each rank keeps its part of both layers", 1, parts, "bias-a bias-b"),
        "output": ("the output is that of the whole layers", 2, output, "plain-a plain-b"),
        "bias": ("also with a second bias", 1, output, "bias-a bias-b"),
        "gradients": ("the parameters' gradients are parts of the whole ones", 1, gradients, "bias-a bias-b"),
        "input": ("the gradient of the input is whole, on every rank", 2, input_gradient, "bias-a bias-b"),
        "messages": ("one all_reduce forward, one backward", 1, messages, "bias-a bias-b data"),
    },
    refused=tuple(
        f"ddp_course.beyond.tensor_parallel.{name}"
        for name in ("ColumnParallelLinear", "RowParallelLinear", "enter_parallel", "leave_parallel")
    ),
    hints={
        r"before Module.__init__": "call super().__init__() first",
        r"returned an incorrect number of gradients": "backward returns one value for each argument of forward",
        r"does not require grad and does not have a grad_fn|element 0 of tensors": "the output has lost its way back: "
        "no detach and no no_grad in forward",
        "absent|sizes; limit: waited in; disagree: different sizes": "every rank calls all_reduce once forward and "
        "once backward; here "
        "one rank skips it",
        r"mat1 and mat2|shapes cannot be multiplied|size mismatch": "torch stores a weight as (outputs, inputs)",
        r"modified by an inplace operation|view of a leaf|a leaf Variable that requires grad": "autograd still needs "
        "the old value: all_reduce a clone",
    },
)
