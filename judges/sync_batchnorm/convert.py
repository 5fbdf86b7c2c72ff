"""08.4 `convert(module)`: is every BatchNorm of a model replaced, and nothing else about the model changed?

One process is enough. An answer may build new layers or turn the old ones into new ones; what counts is what the model
is, and does, afterwards. The models are in `models.py`. Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary.compare import close
from ddp_course.grading.vocabulary.expect import all_of, exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from ddp_course.parallel import SyncBatchNorm
from judges.sync_batchnorm.models import lone_layer, nested_model, tied_model, unusual_model

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ARGUMENTS = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")
STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
Case = tuple[Callable, int]  # what makes the model, and its features


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Convert a model; note what came out, and what it computes."""
    make, features = case
    torch.manual_seed(features)
    with (
        mock.patch.multiple(SyncBatchNorm, convert=_refuse, _like=_refuse),
        mock.patch.object(nn.SyncBatchNorm, "convert_sync_batchnorm", _refuse),
    ):
        return _converted(function, *make(features))


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    cause = "this exercise is to write what it does"
    raise FaultFound(Fault("an answer written by hand", "a call of a ready-made conversion", cause=cause))


def _converted(function: Callable, model: nn.Module, x: torch.Tensor) -> Note:
    before = dict(model.named_modules(remove_duplicate=False))
    old = {name: layer for name, layer in before.items() if isinstance(layer, KINDS)}
    for layer in old.values():  # other numbers than those of a new layer
        for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            if tensor is not None:
                tensor.data.uniform_(0.5, 1.5)
    twin, facts = copy.deepcopy(model), {name: _facts(layer) for name, layer in old.items()}
    state = {(name, key): getattr(layer, key) for name, layer in old.items() for key in STATE}
    result = function(model)
    if not isinstance(result, nn.Module):
        return Note(returned=type(result).__name__)
    after = {name: module for name, module in result.named_modules(remove_duplicate=False) if name in before}
    new = {name: after.get(name) for name in old}
    complete = all(isinstance(layer, SyncBatchNorm) for layer in new.values())
    return Note(
        kinds={n: f"{'torch' * isinstance(layer, nn.SyncBatchNorm)}{type(layer).__name__}" for n, layer in new.items()},
        others=[name for name, module in before.items() if name not in old and after.get(name) is not module],
        facts=[(name, facts[name], _facts(new[name])) for name in old],
        moved=[(name, key) for (name, key), tensor in state.items() if getattr(new[name], key, None) is not tensor],
        objects=len({id(layer) for layer in new.values()}),
        outputs=[plain(module(x)) for module in (twin, result)] if complete else [],
    )


def _facts(layer: nn.Module | None) -> dict:
    wanted = [parameter.requires_grad for parameter in layer.parameters()] if layer else []
    return {name: plain(getattr(layer, name, None)) for name in ARGUMENTS} | {"requires_grad": wanted}


def rounds(rng: Random) -> list[Round]:
    """A nested model and a layer alone first; then unusual arguments; then a layer in three places."""
    features = rng.randint(3, 6)
    settings = {"eps": round(rng.uniform(0.01, 0.1), 3), "momentum": round(rng.uniform(0.2, 0.9), 2)}
    unusual = partial(unusual_model, **settings)
    makers = ({"nested": nested_model, "alone": lone_layer}, {"unusual": unusual}, {"tied": tied_model})
    return [Round(1, [(n, (make, features)) for n, make in some.items()], init=False) for some in makers]


# --- What is expected ------------------------------------------------------------------------------


def _called(name: str) -> str:
    return f"layer {name!r}" if name else "the module itself"


def kinds(seen: Seen) -> Fault | None:
    """Every BatchNorm is replaced, and nothing else."""
    if seen["returned"]:
        cause = "return the module, or its replacement if it is a BatchNorm"
        return Fault("a module", seen["returned"], cause=cause)
    name, kind = next(((n, kind) for n, kind in seen["kinds"].items() if kind != "SyncBatchNorm"), ("", ""))
    other = seen["others"] and f"another {_called(seen['others'][0])}"
    return first_mistake(f"SyncBatchNorm as {_called(name)}", {
        "the module given may be a BatchNorm itself; return its replacement": not name and kind,
        "torch's own refuses CPU tensors; use SyncBatchNorm of ddp_course.parallel":
            kind == "torchSyncBatchNorm" and kind,
        "layers stand at any depth; convert the children of the children, too": "." in name and kind,
        "BatchNorm1d, BatchNorm2d and BatchNorm3d are all to be replaced": kind,
    }) or first_mistake("the other modules as they were", {
        "this is no BatchNorm; leave every other module as it is": other,
    })  # fmt: skip


def some(seen: Seen) -> Fault | None:
    """Some layer is replaced, of more than one."""
    found = seen["kinds"] or {}
    return None if len(found) == 1 or "SyncBatchNorm" in found.values() else kinds(seen)


def state(seen: Seen) -> Fault | None:
    """Parameters and buffers are the same tensors."""
    name, key = next(iter(seen["moved"]), ("", ""))
    return first_mistake(f"the same tensor as {key} of {_called(name)}", {
        "an optimizer holds the old parameters, so a copy is never trained; new.weight = old.weight keeps them":
            key in STATE[:2] and "another one",
        "a new layer starts with buffers of its own; assign the old ones: new.running_mean = old.running_mean":
            key and "another one",
    })  # fmt: skip


def facts(seen: Seen) -> Fault | None:
    """Each layer has the arguments, and the mode, of the old one."""
    wrong = ((n, key, old[key], new[key]) for n, old, new in seen["facts"] for key in old if old[key] != new[key])
    name, key, right, found = next(wrong, ("", "", 0, 0))
    return first_mistake(f"{key}={right} in {_called(name)}", {
        "a new layer is in training mode, this one was frozen in eval mode: new.train(old.training)":
            key == "training" and f"{key}={found}",
        f"give the new layer {key} of the old one": key and f"{key}={found}",
    })  # fmt: skip


def one_layer(seen: Seen) -> Fault | None:
    """A layer in three places is replaced by one."""
    fault = kinds(seen)
    if fault and not seen["returned"]:
        cause = "the same layer stands in several places; named_children and named_modules name it once, and leave the "
        return replace(fault, cause=cause + "other places as they are")
    cause = "one layer became several; remember which replacement belongs to which layer, and use it again"
    several = {cause: seen["objects"] != 1 and f"{seen['objects']} layers"}
    return fault or first_mistake("one layer in all its places", several)


def output(seen: Seen) -> Fault | None:
    """The model computes what it did before, up to float32's rounding on two ways."""
    other = not close(*seen["outputs"], tolerance=1e-4) and "another one"
    return first_mistake("the same output as before", {"the new layers lack something that the old ones had": other})


CONVERT = exercise(
    *("08.4", "Convert a model (stretch)", "convert", 20),
    act=act,
    rounds=rounds,
    checks={
        "found": ("every BatchNorm is replaced, and nothing else", 2, kinds, "nested alone"),
        "state": ("parameters and buffers stay the same tensors", 1, all_of(some, state), "nested alone"),
        "facts": ("arguments and mode stay, layer by layer", 1, all_of(kinds, facts, state, output), "unusual"),
        "tied": ("a layer in several places stays one layer", 1, all_of(one_layer, state, output), "tied"),
    },
    hints={
        r"raised RecursionError": "convert calls itself without end; go down to the children, not to the module itself",
        r"dictionary (changed size|keys changed) during iteration": "modules are replaced while they are gone through; "
        "make a list of them first",
        r"'NoneType' object has no attribute": "without affine, or without running statistics, these are None",
    },
)
