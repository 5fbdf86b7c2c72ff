"""06.3 `MyDDP(module)`: do replicas become and stay equal, when the training loop does not ask for it?

Used as a module first, without backward; then trained, and compared with one process on the whole batch.
Read next: `unused.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from ddp_course.grading.compare import close, flat, short
from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer
from judges.ddp_from_scratch import nets
from judges.ddp_from_scratch.average import once_fault
from judges.ddp_from_scratch.causes import TOLERANCE, gradient_fault, rank_0_last
from judges.ddp_from_scratch.start import HANGS, REFUSED
from judges.ddp_from_scratch.training import Outer, ddp_driver, module_driver

STEPS = 3
READY = (
    *REFUSED,
    "ddp_course.parallel.naive.average_gradients",
    "ddp_course.parallel.naive.average_gradients_flat",
)


def ddp_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Use the class as a module; train a plain network with SGD; then one with tied and frozen parameters with Adam."""
    first, second = rng.choice(nets.WORLDS)
    width = rng.randint(3, 6)
    used = answer.run(module_driver, first, width, init=True)
    yield "start", values_fault(used, [Outer(width, rank).values() for rank in range(first)])
    yield "module", _module_fault(used)
    task = nets.Task(rng.randint(4, 6), rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((),) * first,) * STEPS)
    notes, whole = answer.run(ddp_driver, first, task, init=True), nets.truth(task, first)
    yield "gradients", first_gradient_fault(task, notes, whole)
    yield "steps", steps_fault(task, notes, whole)
    yield "hooks", hooks_fault(task, notes)
    task = nets.Task(24, task.rows, rng.randint(1, 10**6), (((),) * second,) * STEPS, tied=True, adam=True)
    notes, whole = answer.run(ddp_driver, second, task, init=True), nets.truth(task, second)
    yield "tied", first_gradient_fault(task, notes, whole) or _once(task, notes) or steps_fault(task, notes, whole)


def start_fault(task: nets.Task, notes: list[dict]) -> Fault | None:
    """Compare each rank's weights before training with rank 0's."""
    begun = [{n: p.detach().tolist() for n, p in task.model(rank).named_parameters()} for rank in range(len(notes))]
    return values_fault(notes, begun)


def values_fault(notes: list[dict], begun: list[dict]) -> Fault | None:
    """Compare what each rank holds after the constructor with what rank 0 had drawn."""
    for rank, note in enumerate(notes):
        name = next((n for n in begun[0] if not close(note["start"][n], begun[0][n], TOLERANCE)), None)
        if name is None:
            continue
        found, wanted = note["start"][name], begun[0][name]
        mean = torch.tensor([flat(b[name]) for b in begun]).double().mean(0)
        cause = "the constructor must give every rank rank 0's parameters, frozen ones and buffers, too"
        if note["start"] == begun[rank]:
            cause = f"all values are as this rank has drawn them: no broadcast reached the module. Note: {COPIED}"
        elif found == begun[rank][name]:
            cause = f"{name} is as this rank has drawn it, no broadcast reached it: {cause}"
        elif close(flat(found), mean, 1e-6):
            cause = "this is the mean over the ranks; the start is rank 0's, copied"
        return Fault(f"after the constructor, rank 0's {name}: {short(flat(wanted))}", short(flat(found)), rank, cause)
    return None


COPIED = "keep the module that was given, not a copy, and broadcast its own tensors"


def first_gradient_fault(task: nets.Task, notes: list[dict], whole: nets.Truth) -> Fault | None:
    """Compare the gradients of the first step, as backward left them."""
    unequal = start_fault(task, notes)
    for rank, note in rank_0_last(notes):
        sent = note["steps"][0]["inside"] > 0
        own = whole.own if not unequal else None
        fault = gradient_fault(note["steps"][0]["gradients"], 0, task, whole.gradients[0], own, rank)
        if fault and unequal and fault.found != "None":
            return Fault(fault.expected, fault.found, rank, "the replicas did not start from rank 0's parameters")
        if fault and not sent and fault.found != "None":
            return Fault(fault.expected, fault.found, rank, f"{fault.cause}. {WHERE}" if fault.cause else WHERE)
        if fault:
            return fault
    return None


WHERE = (
    "No gradient was sent while backward ran: average in a hook of each parameter. A hook of register_hook runs before "
    ".grad is filled, so it must change the gradient that it is given and return it"
)


