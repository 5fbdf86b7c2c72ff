"""What does a rank's program do with rows, gradients, weights, files and prints, while it runs?

Before the learner's first line, `Watch` puts itself between the program and torch: at the loader, the sampler, the
forward of the outermost module, each gradient, the optimizer's step, `torch.save` and `load`, `open` and `print`. It
changes nothing but two things that real jobs have too: rank 0's save takes a moment, and no wait is longer than the
limit. What it sees goes to a file, a JSON object a line; `compare.py` reads the files of all ranks.

Tensors are noted as sketches: their inner products with fixed random vectors. Sketches are linear, so the mean of the
ranks' sketches is the sketch of the mean, and nothing has to be sent while the program runs.

Read next: `compare.py`.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import io
import json
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, _utils, dataloader

SKETCHES = 3  # numbers for each tensor; one may be blind by chance
MOST_ROWS = 20_000  # of a rank, in one run
SAVE_TAKES_S = 0.4  # rank 0's, so that whoever does not wait for it is seen
_OPEN = builtins.open


class Watch:
    """The eyes of one rank.

    Args:
        script: the learner's file; lines are told in it.
        folder: of the notes of all ranks.
        limit_s: the longest wait that a group may have.
        die_after: end this job by SIGKILL this many steps after its first save; None for never.
    """

    def __init__(self, script: str, folder: str, rank: int, limit_s: float, die_after: int | None = None):
        self.script, self.rank, self.limit_s, self.die_after = script, rank, limit_s, die_after
        self.path = f"{folder}/rank{rank}"
        self.notes = _OPEN(f"{self.path}.jsonl", "w")  # noqa: SIM115  (lives as long as the rank)
        self.pid, self.steps, self.rows, self.depth, self.saved_at = os.getpid(), 0, 0, 0, None
        self.local: dict[int, torch.Tensor] = {}  # what this rank's rows contributed, by parameter
        self.known: set[int] = set()
        self.meeting = {
            name: value for name, value in os.environ.items() if name.startswith(("MASTER_", "TORCHELASTIC_"))
        }
        self.norms: set[str] = set()
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def note(self, what: str, **facts: Any) -> None:
        if os.getpid() == self.pid:
            self.notes.write(json.dumps({"what": what, "line": self.line(), **facts}) + "\n")
            self.notes.flush()

    def line(self) -> int | None:
        """The innermost line of the learner's file in this thread."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        return frame.f_lineno if frame else None

    def install(self) -> None:
        """Put the eyes everywhere. Once, in a process that ends with the program."""
        around(dist, "init_process_group", self.at_group)
        around(torch.distributed.distributed_c10d, "init_process_group", self.at_group)
        around(DistributedSampler, "__iter__", self.at_sampler)
        around(DataLoader, "__init__", self.at_loader_made)
        around(dataloader._BaseDataLoaderIter, "__next__", self.at_loader)
        for fetcher in (_utils.fetch._MapDatasetFetcher, _utils.fetch._IterableDatasetFetcher):
            around(fetcher, "fetch", self.at_fetch)
        around(torch.optim.Optimizer, "add_param_group", self.at_parameters)
        around(torch.optim.Optimizer, "zero_grad", self.at_zero)
        around(nn.Module, "zero_grad", self.at_zero)
        around(nn.Module, "load_state_dict", self.at_load_state)
        around(nn.parallel.DistributedDataParallel, "__init__", self.at_wrapping)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            around(nn.utils, name, self.at_clip)
        around(torch, "save", self.at_save)
        around(torch, "load", self.at_load)
        around(builtins, "open", self.at_open)
        around(builtins, "print", self.at_print)
        nn.modules.module.register_module_forward_pre_hook(self.before_forward)
        nn.modules.module.register_module_forward_hook(self.after_forward, always_call=True)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)

    # --- the group ----------------------------------------------------------------------------------

    def at_group(self, call: Callable, *args: Any, **kwargs: Any) -> None:
        kwargs["timeout"] = min(timedelta(seconds=self.limit_s), kwargs.get("timeout") or timedelta(days=1))
        if str(kwargs.get("init_method", "")).startswith("tcp:"):
            kwargs["init_method"] = "env://"
        os.environ.update(
            self.meeting
        )  # a program that starts its ranks itself has chosen a port, on each rank another
        self.note("group")
        call(*args, **kwargs)

    # --- rows ---------------------------------------------------------------------------------------

    def at_sampler(self, call: Callable, sampler: DistributedSampler) -> Iterator[int]:
        padded = 0 if sampler.drop_last else sampler.total_size - len(sampler.dataset)
        self.note("sampler", id=id(sampler), epoch=sampler.epoch, shuffle=sampler.shuffle, padded=padded,
                  training=self.trains())  # fmt: skip
        return call(sampler)

    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(module.training for module in self.models)

    def at_loader_made(self, call: Callable, loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        call(loader, *args, **kwargs)
        self.note("loader", workers=loader.num_workers, batch=loader.batch_size)

    def at_loader(self, call: Callable, batches: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(batches)
        finally:
            self.note("waited", since=began, seconds=time.perf_counter() - began)

    def at_fetch(self, call: Callable, fetcher: Any, index: Any) -> Any:
        """Whether reading rows draws random numbers, and from which state; in a worker, this is the worker."""
        before = generators()
        try:
            return call(fetcher, index)
        finally:
            drawn = {name: state for name, state in before.items() if state != generators()[name]}
            if drawn:
                worker = torch.utils.data.get_worker_info()
                rows = fetcher.dataset
                while hasattr(rows, "dataset"):
                    rows = rows.dataset
                code = getattr(type(rows), "__getitem__", None) or getattr(type(rows), "__iter__", None)
                line = code.__code__.co_firstlineno if hasattr(code, "__code__") else None
                with _OPEN(f"{self.path}.{os.getpid()}.draws", "a") as notes:
                    fact = {"worker": worker.id if worker else None, "drawn": drawn, "line": line}
                    notes.write(json.dumps({"what": "drew", "rank": self.rank, **fact}) + "\n")

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        self.depth += 1
        if self.depth != 1:
            return
        self.models.add(module)
        given = [each for each in inputs if isinstance(each, torch.Tensor) and each.dim() > 1]
        if given and self.rows < MOST_ROWS:
            rows = row_sketches(given[0])
            self.rows += len(rows)
            trains = module.training and torch.is_grad_enabled()
            learns = any(parameter.requires_grad for parameter in module.parameters())
            self.note("forward", training=trains and learns, rows=rows, module=type(module).__name__)
        if module.training and torch.is_grad_enabled():
            self._look_at_norms(module, len(given[0]) if given else 0)

    def _look_at_norms(self, module: nn.Module, rows: int) -> None:
        for name, each in module.named_modules():
            local = isinstance(each, nn.modules.batchnorm._BatchNorm) and not isinstance(each, nn.SyncBatchNorm)
            if local and each.training and name not in self.norms:
                self.norms.add(name)
                self.note("batchnorm", name=name, rows=rows)

    def after_forward(self, *_: Any) -> None:
        self.depth -= 1

    # --- gradients and weights ----------------------------------------------------------------------

    def at_wrapping(self, call: Callable, replica: nn.Module, *args: Any, **kwargs: Any) -> None:
        call(replica, *args, **kwargs)
        self.note("wrapped", unused=bool(kwargs.get("find_unused_parameters")))

    def at_parameters(self, call: Callable, optimizer: torch.optim.Optimizer, group: dict) -> None:
        call(optimizer, group)
        for parameter in optimizer.param_groups[-1]["params"]:
            if id(parameter) not in self.known and parameter.requires_grad:
                self.known.add(id(parameter))
                parameter.register_hook(functools.partial(self._contributed, weakref.ref(parameter)))

    def _contributed(self, of: weakref.ref, gradient: torch.Tensor) -> None:
        parameter = of()
        if parameter.grad is None:  # what came before has been thrown away
            self.local.pop(id(parameter), None)
        sketch = sketched([gradient], seed=gradient.numel())
        self.local[id(parameter)] = self.local.get(id(parameter), 0) + sketch

    def at_zero(self, call: Callable, owner: Any, *args: Any, **kwargs: Any) -> None:
        call(owner, *args, **kwargs)
        groups = (
            [list(owner.parameters())] if isinstance(owner, nn.Module) else [g["params"] for g in owner.param_groups]
        )
        for parameter in (each for group in groups for each in group):
            self.local.pop(id(parameter), None)

    def at_clip(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Clipping scales what is compared, so look before it."""
        parameters = args[0] if args else kwargs["parameters"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.note("gradients", **self._gradients(parameters), unseen=False)
        answer = call(parameters, *args[1:], **{k: v for k, v in kwargs.items() if k != "parameters"})
        for parameter in parameters:
            if self.local.pop(id(parameter), None) is not None:  # what happens to it from here on is seen at the step
                self.local[id(parameter)] = sketched([parameter.grad], seed=parameter.numel())
        return answer

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> dict:
        seen = [each for each in parameters if each.grad is not None and id(each) in self.local]
        found = sum((sketched([each.grad], seed=each.numel()) for each in seen), torch.zeros(SKETCHES))
        local = sum((self.local[id(each)] for each in seen), torch.zeros(SKETCHES))
        idle = sum(1 for each in parameters if each.requires_grad and id(each) not in self.local)
        return {"found": found.tolist(), "local": local.tolist(), "count": len(seen), "idle": idle}

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        scale = optimizer.param_groups[0]["lr"]
        gradients = self._gradients(parameters)
        if gradients["count"]:
            self.note("gradients", **gradients, unseen=False)
        for parameter in parameters:
            self.local.pop(id(parameter), None)
        self.note(
            "weights", which=id(optimizer), step=self.steps, sketch=weights(parameters), rate=float(scale), at="before"
        )

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.note("weights", which=id(optimizer), step=self.steps, sketch=weights(parameters), at="after",
                  clock=time.perf_counter())  # fmt: skip
        if self.die_after is not None and self.saved_at is not None and self.steps >= self.saved_at + self.die_after:
            self.note("dies")
            os.kill(os.getpid(), 9)

    # --- files and prints ---------------------------------------------------------------------------

    def at_save(self, call: Callable, what: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):  # into memory, as object collectives do
            return call(what, file, *args, **kwargs)
        path = str(file)
        self.note("saving", path=path, clock=time.monotonic(), prefixed=prefixed(what))
        if self.rank == 0:
            time.sleep(SAVE_TAKES_S)
        call(what, file, *args, **kwargs)
        self.note("saved", path=path, clock=time.monotonic())
        self.saved_at = self.steps if self.saved_at is None else self.saved_at

    def at_load(self, call: Callable, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            self.note("loading", path=str(file), clock=time.monotonic(), there=os.path.exists(file))
        return call(file, *args, **kwargs)

    def at_load_state(self, call: Callable, module: nn.Module, state: dict, *args: Any, **kwargs: Any) -> Any:
        answer = call(module, state, *args, **kwargs)
        lost = [name for name in (*answer.missing_keys, *answer.unexpected_keys)]
        self.note("loaded", lost=len(lost), prefix=any(name.startswith("module.") for name in lost), of=len(state))
        return answer

    def at_open(self, call: Callable, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> io.IOBase:
        if self.line() and isinstance(file, str | os.PathLike) and set(mode) & set("wax"):
            self.note("writes", path=os.path.abspath(file))
        return call(file, mode, *args, **kwargs)

    def at_print(self, call: Callable, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("file") in (None, sys.stdout, sys.stderr):
            self.note("prints", text=" ".join(map(str, args))[:200])
        call(*args, **kwargs)


def around(owner: Any, name: str, seen: Callable) -> None:
    """Have `seen(call, *args)` stand in for an attribute; it makes the call."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return seen(call, *args, **kwargs)

    setattr(owner, name, stand_in)


@functools.lru_cache(maxsize=256)
def _vectors(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SKETCHES, size, generator=generator, dtype=torch.float64)


def sketched(tensors: Iterable[torch.Tensor], seed: int) -> torch.Tensor:
    """Return inner products with fixed random vectors, in double precision."""
    total = torch.zeros(SKETCHES, dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for each in tensors:
            dense = each.detach().to_dense() if each.is_sparse else each.detach()
            total += _vectors(each.numel(), seed) @ dense.reshape(-1).to("cpu", torch.float64)
    return total


def weights(parameters: list[torch.Tensor]) -> list[float]:
    return sum((sketched([each], seed=each.numel() + index) for index, each in enumerate(parameters)),
               torch.zeros(SKETCHES)).tolist()  # fmt: skip


def row_sketches(tensor: torch.Tensor) -> list[float]:
    """One number a row: equal rows have equal numbers."""
    flat = tensor.detach().reshape(len(tensor), -1).to("cpu", torch.float64)
    return [float(f"{number:.9g}") for number in (flat * _vectors(flat.shape[1], 1)[0]).sum(dim=1).tolist()]


def prefixed(state: Any) -> bool:
    """Whether names in a saved state begin with `module.`."""
    if not isinstance(state, dict):
        return False
    return any(str(k).startswith("module.") for k in state) or any(
        prefixed(v) for v in state.values() if isinstance(v, dict)
    )


def generators() -> dict[str, str]:
    """The state of each generator that programs draw from, as a short word."""
    kind, keys, position, *rest = np.random.get_state()
    return {
        "torch": _word(torch.get_rng_state().numpy().tobytes()),
        "numpy": _word(keys.tobytes() + repr((position, rest)).encode()),
        "random": _word(repr(random.getstate()).encode()),
    }


def _word(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
