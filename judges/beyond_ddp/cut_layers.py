"""17.3 `CutLayers`: two linear layers and an activation, each rank with 1/W of both: same output, same gradients?

The parts are found by the names that the text asks for. What is wrong is told by its number: a bias that is added W
times, an output that nobody summed, gradients that are W times too large, a gradient of the input that is a part.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
Read next: `grading/exercise.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from ddp_course.grading import observe
from ddp_course.grading.compare import close, flat, is_factor, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain

TOLERANCE = 1e-9
NAMES = ("first_weight", "first_bias", "second_weight", "second_bias")
CUT_ALONG = {"first_weight": 0, "first_bias": 0, "second_weight": 1}  # of torch's (out, in); the last is whole
Sizes = tuple[int, int, int, int, int]  # rows, inputs, hidden, outputs, seed


def layers(sizes: Sizes, bias: float) -> tuple[nn.Linear, nn.Linear]:
    """Return the whole layers, the same on every rank; the second bias is `bias` everywhere."""
    _, inputs, hidden, outputs, seed = sizes
    torch.manual_seed(seed)
    first, second = nn.Linear(inputs, hidden).double(), nn.Linear(hidden, outputs).double()
    second.bias.data.fill_(bias)
    return first, second


def batch(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, and the gradient that comes back to the output."""
    rows, inputs, _, outputs, seed = sizes
    generator = torch.Generator().manual_seed(seed + 1)
    return tuple(torch.randn(rows, width, generator=generator, dtype=torch.float64) for width in (inputs, outputs))


def cut_driver(rank: int, world_size: int, cls: Callable, sizes: Sizes) -> dict:
    """Run forward and backward with a bias and without; note results, parts, and what travelled."""
    notes = {}
    for name, bias in (("plain", 0.0), ("bias", 1.5)):
        given = layers(sizes, bias)
        model = cls(rank, world_size, *given)
        x, grad = batch(sizes)
        x.requires_grad_()
        with observe.Collectives() as seen:
            output = model(x)
            forward = len(seen.calls)
            kept = plain(output.detach().flatten()) if isinstance(output, torch.Tensor) else plain(output)
            output.backward(grad)
        calls = [(call.op, call.n_bytes) for call in seen.calls]
        notes[name] = {
            "output": kept,
            "input": None if x.grad is None else plain(x.grad.flatten()),
            "forward": calls[:forward],
            "backward": calls[forward:],
            "parts": {name: _part(getattr(model, name, None)) for name in NAMES},
            "others": _others(model),
            "views": _views(model, given),
        }
    return notes


def _part(value: Any) -> Any:
    if not isinstance(value, nn.Parameter):
        return type(value).__name__
    return (
        list(value.shape),
        plain(value.detach().flatten()),
        None if value.grad is None else plain(value.grad.flatten()),
    )


def _others(model: Any) -> int:
    """Elements that the module holds beside what the text asks for."""
    if not isinstance(model, nn.Module):
        return -1
    asked = {id(getattr(model, name, None)) for name in NAMES}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    tensors |= {id(v): v for v in vars(model).values() if isinstance(v, torch.Tensor)}
    return sum(tensor.numel() for key, tensor in tensors.items() if key not in asked)


def _views(model: Any, given: tuple[nn.Linear, nn.Linear]) -> dict[str, int]:
    """By name, the bytes of storage behind each part that is no copy of its own: of a layer, or of a whole copy."""
    parts = {name: part for name in NAMES if isinstance(part := getattr(model, name, None), torch.Tensor)}
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


