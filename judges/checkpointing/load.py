"""10.2 `load_onto(path, model, device)`: whose names, whose device, whose code?

The files say that their tensors lay on `cuda:0`. No GPU is needed: a package registered with torch notes on which one
each storage is to land, and leaves it where it is.

Source: torch/serialization.py, `register_package` and `default_restore_location`.
Read next: `resume.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.grading.exercise import Check, Exercise, Fault
from ddp_course.grading.isolated import Answer, plain
from ddp_course.launcher.failure import describe
from judges.checkpointing.files import fresh_folder

# file, model: the names in the file, and whether the model is in DDP.
PLAIN, NAMES = [("bare", False)], [("wrapped", False), ("bare", True), ("wrapped", True)]
STRICT = [("missing", False), ("unknown", False), ("missing", True), ("foreign", False)]

Outcome = dict[str, Any]


class Net(nn.Module):
    """A model with a buffer, and with `module` inside of a name, where it is not DDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.ModuleDict({"module": nn.Linear(4, 2)})

    def forward(self, x):
        return self.head["module"](self.encoder(x))


class Bomb:
    """When it is read by pickle, there is a folder more."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def load_driver(rank: int, world_size: int, function: Callable, folder: str, devices: list[str], step: int) -> Outcome:
    """Load each file into the models that it is meant for; note values, errors and where the storages landed."""
    landed: list[str] = []
    saving = rank == 0
    torch.serialization.register_package(
        0,
        lambda storage: "cuda:0" if saving else None,
        lambda storage, location: landed.append(location) or (storage if location.startswith("cuda") else None),
    )
    if rank == 0:
        _write_files(Path(folder), step)
        saving = False
    dist.barrier()
    right = torch.load(Path(folder) / "right.state", weights_only=True, map_location="cpu")

    def load(name: str, wrapped: bool, device: str = "cpu") -> Outcome:
        model = nn.parallel.DistributedDataParallel(Net()) if wrapped else Net()
        return _outcome(function, Path(folder) / f"{name}.pt", model, torch.device(device), right)

    outcomes = {key: [load(*case) for case in cases] for key, cases in (("plain", PLAIN), ("names", NAMES))}
    landed.clear()
    with ExitStack() as stack:
        for kind in (nn.Module, torch.Tensor):  # there may be no such device
            stack.enter_context(mock.patch.object(kind, "to", lambda self, *args, **kwargs: self))
        outcomes["device"] = [{**load("bare", False, devices[rank]), "landed": sorted(set(landed))}]
    outcomes["strict"] = [load(*case) for case in STRICT]
    outcomes["code"] = [load(f"bomb-{rank}", False)]
    return outcomes


def _write_files(folder: Path, step: int) -> None:
    torch.manual_seed(step)
    state = Net().state_dict()
    state["encoder.1.running_mean"] += 3.0
    torch.save(state, folder / "right.state")
    files = {
        "bare": state,
        "wrapped": {f"module.{name}": value for name, value in state.items()},
        "missing": {name: value for name, value in state.items() if name != "encoder.0.bias"},
        "unknown": {**state, "tail.weight": torch.ones(2)},
        "foreign": {f"net.{name}": value for name, value in state.items()},
    }
    for name, weights in files.items():
        torch.save({"model": weights, "step": step}, folder / f"{name}.pt")
    for rank in range(dist.get_world_size()):
        torch.save({"model": state, "step": Bomb(str(folder / f"sprung-{rank}"))}, folder / f"bomb-{rank}.pt")


def _outcome(function: Callable, path: Path, model: nn.Module, device: torch.device, right: dict) -> Outcome:
    try:
        value = function(path, model, device)
    except NotImplementedError:
        raise
    except Exception as error:
        return {"error": type(error).__name__, "story": describe(error, 0).story}
    found = getattr(model, "module", model).state_dict()
    return {"value": plain(value), "differ": [name for name in right if not torch.equal(found[name], right[name])]}


def load_judge(answer: Answer, rng: Random) -> Iterator[tuple[str, Fault | None]]:
    """Load on several ranks, whose devices are numbered otherwise than they are."""
    world_size, step = rng.choice((2, 3)), rng.randint(10, 90)
    devices = [f"cuda:{(rank + 1) % world_size}" for rank in range(world_size)]
    with fresh_folder() as folder:
        notes = answer.run(load_driver, world_size, str(folder), devices, step, init=True)
        sprung = [rank for rank in range(world_size) if (folder / f"sprung-{rank}").exists()]
    for key, cases in (("plain", PLAIN), ("names", NAMES)):
        faults = (_load_fault(case, note[key][i], step) for note in notes for i, case in enumerate(cases))
        yield key, next(filter(None, faults), None)
    yield "device", _device_fault(devices, [note["device"][0] for note in notes])
    yield (
        "strict",
        next(filter(None, (_strict_fault(case, notes[0]["strict"][i]) for i, case in enumerate(STRICT))), None),
    )
    yield "code", _code_fault(sprung, notes[0]["code"][0])


def _said(case: tuple[str, bool]) -> str:
    name, wrapped = case
    file = {"bare": "bare names", "wrapped": "names that begin with module."}.get(name, name)
    return f"a file with {file} into a model {'in DDP' if wrapped else 'without DDP'}"


def _load_fault(case: tuple[str, bool], outcome: Outcome, step: int) -> Fault | None:
    expected = f"{_said(case)}: loaded"
    if "error" in outcome:
        return Fault(expected, report=outcome["story"], cause=_error_cause(case, outcome))
    if outcome["differ"]:
        cause = "the names fit nowhere, and strict=False says nothing; make them fit, and load strictly"
        return Fault(expected, f"the model's {outcome['differ'][0]} is as it was", cause=cause)
    if outcome["value"] != step:
        return Fault(f"step {step} is returned", repr(outcome["value"]), cause='return what is in the file as "step"')
    return None


def _error_cause(case: tuple[str, bool], outcome: Outcome) -> str:
    name, wrapped = case
    story = outcome["story"]
    if "no attribute 'module'" in story or 'no attribute "module"' in story:
        return "a model without DDP has no .module; look whether it has one"
    if '"ncoder.' in story:
        return "lstrip takes a set of letters, and cuts off more than the prefix; take removeprefix"
    if '"head.weight"' in story or "'head.weight'" in story or "module.head.weight" in story:
        return "module. is cut out of the middle of a name too; only at its beginning it is DDP's: removeprefix"
    if "cuda" in story.lower():
        return "the storages are sent to a GPU that is not there; give torch.load map_location=device"
    if name == "wrapped" and not wrapped:
        return "cut the prefix module. off the names in the file"
    if wrapped:
        return "the model in DDP wants the prefix; load into its .module, with bare names, or add the prefix"
    return ""


def _device_fault(devices: list[str], outcomes: list[Outcome]) -> Fault | None:
    landed = [outcome["landed"] for outcome in outcomes]
    if any(found not in (device, "cpu") for device, places in zip(devices, landed, strict=True) for found in places):
        if all(places == [f"cuda:{rank}"] for rank, places in enumerate(landed)):
            cause = "the device is not the rank's number: on each node GPUs count from 0; use the device that is given"
        elif all(places == ["cuda:0"] for places in landed):
            cause = "every rank loads onto the first GPU, whose memory may not hold so many copies: map_location=device"
        else:
            cause = "use the device that is given: map_location=device"
        rank = next(rank for rank, device in enumerate(devices) if set(landed[rank]) - {device, "cpu"})
        expected = f"a file written on cuda:0 lands on {devices[rank]}, this rank's device, or on cpu"
        return Fault(expected, f"it lands on {landed[rank][0]}", rank, cause)
    story = next((o["story"] for o in outcomes if "error" in o and not o["landed"]), "")  # nothing was read
    return Fault("a file written on cuda:0 is read", report=story) if story else None


def _strict_fault(case: tuple[str, bool], outcome: Outcome) -> Fault | None:
    if "error" in outcome:
        return None
    what = {
        "missing": "encoder.0.bias is missing in the file",
        "unknown": "the file has a tail.weight that the model has not",
        "foreign": "all names in the file begin with net.",
    }[case[0]]
    cause = "a model that is loaded in part trains on with random weights, and nobody knows; load strictly"
    return Fault(f"{what}: an exception", "no exception", cause=cause)


def _code_fault(sprung: list[int], outcome: Outcome) -> Fault | None:
    if not sprung:
        if "error" in outcome:
            return None
        return Fault(
            "a file that would run code: an exception", "no exception", cause="let the error of torch.load out"
        )
    cause = "a pickle may name any function, and it was called while the file was read; torch.load(weights_only=True)"
    return Fault("no code of the file runs", "it made a folder", sprung[0], cause)


LOAD = Exercise(
    "10.2",
    "Whose names, which device?",
    "load_onto",
    15,
    (
        Check("plain", "a file and a model with the same names", 1),
        Check("names", "with and without DDP, in every combination", 2),
        Check("device", "each rank loads onto its own device", 1),
        Check("strict", "names that do not fit are an error", 1),
        Check("code", "no code from the file runs", 1),
    ),
    load_judge,
    refused=(
        "ddp_course.checkpoint.state.load_model",
        "ddp_course.checkpoint.file.load_checkpoint",
        "ddp_course.checkpoint.state.restore_state",
    ),
)
