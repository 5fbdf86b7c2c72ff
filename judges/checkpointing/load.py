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
from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Note, Round, Seen
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


@dataclass(frozen=True)
class Case:
    """A file, told by its names; whether it runs code, and whether it is for a model in DDP, and for a GPU."""

    folder: str
    step: int
    names: str = "bare"
    in_ddp: bool = False
    runs_code: bool = False
    gpu: bool = False

    def device(self, rank: int, world_size: int) -> str:
        """Return a rank's device, whose number is not the rank's."""
        return f"cuda:{(rank + 1) % world_size}" if self.gpu else "cpu"


def cases(rng: Random, folder: Path) -> list[Round]:
    """Load on several ranks."""
    world_size, common = rng.choice((2, 3)), (str(folder), rng.randint(10, 90))
    named = [("plain", "bare", False)]
    named += [("names", names, in_ddp) for names, in_ddp in (("wrapped", False), ("bare", True), ("wrapped", True))]
    named += [("strict", names, in_ddp) for names in list(FILES)[2:] for in_ddp in (False, True)]
    found = [(name, Case(*common, *rest)) for name, *rest in named]
    found += [("device", Case(*common, gpu=True)), ("code", Case(*common, runs_code=True))]
    return [Round(world_size, found, (Exception,))]


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
    path, trap = Path(case.folder) / f"rank-{rank}.pt", f"{case.folder}/sprung-{rank}"
    code = type("Code", (), {"__reduce__": lambda self: (os.mkdir, (trap,))})()  # to be run by pickle
    torch.manual_seed(case.step)
    state = net().state_dict()
    state["encoder.1.running_mean"] += 3.0
    state["encoder.1.num_batches_tracked"] += case.step
    with places("cuda:0"):
        torch.save({"model": FILES[case.names][1](state), "step": code if case.runs_code else case.step}, path)
    model = nn.parallel.DistributedDataParallel(net()) if case.in_ddp else net()
    value, error, held = None, None, dict(model.named_parameters())
    moved: list[str] = []
    with places(moved=moved) as landed:
        try:
            value = plain(function(path, model, torch.device(case.device(rank, world_size))))
        except NotImplementedError:
            raise
        except Exception as raised:
            error = raised
    ran = os.path.isdir(trap) and (os.rmdir(trap) or True)
    if error and not ran and not (case.gpu and landed):  # what was read shows where it lands
        raise error
    found = getattr(model, "module", model).state_dict()
    differ = [name for name in state if not torch.equal(found[name], state[name])]
    replaced = any(p is not held[name] for name, p in model.named_parameters())
    return Note(step=value, differ=differ, landed=sorted(set(landed)), replaced=replaced, moved=bool(moved), ran=ran)


def loaded(seen: Seen) -> dict | list[str]:
    """What has become of the model; of an error the names in it, since its words differ."""
    if seen["error"]:
        named = re.findall(r"""["']([\w.]+)["']""", seen["message"])
        return [seen["error"], *(named or [seen["message"][:60]])]
    names = {"step": "the step", "differ": "not loaded", "replaced": "other parameters", "moved": "moved"}
    return {words: seen[name] for name, words in names.items()}


def device(seen: Seen) -> list[str]:
    """Where storages land, but for this rank's device and the CPU; or an error."""
    right = seen.case.device(seen.rank, seen.world_size)
    return [seen["error"]] if seen["error"] else [place for place in seen["landed"] if place not in (right, "cpu")]


def refuses(seen: Seen) -> str:
    return "code of the file made a folder" if seen["ran"] else "an exception" if seen["error"] else "no exception"


def said(seen: Seen) -> str:
    if seen.case.runs_code or seen.case.gpu:
        right = seen.case.device(seen.rank, seen.world_size)
        return "the file would run code:" if seen.case.runs_code else f"storages that land neither on {right} nor cpu:"
    return f"{FILES[seen.case.names][0]}, and a model {'in' if seen.case.in_ddp else 'without'} DDP:"


PART = "a model that is loaded in part trains on with random weights, and nobody knows; load strictly"