def cut_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Two runs, on other numbers of ranks and other widths."""
    runs = []
    for world_size in rng.sample((2, 3, 4), 2):
        rows, inputs, outputs = rng.sample(range(5, 12), 3)
        sizes = rows, inputs, world_size * rng.randint(2, 4), outputs, rng.randint(0, 10**6)
        notes = answer.run(cut_driver, world_size, sizes, init=True)
        runs.append((sizes, notes, {name: whole(sizes, bias) for name, bias in (("plain", 0.0), ("bias", 1.5))}))
    for check in CUT_LAYERS.checks:
        faults = (_FAULTS[check.key](*run) for run in runs)
        yield check.key, next(filter(None, faults), None)


def whole(sizes: Sizes, bias: float) -> dict:
    """Return what one process finds: output, gradient of the input, and each parameter with its gradient."""
    first, second = layers(sizes, bias)
    x, grad = batch(sizes)
    x.requires_grad_()
    output = second(torch.tanh(first(x)))
    output.backward(grad)
    parameters = dict(zip(NAMES, (*first.parameters(), *second.parameters()), strict=True))
    return {"output": output.detach(), "input": x.grad, "parameters": parameters}


def _parts_fault(sizes: Sizes, notes: list[dict], right: dict) -> Fault | None:
    for rank, note in enumerate(notes):
        if note["bias"]["others"] < 0:
            cause = "let the class be an nn.Module, and call super().__init__() first"
            return Fault("an nn.Module", "another class", rank, cause)
        for name, parameter in right["bias"]["parameters"].items():
            part, found = _piece(name, parameter.detach(), rank, len(notes)), note["bias"]["parts"][name]
            expected = f"{name} is a parameter of shape {list(part.shape)}"
            if isinstance(found, str):
                return Fault(expected, found, rank, f"set self.{name} = nn.Parameter(...), a copy of this rank's part")
            if found[0] != list(part.shape):
                return Fault(expected, f"shape {found[0]}", rank, _shape_cause(name, parameter, found[0], len(notes)))
            if not close(found[1], part, TOLERANCE):
                shown = f"{expected}, {short(flat(part))}"
                return Fault(
                    shown, short(found[1]), rank, f"the rows or columns of rank {rank} of {len(notes)}, in order"
                )
        for name, n_bytes in note["bias"]["views"].items():
            n_own = 8 * _piece(name, right["bias"]["parameters"][name], rank, len(notes)).numel()
            cause = f"a view keeps all of the tensor alive that it looks into: let {name} be a clone() of its part"
            return Fault(f"{name} is a copy of {n_own} bytes", f"a view of {n_bytes} bytes", rank, cause)
        if note["bias"]["others"]:
            cause = "keep this rank's part alone: no whole layer as an attribute"
            return Fault("nothing else is kept", f"{note['bias']['others']} more elements", rank, cause)
    return None


def _piece(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return tensor.chunk(world_size, CUT_ALONG[name])[rank] if name in CUT_ALONG else tensor


def _shape_cause(name: str, parameter: torch.Tensor, found: list[int], world_size: int) -> str:
    if found == list(parameter.shape):
        return "this is the whole layer's; each rank keeps 1/W of it"
    if name == "second_bias":
        return "the second bias is added to the whole output: it stays whole"
    if found[::-1] == list(parameter.chunk(world_size, CUT_ALONG[name])[0].shape):
        return "torch stores a weight as (outputs, inputs); keep that order"
    other = "its outputs, dimension 0" if CUT_ALONG[name] == 0 else "its inputs, dimension 1"
    return f"cut {name} along {other}: torch stores a weight as (outputs, inputs)"


def _output_fault(sizes: Sizes, notes: list[dict], right: dict, key: str = "plain") -> Fault | None:
    expected = right[key]["output"]
    for rank, note in enumerate(notes):
        found = note[key]["output"]
        if not close(found, expected, TOLERANCE):
            cause = _output_cause(sizes, found, rank, notes, right[key], key)
            return Fault(f"output {short(flat(expected))}", short(found), rank, cause)
    return None


def _output_cause(sizes: Sizes, found: Any, rank: int, notes: list[dict], right: dict, key: str) -> str:
    numbers, expected, world_size = flat(found), right["output"], len(notes)
    if numbers is None or len(numbers) != expected.numel():
        return f"the output has {expected.numel()} numbers, rows times outputs, on every rank"
    bias = 1.5 if key == "bias" else 0.0
    if bias and close(numbers, expected + (world_size - 1) * bias, TOLERANCE):
        return "the second bias is added on every rank, and then summed: it counts W times. Add it after the sum"
    if bias and close(numbers, expected - bias, TOLERANCE):
        return "the second bias is missing: add it after the sum, on every rank"
    x, _ = batch(sizes)
    first, second = layers(sizes, bias)
    hidden = torch.tanh(x @ first.weight.T + first.bias).detach()
    parts = [
        h @ w.T for h, w in zip(hidden.chunk(world_size, 1), second.weight.detach().chunk(world_size, 1), strict=True)
    ]
    if close(numbers, parts[rank], TOLERANCE) or close(numbers, parts[rank] + bias, TOLERANCE):
        return "this is what this rank's inputs give; the output is the sum over the ranks"
    if is_factor(numbers, expected, 1 / world_size):
        return "the parts are averaged; they belong in a sum"
    return "sum over the ranks what each rank's part of the hidden layer gives: second_weight @ tanh(first part)"


def _bias_fault(sizes: Sizes, notes: list[dict], right: dict) -> Fault | None:
    return _output_fault(sizes, notes, right, "bias")


def _gradients_fault(sizes: Sizes, notes: list[dict], right: dict) -> Fault | None:
    for rank, note in enumerate(notes):
        for name, parameter in right["bias"]["parameters"].items():
            expected, part = _piece(name, parameter.grad, rank, len(notes)), note["bias"]["parts"][name]
            found = None if isinstance(part, str) else part[2]
            if found is not None and close(found, expected, TOLERANCE):
                continue
            cause = "it is the same part of the whole layer's gradient as the weight is of the weight"
            if name == "second_bias" and (found is None or is_factor(found, expected, 1 / len(notes))):
                cause = "add the second bias after the sum, on every rank: then each has its whole gradient"
            elif found is None:
                cause = "no gradient comes here: let autograd see the way from the parameter to the output"
            elif is_factor(found, expected, len(notes)):
                cause = (
                    "W times too large: backward sums what forward has summed already. The gradient of the sum is "
                    "whole on each rank, and passes to its part as it is"
                )
            elif is_factor(found, expected, 1 / len(notes)):
                cause = "divided by W: nothing is to be averaged, since all ranks see the same rows"
            shown = f"gradient of {name} {short(flat(expected))}"
            return Fault(shown, "None" if found is None else short(found), rank, cause)
    return None


def _input_fault(sizes: Sizes, notes: list[dict], right: dict) -> Fault | None:
    expected, found = right["bias"]["input"], [note["bias"]["input"] for note in notes]
    for rank, mine in enumerate(found):
        if mine is not None and close(mine, expected, TOLERANCE):
            continue
        shown = f"gradient of x {short(flat(expected))}"
        if mine is None:
            return Fault(shown, "None", rank, "let autograd see the way from x to the output: no detach, no no_grad")
        times = len(notes)
        cause = "every rank adds its part: the sum over the ranks of what comes back through first_weight"
        if is_factor(mine, expected, 1 / times):
            cause = "this is a mean over the ranks; each has a part, and the parts belong in a sum"
        elif None not in found and close([sum(v) for v in zip(*found, strict=True)], expected, TOLERANCE):
            cause = "this is what comes back through this rank's part; the gradient of x is the sum over the ranks"
        elif is_factor(mine, expected, times) or is_factor(mine, expected, times**2):
            cause = "W times too large: something is summed once too often on the way back"
        elif None not in found and close([sum(v) / times for v in zip(*found, strict=True)], expected, TOLERANCE):
            cause = (
                "a part, W times too large: the sum comes in the wrong place. Sum the gradient of x, not of the output"
            )
        return Fault(shown, short(mine), rank, cause)
    return None


def _messages_fault(sizes: Sizes, notes: list[dict], right: dict) -> Fault | None:
    rows, inputs, _, outputs, _ = sizes
    for rank, note in enumerate(notes):
        for way, width, what in (("forward", outputs, "the output"), ("backward", inputs, "the gradient of x")):
            calls, n_bytes = note["bias"][way], 8 * rows * width
            if len(calls) == 1 and calls[0][0] == "all_reduce" and calls[0][1] == n_bytes:
                continue
            found = ", ".join(f"{op} of {size} bytes" for op, size in calls) or "none"
            cause = f"{way}, the one thing that the other ranks lack is their part of {what}"
            if way == "backward" and any(size == 8 * rows * outputs for _, size in calls):
                cause = "the gradient of the output is on every rank already; only the gradient of x has to be summed"
            elif any("gather" in op for op, _ in calls):
                cause = "a gather brings all parts to every rank, W times the bytes; an all_reduce adds them on the way"
            return Fault(f"{way}, one all_reduce of {n_bytes} bytes", found, rank, cause)
    return None


_FAULTS = {
    "parts": _parts_fault,
    "output": _output_fault,
    "bias": _bias_fault,
    "gradients": _gradients_fault,
    "input": _input_fault,
    "messages": _messages_fault,
}

CUT_LAYERS = Exercise(
    "17.3",
    "Two layers, cut (stretch)",
    "CutLayers",
    35,
    (
        Check("parts", "each rank keeps its part of both layers", 1),
        Check("output", "the output is that of the whole layers", 2),
        Check("bias", "also with a second bias", 1),
        Check("gradients", "the parameters' gradients are parts of the whole ones", 1),
        Check("input", "the gradient of the input is whole, on every rank", 2),
        Check("messages", "one all_reduce forward, one backward", 1),
    ),
    cut_judge,
    refused=(
        "ddp_course.beyond.tensor_parallel.ColumnParallelLinear",
        "ddp_course.beyond.tensor_parallel.RowParallelLinear",
        "ddp_course.beyond.tensor_parallel.enter_parallel",
        "ddp_course.beyond.tensor_parallel.leave_parallel",
    ),
    hints=(
        (r"before Module.__init__", "call super().__init__() first"),
        (r"returned an incorrect number of gradients", "backward returns one value for each argument of forward"),
        (
            r"does not require grad and does not have a grad_fn|element 0 of tensors",
            "the output has lost its way back: no detach and no no_grad in forward",
        ),
        (
            r"different sizes|waited in|never entered",
            "every rank calls all_reduce once forward and once backward; here one rank skips it",
        ),
        (r"mat1 and mat2|shapes cannot be multiplied|size mismatch", "torch stores a weight as (outputs, inputs)"),
        (
            r"modified by an inplace operation|view of a leaf|a leaf Variable that requires grad",
            "autograd still needs the old value: all_reduce a clone",
        ),
    ),
)
