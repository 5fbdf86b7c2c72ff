"""10.2 `load_onto(path, model, device)`: whose names, whose device, whose code?

The files say that their tensors lay on `cuda:0`. No GPU is needed: a package registered with torch notes on which one
each storage is to land, and leaves it where it is.

Source: torch/serialization.py, `register_package` and `default_restore_location`.
Read next: `resume.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import torch
from torch import nn

from ddp_course.grading.answer.isolated import plain
from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import exercise, first_mistake
from ddp_course.grading.vocabulary.play import Note, Round, Seen
from judges.checkpointing.files import fresh_folder


def _without(lost: str, **more: torch.Tensor) -> Callable[[dict], dict]:
    return lambda state: {**{name: value for name, value in state.items() if name != lost}, **more}


# What is said of a file, by its names, and its weights.
FILES = {
    "bare": ("bare names", dict),
    "wrapped": ("names that begin with module.", lambda s: {f"module.{name}": s[name] for name in s}),
    "missing": ("encoder.0.bias is missing in the file", _without("encoder.0.bias")),
    "buffer": ("encoder.1.running_var is missing in the file", _without("encoder.1.running_var")),
    "unknown": ("the file has a tail that the model has not", _without("", tail=torch.ones(2))),
    "renamed": ("the file has a tail, but no encoder.0.bias", _without("encoder.0.bias", tail=torch.ones(2))),
    "foreign": ("all names in the file begin with model.", lambda s: {f"model.{name}": s[name] for name in s}),
}
MISFITS = ("missing", "buffer", "unknown", "renamed", "foreign")


@dataclass(frozen=True)
class Case:
    """A file, told by its names; whether it runs code, and whether it is for a model in DDP, and for a GPU."""

    folder: str
    step: int
    names: str = "bare"
    in_ddp: bool = False
    runs_code: bool = False
    gpu: bool = False

    def trap(self, rank: int) -> str:
        """Return the folder that there is when a rank has run the code in its file."""
        return f"{self.folder}/sprung-{rank}"

    def device(self, rank: int, world_size: int) -> str:
        """Return a rank's device, whose number is not the rank's."""
        return f"cuda:{(rank + 1) % world_size}" if self.gpu else "cpu"


def net() -> nn.Module:
    """Return a model with a buffer, and with `module` inside of a name, where it is not DDP's."""
    encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return nn.ModuleDict({"encoder": encoder, "head": nn.ModuleDict({"module": nn.Linear(4, 2)})})


@contextmanager
def places(tag: str | None = None, moved: list[str] | None = None) -> Iterator[list[str]]:
    """Within the block, save tensors as those of device `tag`, and note where those that are loaded are to land."""
    landed: list[str] = []
    moved = [] if moved is None else moved

    def land(storage, location):
        landed.append(location)
        return storage if location.startswith("cuda") else None

    def stay(self, *args, **kwargs):
        moved.extend([type(self).__name__] * isinstance(self, nn.Module))
        return self  # there may be no such device to go to

    registry = list(torch.serialization._package_registry)
    with mock.patch.object(torch.serialization, "_package_registry", registry):
        torch.serialization.register_package(0, lambda storage: tag, land)
        with mock.patch.object(nn.Module, "_apply", stay), mock.patch.object(torch.Tensor, "to", stay):
            yield landed


def act(function, case: Case, rank: int, world_size: int) -> Note:
    """Write a file and load it; note what comes back, what of the model differs, and where storages landed."""
    path, trap = Path(case.folder) / f"rank-{rank}.pt", case.trap(rank)
    code = type("Code", (), {"__reduce__": lambda self: (os.mkdir, (trap,))})()  # to be run by pickle
    torch.manual_seed(case.step)
    state = net().state_dict()
    state["encoder.1.running_mean"] += 3.0
    state["encoder.1.num_batches_tracked"] += case.step
    with places("cuda:0"):
        torch.save({"model": FILES[case.names][1](state), "step": code if case.runs_code else case.step}, path)
    model = nn.parallel.DistributedDataParallel(net()) if case.in_ddp else net()
    value, held = None, dict(model.named_parameters())
    moved: list[str] = []
    with places(moved=moved) as landed:
        try:
            value = plain(function(path, model, torch.device(case.device(rank, world_size))))
        except Exception:
            if not (case.gpu and landed):  # what was read shows where it lands; another check says what failed
                raise
    found = getattr(model, "module", model).state_dict()
    differ = [name for name in state if not torch.equal(found[name], state[name])]
    replaced = [name for name, p in model.named_parameters() if p is not held[name]]
    return Note(value=value, differ=differ, landed=sorted(set(landed)), replaced=replaced, moved=moved)


