"""When are two ways through the same program the same?

Pure: what two wrappers left behind after every operation goes in, the first difference comes out, in words. Whether a
gradient is None counts, and whether an operation raises; the class and the text of an error do not.
Read next: `fuzz_on_ranks.py`, where the records come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.parallel.fuzz_programs import Case

# Relative to the largest number in a tensor. A sum over two ranks is the same in every order, a sum over three is not,
# and what the coarsest type in a net rounds differently reaches all the others.
SAME_ORDER = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
ANY_ORDER = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 5e-2}
LOST = ("Timed out", "timed out", "Connection", "closed by peer")  # how errors begin that follow from waiting in vain


@dataclass
class Record:
    """What one operation left behind on this rank; `complete` is False where torch has not ended its reduction."""

    error: str = ""
    complete: bool = True
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Documented:
    """A difference that is meant to be: a program ends, and is not compared further, where it shows.

    Args:
        torch, ours: parts of the errors; "" fits every error, and none.
        half: only where torch's reduction has not ended.
        container: only where outputs come in it; "" is every one.
    """

    reason: str
    torch: str = ""
    ours: str = ""
    half: bool = False
    container: str = ""

    def holds(self, case: Case, theirs: Record, mine: Record) -> bool:
        said = bool(theirs.error or mine.error) and self.torch in theirs.error and self.ours in mine.error
        return said and not (self.half and theirs.complete) and self.container in ("", case.net.container)


DOCUMENTED = (
    Documented(
        "A parameter was used in a local pass, its gradient was set to None, and the next pass does not use it. torch "
        "counts it as used, and unless gradients are views it then misses its gradient; it says itself that this is a "
        "bug of its own.",
        torch="Encountered gradient which is undefined",
    ),
    Documented(
        "Gradients are missing, and the optimizer would step with averages of some and local gradients of others. "
        "torch lets it, and raises at the next forward pass; ours raises before the step.",
        ours="so the averages are incomplete",
        half=True,
    ),
    Documented(
        "An output that the loss does not use comes in a dataclass. torch looks into it for unused parameters, but "
        "cannot put its own end of the graph there, and refuses the next forward pass; with ours it is as in a tuple.",
        torch="not all `forward` outputs participate",
        container="dataclass",
    ),
)


@dataclass(frozen=True)
class Found:
    """What one rank saw: the kind of the first difference, in words and short, and how far torch came."""

    kind: str = ""
    text: str = ""
    torch_error: str = ""
    operations: int = 0
    compared: int = 0


def first_difference(case: Case, theirs: list[Record], mine: list[Record]) -> tuple[str, str]:
    """Return the kind of the first difference and a sentence; both empty when there is none."""
    for index, (a, b) in enumerate(zip(theirs, mine, strict=False)):
        where = f"operation {index}, {case.program[index]}: "
        if any(known.holds(case, a, b) for known in DOCUMENTED):
            break
        if bool(a.error) != bool(b.error):
            if any(sign in b.error for sign in LOST):
                return "hangs", f"{where}ours waited in vain: {b.error[:300]}"
            return "raises", f"{where}torch: {a.error[:300] or 'no error'}; ours: {b.error[:300] or 'no error'}"
        if a.error or not a.complete:
            continue
        if a.state.keys() != b.state.keys():
            return "names", f"{where}{sorted(a.state.keys() ^ b.state.keys())} on one side only"
        for name in a.state:
            if text := differ(case, name, a.state, b.state):
                return name.split()[0], f"{where}{name}: {text}"
    return "", ""


def differ(case: Case, name: str, theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    a, b = theirs[name], mine[name]
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return "" if type(a) is type(b) and a == b else f"torch: {shown(a)}; ours: {shown(b)}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"torch: {a.dtype} {tuple(a.shape)}; ours: {b.dtype} {tuple(b.shape)}"
    if torch.equal(a, b):
        return ""
    if a.is_floating_point():
        # A sum that happens to be near zero is as inexact as what was added, which the other tensors show: a little,
        # and more for gradients, which are sums over rows as well, where ranks add in another order.
        kind = name.split()[0]
        alike = [t for n, t in theirs.items() if n.split()[0] == kind and torch.is_tensor(t) and t.is_floating_point()]
        share = 0.3 if kind == "gradient" and case.world_size > 2 else 0.01
        atol = tolerance(case, a.dtype) * max(largest(a), share * max(map(largest, alike)))
        if torch.allclose(a.double(), b.double(), rtol=0, atol=atol, equal_nan=True):
            return ""
    return f"torch: {shown(a)}; ours: {shown(b)}"


def tolerance(case: Case, dtype: torch.dtype) -> float:
    if case.world_size <= 2:
        return SAME_ORDER[dtype]
    half = case.net.autocast or case.hook == "fp16"
    names = {case.net.dtype, *(block.dtype for block in case.net.blocks), *(["bfloat16"] if half else [])}
    return max(ANY_ORDER[getattr(torch, name)] for name in names)


def largest(tensor: torch.Tensor) -> float:
    finite = tensor.double().nan_to_num(0, 0, 0)
    return finite.abs().max().item() if tensor.numel() else 0.0


def shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    numbers = ", ".join(f"{number:.6g}" for number in value.double().flatten()[:4].tolist())
    return f"[{numbers}{', ...' if value.numel() > 4 else ''}]"