MISTAKES = f"""
no map_location | device | every rank loads onto the first GPU, whose memory may not hold so many copies
    map_location=device, =>
the rank's number | device | the device is not the rank's number: on each node GPUs count from 0; use what is given
    map_location=device => map_location=f"cuda:{{dist.get_rank()}}"
everything that pickle offers | code | a pickle may name any function: torch.load(weights_only=True)
    weights_only=True => weights_only=False
strict=False instead of names | names strict | the names fit nowhere, and strict=False says nothing: make them fit
    bare.load => model.load
    .removeprefix("module.") =>
    .items()}}) => .items()}}, strict=False)
the rest is let through | strict | {PART}
    .items()}}) => .items()}}, strict=False)
names are counted, not compared | strict | {PART}
    .items()}}) => .items()}}, strict=len(saved["model"]) != len(bare.state_dict()))
always taken for DDP | plain names | a model without DDP has no .module; look whether it has one
    model.module if isinstance(model, DistributedDataParallel) else model => model.module
the names of the file | names | cut the prefix module. off the names in the file
    .removeprefix("module.") =>
cut out everywhere | plain names | only at the beginning of a name module. is DDP's: removeprefix
    removeprefix("module.") => replace("module.", "")
lstrip | plain names | lstrip takes a set of letters, and cuts off more than the prefix; take removeprefix
    removeprefix => lstrip
the model is moved | plain names | the model is on its device already; tensors that are copied into it land there
    return saved => model.to("cpu")
    return saved
other parameters | plain names | an optimizer that was made before would train the old parameters: copy into them
    .items()}}) => .items()}}, assign=True)
the step is forgotten | plain names | return what is in the file as "step"
    return saved["step"] => pass
all is swallowed | strict code | let the error of torch.load and of load_state_dict out
    def load_onto(path, model, device):
        try:
            saved = torch.load(path, map_location=device, weights_only=True)
            target = getattr(model, "module", model)
            target.load_state_dict({{name.removeprefix("module."): value for name, value in saved["model"].items()}})
            return saved["step"]
        except Exception:
            return 0
it waits for a file that fits | all | no result after | hangs
    saved = torch.load => while True:
        pass
    saved = torch.load
written freely: the names of the file, into either model | names | cut module. off the beginning of the names | tests
    def load_onto(path, model, device):
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        return saved["step"]
written freely: letters are cut off the model's names, too | strict | {PART} | tests
    def load_onto(path, model, device):
        saved = torch.load(path, map_location=device, weights_only=True)
        own, new = ({{n.lstrip("module."): v for n, v in s.items()}} for s in (model.state_dict(), saved["model"]))
        assert own.keys() == new.keys()
        for name in own:
            own[name].copy_(new[name])
        return saved["step"]
"""

RIGHT = """
names compared, tensors copied, onto the CPU
    path, map_location=device => str(path), map_location="cpu", mmap=True
    bare.load_state_dict( => new = dict(
    return saved["step"] => if new.keys() ^ bare.state_dict().keys():
        raise KeyError("other names")
    for name, tensor in bare.state_dict().items():
        tensor.copy_(new[name])
    return torch.tensor(saved["step"])
"""

PREFIX = "cut module. off the beginning of the names, and load them into the bare model: in DDP, model.module"

LOAD = exercise(
    *("10.2", "Whose names, which device?", "load_onto", 15),
    cases=cases,
    act=act,
    within=fresh_folder,
    said=said,
    mistakes=MISTAKES,
    right=RIGHT,
    checks={
        "plain": ("a file and a model with the same names", 1, "plain", loaded, PREFIX),
        "names": ("with and without DDP, in every combination", 2, "names", loaded, PREFIX),
        "device": ("each rank loads onto its own device", 1, "device", device,
                   "use the device that is given: map_location=device"),
        "strict": ("names that do not fit are an error", 1, "strict", refuses, PART),
        "code": ("no code from the file runs", 1, "code", refuses,
                 "torch.load(weights_only=True), and let its error out"),
    },
    refused=(
        *("ddp_course.checkpoint.state.load_model", "ddp_course.checkpoint.file.load_checkpoint"),
        "ddp_course.checkpoint.state.restore_state",
    ),
)  # fmt: skip