def rounds(rng: Random, folder: Path) -> list[Round]:
    """Load on several ranks."""
    world_size, common = rng.choice((2, 3)), (str(folder), rng.randint(10, 90))
    cases = [("names", names, in_ddp) for names, in_ddp in (("wrapped", False), ("bare", True), ("wrapped", True))]
    cases += [("strict", names, in_ddp) for names in MISFITS for in_ddp in (False, True)]
    named = [(name, Case(*common, *rest)) for name, *rest in [("plain",), *cases]]
    named += [("device", Case(*common, gpu=True)), ("code", Case(*common, runs_code=True))]
    return [Round(world_size, named, (Exception,))]


# What is in the learner's lines when a file that fits is not loaded, and why.
STORIES = {
    r"no attribute ['\"]module['\"]": "a model without DDP has no .module; look whether it has one",
    r'"ncoder\.': "lstrip takes a set of letters, and cuts off more than the prefix; take removeprefix",
    r"""["']head\.weight["']|module\.head\.weight""": "module. is cut out of the middle of a name too; only at its "
    "beginning it is DDP's: removeprefix",
    r"(?i)cuda": "the storages are sent to a GPU that is not there; give torch.load map_location=device",
}


def loaded(seen: Seen) -> Fault | None:
    """The file is in the model."""
    case, story = seen.case, seen["story"]
    expected = f"a file with {FILES[case.names][0]} into a model {'in' if case.in_ddp else 'without'} DDP: loaded"
    if story:
        cause = "cut the prefix module. off the names in the file" if case.names == "wrapped" else ""
        if case.in_ddp:
            cause = "the model in DDP wants the prefix; load into its .module, with bare names, or add the prefix"
        cause = next((words for pattern, words in STORIES.items() if re.search(pattern, story)), cause)
        return Fault(expected, report=story, cause=cause)
    return first_mistake(f"{expected}, and step {case.step} is returned", {
        "the names fit nowhere, and strict=False says nothing; make them fit, and load strictly":
            seen["differ"] and f"the model's {seen['differ'][0]} is as it was",
        "the model has other parameters now, so an optimizer that was made before would train the old ones: copy into "
        "those that are there": seen["replaced"] and f"another object as {seen['replaced'][0]}",
        "the model is on its device already; tensors that are copied into it land there": seen["moved"]
            and f"the {seen['moved'][0]} is moved",
        'return what is in the file as "step"': seen["value"] != case.step and repr(seen["value"]),
    })  # fmt: skip


def device(seen: Seen) -> Fault | None:
    """Each storage lands on this rank's device, or on the CPU."""
    if seen["error"]:
        return Fault("a file written on cuda:0 is read", report=seen["story"])
    right, landed = seen.case.device(seen.rank, seen.world_size), [note.get("landed") for note in seen.everyone]
    wrong = set(landed[seen.rank]) - {right, "cpu"} and f"it lands on {landed[seen.rank][0]}"
    return first_mistake(f"a file written on cuda:0 lands on {right}, this rank's device, or on cpu", {
        "the device is not the rank's number: on each node GPUs count from 0; use the device that is given":
            all(places == [f"cuda:{rank}"] for rank, places in enumerate(landed)) and wrong,
        "every rank loads onto the first GPU, whose memory may not hold so many copies: map_location=device":
            all(places == ["cuda:0"] for places in landed) and wrong,
        "use the device that is given: map_location=device": wrong,
    }, seen.rank)  # fmt: skip


def is_error(seen: Seen) -> Fault | None:
    """A file that does not fit, or that would run code, raises."""
    part = "a model that is loaded in part trains on with random weights, and nobody knows; load strictly"
    what = "it would run code" if seen.case.runs_code else FILES[seen.case.names][0]
    return first_mistake(f"{what}: an exception", {
        "a pickle may name any function, and it was called while the file was read; torch.load(weights_only=True)":
            seen.case.runs_code and os.path.exists(seen.case.trap(seen.rank)) and "code of the file made a folder",
        "let the error of torch.load out" if seen.case.runs_code else part: not seen["error"] and "no exception",
    }, seen.rank)  # fmt: skip


LOAD = exercise(
    "10.2",
    "Whose names, which device?",
    "load_onto",
    15,
    act=act,
    rounds=rounds,
    within=fresh_folder,
    checks={
        "plain": ("a file and a model with the same names", 1, loaded, "plain"),
        "names": ("with and without DDP, in every combination", 2, loaded, "names"),
        "device": ("each rank loads onto its own device", 1, device, "device"),
        "strict": ("names that do not fit are an error", 1, is_error, "strict"),
        "code": ("no code from the file runs", 1, is_error, "code"),
    },
    refused=(
        *("ddp_course.checkpoint.state.load_model", "ddp_course.checkpoint.file.load_checkpoint"),
        "ddp_course.checkpoint.state.restore_state",
    ),
)
