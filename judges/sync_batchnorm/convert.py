"""08.4 `convert(module)`: is every BatchNorm of a model replaced, and nothing else about the model changed?

One process is enough. An answer may build new layers or turn the old ones into new ones; what counts is what the model
is, and does, afterwards. The models are in `models.py`. Read next: `grading/checking.py`, which prints what is found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_course.grading.compare import close
from ddp_course.grading.exercise import Check, Exercise, Fault, FaultFound
from ddp_course.grading.isolated import Answer, plain
from ddp_course.parallel import SyncBatchNorm
from judges.sync_batchnorm.models import lone_layer, nested_model, tied_model, unusual_model

ARGUMENTS = ("num_features", "eps", "momentum", "affine", "track_running_stats")
STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


# --- On the rank -------------------------------------------------------------------------------------


def convert_driver(rank: int, world_size: int, function: Callable, makers: list, features: int, settings: dict) -> list:
    """Convert one model of each maker; note what came out, and what it computes."""
    torch.manual_seed(features)
    with _no_ready_made():
        return [_converted(function, *make(features, settings)) for make in makers]


@contextmanager
def _no_ready_made() -> Iterator[None]:
    with (
        mock.patch.multiple(SyncBatchNorm, convert=_refuse, _like=_refuse),
        mock.patch.object(nn.SyncBatchNorm, "convert_sync_batchnorm", _refuse),
    ):
        yield


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    cause = "this exercise is to write what it does"
    raise FaultFound(Fault("an answer written by hand", "a call of a ready-made conversion", cause=cause))


def _converted(function: Callable, model: nn.Module, x: torch.Tensor) -> dict:
    before = dict(model.named_modules(remove_duplicate=False))
    old = {name: layer for name, layer in before.items() if isinstance(layer, _BatchNorm)}
    for layer in old.values():
        _spoil(layer)
    twin = copy.deepcopy(model)
    state = {name: {key: getattr(layer, key) for key in STATE} for name, layer in old.items()}
    facts = {name: _facts(layer) for name, layer in old.items()}
    result = function(model)
    if not isinstance(result, nn.Module):
        return {"returned": type(result).__name__}
    after = {name: module for name, module in result.named_modules(remove_duplicate=False) if name in before}
    new = {name: after.get(name) for name in old}
    complete = all(isinstance(layer, SyncBatchNorm) for layer in new.values())
    return {
        "kinds": {name: _kind(layer) for name, layer in new.items()},
        "others": [name for name, module in before.items() if name not in old and after.get(name) is not module],
        "facts": [(name, facts[name], _facts(new[name])) for name in old],
        "moved": [
            (name, key) for name in old for key in STATE if getattr(new[name], key, None) is not state[name][key]
        ],
        "objects": len({id(layer) for layer in new.values()}),
        "outputs": [plain(module(x)) for module in (twin, result)] if complete else [],
    }


@torch.no_grad()
def _spoil(layer: _BatchNorm) -> None:
    """Give the layer other numbers than those of a new one."""
    for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        if tensor is not None:
            tensor.copy_(torch.rand_like(tensor) + 0.5)


def _kind(layer: nn.Module | None) -> str:
    return "torch's SyncBatchNorm" if isinstance(layer, nn.SyncBatchNorm) else type(layer).__name__


def _facts(layer: nn.Module | None) -> dict:
    return {name: plain(getattr(layer, name, None)) for name in (*ARGUMENTS, "training")}


# --- The judge ---------------------------------------------------------------------------------------


def convert_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """A nested model and a layer alone first; then unusual arguments; then a layer in three places."""
    features = rng.randint(3, 6)
    settings = {"eps": round(rng.uniform(0.01, 0.1), 3), "momentum": round(rng.uniform(0.2, 0.9), 2)}
    nested, alone = answer.run(convert_driver, 1, [nested_model, lone_layer], features, settings)[0]
    yield "found", _kind_fault(nested) or _kind_fault(alone)
    yield "state", _nothing_new(nested) or _state_fault(nested) or _state_fault(alone)
    unusual = answer.run(convert_driver, 1, [unusual_model], features, settings)[0][0]
    yield "facts", _kind_fault(unusual) or _facts_fault(unusual) or _state_fault(unusual) or _output_fault(unusual)
    tied = answer.run(convert_driver, 1, [tied_model], features, settings)[0][0]
    yield "tied", _tied_fault(tied) or _output_fault(tied)


def _kind_fault(note: dict) -> Fault | None:
    if "returned" in note:
        return Fault("a module", note["returned"], cause="return the module, or its replacement if it is a BatchNorm")
    for name, kind in note["kinds"].items():
        if kind == "SyncBatchNorm":
            continue
        if not name:
            cause = "the module given may be a BatchNorm itself; return its replacement"
        elif kind == "torch's SyncBatchNorm":
            cause = "torch's own refuses CPU tensors; use SyncBatchNorm of ddp_course.parallel"
        elif "." in name:
            cause = "layers stand at any depth; convert the children of the children, too"
        else:
            cause = "BatchNorm1d, BatchNorm2d and BatchNorm3d are all to be replaced"
        return Fault(f"SyncBatchNorm as {_called(name)}", kind, cause=cause)
    if not note["others"]:
        return None
    cause = "this is no BatchNorm; leave every other module as it is"
    return Fault("the other modules as they were", f"another {_called(note['others'][0])}", cause=cause)


def _nothing_new(note: dict) -> Fault | None:
    return None if "SyncBatchNorm" in note.get("kinds", {}).values() else _kind_fault(note)


def _state_fault(note: dict) -> Fault | None:
    """Look whether parameters and buffers are the same tensors."""
    if not note.get("moved"):
        return None
    name, key = note["moved"][0]
    cause = (
        "an optimizer holds the old parameters, so a copy is never trained; new.weight = old.weight keeps the tensor"
    )
    if key not in ("weight", "bias"):
        cause = "a new layer starts with buffers of its own; assign the old ones: new.running_mean = old.running_mean"
    return Fault(f"the same tensor as {key} of {_called(name)}", "another one", cause=cause)


def _facts_fault(note: dict) -> Fault | None:
    for name, before, after in note["facts"]:
        for key, value in before.items():
            if after[key] != value:
                cause = f"give the new layer {key} of the old one"
                if key == "training":
                    cause = "a new layer is in training mode, this one was frozen in eval mode: new.train(old.training)"
                return Fault(f"{key}={value} in {_called(name)}", f"{key}={after[key]}", cause=cause)
    return None


def _tied_fault(note: dict) -> Fault | None:
    if fault := _kind_fault(note):
        cause = (
            "the same layer stands in several places; named_children and named_modules name it once, and leave the "
            "other places as they are"
        )
        return Fault(fault.expected, fault.found, cause=fault.cause if "returned" in note else cause)
    if note["objects"] == 1:
        return _state_fault(note)
    cause = "one layer became several; remember which replacement belongs to which layer, and use it again"
    return Fault("one layer in all its places", f"{note['objects']} layers", cause=cause)


def _output_fault(note: dict) -> Fault | None:
    right, found = note["outputs"]
    if close(found, right, tolerance=1e-4):  # float32, computed by two ways
        return None
    return Fault(
        "the same output as before", "another one", cause="the new layers lack something that the old ones had"
    )


def _called(name: str) -> str:
    return f"layer {name!r}" if name else "the module itself"


CONVERT = Exercise(
    "08.4",
    "Convert a model (stretch)",
    "convert",
    20,
    (
        Check("found", "every BatchNorm is replaced, and nothing else", 2),
        Check("state", "parameters and buffers stay the same tensors", 1),
        Check("facts", "arguments and mode stay, layer by layer", 1),
        Check("tied", "a layer in several places stays one layer", 1),
    ),
    convert_judge,
    hints=(
        (
            r"raised RecursionError",
            "convert calls itself without end; go down to the children, not to the module itself",
        ),
        (
            r"dictionary (changed size|keys changed) during iteration",
            "modules are replaced while they are gone through; make a list of them first",
        ),
        (r"'NoneType' object has no attribute", "without affine, or without running statistics, these are None"),
    ),
)