def steps_fault(task: nets.Task, notes: list[dict], whole: nets.Truth) -> Fault | None:
    """Compare the weights after training, and name the step in which they left the path."""
    for rank, note in enumerate(notes):
        name = next((n for n, value in whole.weights.items() if not close(note["weights"][n], value, TOLERANCE)), None)
        if name is None:
            continue
        expected = f"after {len(task.uses)} steps, {name} is {short(flat(whole.weights[name]))}, as in one process"
        return Fault(expected, short(flat(note["weights"][name])), rank, _steps_cause(task, note, whole, rank))
    return None


def _steps_cause(task: nets.Task, note: dict, whole: nets.Truth, rank: int) -> str:
    for step, right in enumerate(whole.gradients):
        if fault := gradient_fault(note["steps"][step]["gradients"], step, task, right, None, rank):
            if step == 0:
                return "the gradients, or the weights, of the first step are wrong already"
            return (
                f"step 1 is right, step {step + 1} is not: nothing of the step before may be left over, and what hooks "
                f"count must begin anew. {fault.expected}, found {fault.found}"
            )
    return "the gradients are right, the weights are not: leave the weights to the optimizer"


def hooks_fault(task: nets.Task, notes: list[dict]) -> Fault | None:
    """In each step the gradients must travel between the begin and the end of backward."""
    n_bytes = sum(p.nbytes for p in task.model().parameters() if p.requires_grad)
    for rank, note in enumerate(notes):
        for number, step in enumerate(note["steps"], 1):
            if step["inside"] >= n_bytes // 2:
                continue
            expected = f"in step {number}, gradients of {n_bytes} bytes leave while backward runs"
            cause = "register a hook with each parameter: register_post_accumulate_grad_hook"
            if step["late"]:
                cause = "the gradients travel after backward, when the next step begins; average them in hooks"
            elif step["inside"]:
                cause = "some parameters have no hook"
            elif number > 1:
                cause = "the hooks work in the first step only; register them once, and let them work in each"
            return Fault(expected, f"{step['inside']} bytes", rank, cause)
    return None


def _once(task: nets.Task, notes: list[dict]) -> Fault | None:
    n_bytes = sum(p.nbytes for p in task.model().parameters() if p.requires_grad)
    faults = (once_fault(n_bytes, note["steps"][0]["brought"], rank) for rank, note in enumerate(notes))
    return next(filter(None, faults), None)


def _module_fault(notes: list[dict]) -> Fault | None:
    rank = next((rank for rank, note in enumerate(notes) if note["trouble"]), None)
    if rank is None:
        return None
    cause = (
        "call super().__init__(), keep the module itself (no copy) as an attribute, "
        "and let forward(*inputs, **kwargs) return what the module returns"
    )
    return Fault("a replica is used as its module is", notes[rank]["trouble"], rank, cause)


DDP_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"cannot register a hook on a tensor that doesn't require gradient|without requires_grad|requires_grad=False",
        "a frozen parameter gets no gradient and takes no hook: ask for requires_grad first",
    ),
    (
        r"'NoneType' object has no attribute|NoneType",
        "a .grad is None: a hook of register_hook runs before .grad is filled (take "
        "register_post_accumulate_grad_hook, or change the gradient that it is given), and a frozen parameter has "
        "none, and no hook that runs",
    ),
    (r"expected Variable, but hook returned", "a post-accumulate hook must return None"),
    (
        r"before Module.__init__|has no attribute '_(parameters|modules|buffers|backward_hooks|forward)",
        "call super().__init__() first",
    ),
    (r"forward\(\)|_forward_unimplemented|missing the required \"forward\"", "forward passes all inputs on"),
    (
        r"leaf Variable that requires grad|view of a leaf",
        "autograd is not to record this: use parameter.detach(), or torch.no_grad()",
    ),
    *HANGS,
    (
        r"(?i)different sizes|enforce fail|Connection closed",
        "the ranks sent tensors of different sizes, or in another order; all must call the same collectives",
    ),
)


OWN_DDP = Exercise(
    "06.3",
    "Your own DDP",
    "MyDDP",
    30,
    (
        Check("start", "all replicas begin as rank 0's", 1),
        Check("module", "the replica is used as its module is", 1),
        Check("gradients", "backward leaves the gradients of the whole batch", 2),
        Check("steps", "three steps: the weights are those of one process", 1),
        Check("hooks", "the gradients travel while backward runs", 2),
        Check("tied", "tied and frozen parameters, with Adam", 1),
    ),
    ddp_judge,
    refused=READY,
    hints=DDP_HINTS,
)
