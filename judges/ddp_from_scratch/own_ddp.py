"""06.3 `MyDDP(module)`: do replicas become and stay equal, when the training loop does not ask for it?

Used as a module first, without backward; then trained in the plain loop. Gradients are read as soon as backward has
returned, and in the first step the last rank is late, so an average that is not waited for is not there.
Below is 06.4, its stretch. Read next: `../gradient_bucketing/`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import torch
from torch import nn

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import all_of, exercise, nothing
from ddp_course.grading.vocabulary.observe import Collectives
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.ddp_from_scratch import nets
from judges.ddp_from_scratch.average import FIRST_HALF, WHOLE, bytes_of, gradients, sent_once, uneven, weights
from judges.ddp_from_scratch.nets import weights_of
from judges.ddp_from_scratch.start import HINTS as ALL_HINTS
from judges.ddp_from_scratch.start import READY, rank_0s

STEPS, LATE_S = 3, 0.05


def act(cls, task: nets.Task, rank: int, world_size: int) -> Note:
    """Wrap and train a model of the rank's own; note what was sent within each backward pass, and before it.

    A task without steps is for a replica that is used, and not trained.
    """
    model, between, within = task.model(rank), [], []
    with Collectives() as seen:
        replica = cls(model)
        note = Note(start=_values(model), trouble="" if task.uses else _trouble(replica, model))
        seen.calls.clear()

        def backward(step: int) -> None:
            replica.train(step != 1)  # gradients are averaged in eval mode, too
            losses = []
            for number, loss in enumerate(task.losses(replica, rank, step)):
                losses.append(loss)
                while losses and number != 1:  # the second loss waits for the third
                    backward_pass(losses.pop(0), late=step == 0 and rank == world_size - 1)

        def backward_pass(loss: torch.Tensor, late: bool) -> None:
            time.sleep(LATE_S * late)
            before = len(seen.calls)
            loss.backward()
            between.append(seen.calls[:before])
            within.append([call for call in seen.calls[before:] if call.in_backward])
            seen.calls.clear()

        found = task.train(model, backward)
    return Note(note, gradients=found, sent=within, between=between, weights=weights_of(model))


def _values(model: nn.Module) -> nets.Values:
    state = {**dict(model.named_buffers()), **model.state_dict()}
    return {name: tensor.detach().tolist() for name, tensor in state.items()}


def _trouble(replica: nn.Module, model: nets.Net) -> str:
    try:
        return next((words for fine, words in _uses(replica, model) if not fine), "")
    except NotImplementedError:
        raise
    except Exception as error:  # the learner's; told in one line, so that the other checks go on
        return f"{type(error).__name__}: {error}"


def _uses(replica: nn.Module, model: nets.Net) -> Iterator[tuple[bool, str]]:
    """Use the replica as a module is used; yield after each use whether it went well, and what is wrong if not."""
    yield isinstance(replica, nn.Module), "the replica is no nn.Module"
    inside = [{id(p) for p in module.parameters()} for module in (replica, model)]
    yield inside[0] == inside[1], "replica.parameters() does not give the module's own parameters"
    x = torch.ones(2, model.first.in_features, dtype=torch.float64)
    found, right = replica(x, named=True), model(x, named=True)["scores"]
    same = isinstance(found, dict) and torch.equal(found["scores"], right)
    yield same, "replica(x, named=True) does not return what module(x, named=True) returns"
    kept = {name: value.clone() for name, value in replica.state_dict().items()}
    names = [sorted(name.split(".")[-1] for name in state) for state in (kept, model.state_dict())]
    yield names[0] == names[1], f"replica.state_dict() holds {sorted(kept)}"
    model.first.weight.data.zero_()
    replica.load_state_dict(kept)
    replica.eval()
    reached = bool(model.first.weight.any()) and not model.training
    yield reached, "load_state_dict or eval does not reach the module"


def rounds(rng: Random) -> list[Round]:
    """Use the class as a module; train a plain network with SGD; then one with tied and frozen parameters with Adam."""
    first, second = rng.choice(nets.WORLDS)
    used = nets.Task(rng.randint(3, 6), 0, rng.randint(1, 10**6), (), tied=True)
    plain = nets.Task(rng.randint(4, 6), rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((),) * first,) * STEPS)
    plain = replace(plain, blank=((1, rng.randrange(first)),), thrice=2)
    tied = nets.Task(24, plain.rows, rng.randint(1, 10**6), (((),) * second,) * STEPS, tied=True, adam=True, thrice=2)
    return [Round(first, [("module", used)]), Round(first, [("plain", plain)]), Round(second, [("tied", tied)])]


# --- What is expected ------------------------------------------------------------------------------

UNTOUCHED = (
    "all values are as this rank has drawn them: no broadcast reached the module. Note: keep the module that was "
    "given, not a copy, and broadcast its own tensors"
)
start = rank_0s(
    "start", lambda seen: [_values(seen.case.model(r)) for r in range(seen.world_size)], lambda seen: UNTOUCHED, {}
)


def hooks(seen: Seen) -> Fault | None:
    """In each backward pass the gradients travel between its begin and its end."""
    n_bytes = seen.case.n_bytes
    for number, (calls, after) in enumerate(zip(seen["sent"], [*seen["between"][1:], []], strict=True), 1):
        if (sent := bytes_of(calls)) >= n_bytes // 2:
            continue
        cause = "register a hook with each parameter: register_post_accumulate_grad_hook"
        if bytes_of(after, *WHOLE, *FIRST_HALF):
            cause = "the gradients travel after backward, when the next step begins; average them in hooks"
        elif sent:
            cause = "some parameters have no hook"
        elif number > 1:
            cause = "the hooks work in the first step only; register them once, and let them work in each"
            if any(map(bytes_of, seen["sent"][number:])):
                cause = "this pass was in eval mode; gradients are averaged there, too"
        expected = f"in backward pass {number}, gradients of {n_bytes} bytes leave while it runs"
        return Fault(expected, f"{sent} bytes", seen.rank, cause)
    return None


as_module = nothing(
    *("trouble", "a replica is used as its module is"),
    "call super().__init__(), keep the module itself (no copy) as an attribute, and let forward(*inputs, **kwargs) "
    "return what the module returns",
)
HINTS = {
    r"cannot register a hook on a tensor that doesn't require gradient|without requires_grad|requires_grad=False":
        "a frozen parameter gets no gradient and takes no hook: ask for requires_grad first",
    r"'NoneType' object has no attribute|NoneType": "a .grad is None: a hook of register_hook runs before .grad is "
    "filled (take register_post_accumulate_grad_hook, or change the gradient that it is given), and a frozen parameter "
    "has none, and no hook that runs",
    r"expected Variable, but hook returned": "a post-accumulate hook must return None",
    r"before Module.__init__|has no attribute '_(parameters|modules|buffers|backward_hooks|forward)":
        "call super().__init__() first",
    r"forward\(\)|_forward_unimplemented|missing the required \"forward\"": "forward passes all inputs on",
    **ALL_HINTS,
}  # fmt: skip

OWN_DDP = exercise(
    *("06.3", "Your own DDP", "MyDDP", 30),
    act=act,
    rounds=rounds,
    checks={
        "start": ("all replicas begin as rank 0's", 1, start, "module"),
        "module": ("the replica is used as its module is", 1, as_module, "module"),
        "gradients": ("backward leaves the gradients of the whole batch", 2, gradients(0), "plain"),
        "steps": ("three steps: the weights are those of one process", 1, weights, "plain"),
        "hooks": ("the gradients travel while backward runs", 2, hooks, "plain"),
        "tied": ("tied and frozen parameters, with Adam", 1, all_of(gradients(0), sent_once, weights), "tied"),
    },
    refused=READY,
    hints=HINTS,
)

# --- 06.4 `PatientDDP(module)`: what if a parameter takes part on some ranks only? -------------------
# Hooks run on those ranks alone, so a collective in each hook hangs.


def rounds_of_some(rng: Random) -> list[Round]:
    """All parameters on all ranks first; then steps that differ, with another number of ranks."""
    first, second = rng.choice(nets.WORLDS)
    used = nets.Task(24, rng.choice((5, 6, 7)), rng.randint(1, 10**6), (((0, 1, 2),) * first,) * 3, thrice=2)
    seed, (before, alone), (after, later) = rng.randint(1, 10**6), uneven(second, rng), uneven(second, rng)
    steps = (*before, ((0, 1, 2),) * second, *after)
    some = nets.Task(4, used.rows, seed, steps, blank=((1, alone), (4, later)), thrice=3)
    return [Round(first, [("used", used)]), Round(second, [("uneven", some)])]


as_own_ddp = all_of(start, gradients(0), sent_once, weights)
some, none = gradients(0, missing=False), gradients(0, missing=True)
UNUSED = exercise(
    *("06.4", "A parameter that some ranks do not use (stretch)", "PatientDDP", 25),
    act=act,
    rounds=rounds_of_some,
    checks={
        "used": ("with all parameters in use, it is the DDP of 06.3", 1, as_own_ddp, "used"),
        "some": ("a gradient that is missing on some ranks counts as zero there, and nobody hangs", 2, some, "uneven"),
        "none": ("a gradient that is missing on all ranks stays None", 1, none, "uneven"),
        "steps": ("five steps, each with other parameters: the weights are those of one process", 1, weights, "uneven"),
    },
    refused=READY,
    hints={
        "absent|cut-off|disagree|sizes; limit: waited in": "hooks "
        "run, and gradients are there, on some ranks only, so the ranks do not call the same collectives; talk to "
        "no rank in the hooks, and at the end of backward let all ranks agree on who has what. The call at the end "
        "is asked for once in each pass, by whichever hook runs first",
        r"Final callbacks can only be installed": "ask for the call at the end of backward in a parameter's hook, not "
        "in forward or in the constructor",
        r"NoneType": "the .grad of a parameter that this rank has not used is None: put zeros there if another rank "
        "used it",
        **HINTS,
    },
)
