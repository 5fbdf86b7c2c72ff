"""What is all the state of a training run, so that it can go on as if it had never stopped?

The weights are the part that everybody saves. A run also has the optimizer's moments, the schedule's and the loss
scaler's counters, the place in the data, and on every rank four random number generators, which decide about
dropout and augmentation. Leave one out, and the resumed run is another run: often a good one, never the same.

What is equal on all ranks is taken from rank 0. The generators differ from rank to rank, so they are gathered. The
result holds tensors and plain values only, which `weights_only=True` loads.

Left out on purpose: generators of your own, such as a DataLoader's; pass their states in `extra`. Without a generator
of its own, a DataLoader draws a number from torch's whenever an epoch begins: resumed in the middle of an
epoch it begins once more, and dropout is no longer what it was.
Read next: `folder.py`; torch/nn/modules/module.py, `load_state_dict`.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.checkpoint.file import CheckpointError
from ddp_course.checkpoint.folder import place_in

PREFIX = "module."
PARTS = ("optimizer", "scheduler", "scaler", "sampler")


def capture_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    step: int = 0,
    epoch: int = 0,
    extra: dict[str, Any] | None = None,
    own: Any = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any] | None:
    """Return all that a run needs to go on, on rank 0; None on the other ranks.

    The tensors are the living ones, not copies: write them before the next step. Any number of ranks can resume from
    them: see `restore_state`.

    Args:
        model: bare or wrapped by DDP; the names are saved without the wrapper's "module." prefix.
        sampler: anything with `state_dict`; or torch's DistributedSampler, which has only an epoch.
        extra: more of your own, in tensors and plain values, the same on all ranks; found again under "extra".
        own: what each rank has of its own; found again under "own", a list by rank.
    Collective: one gather_object of the random states and `own` to rank 0, every rank of `group`.
    """
    by_rank = _gathered((rng_state(), own), group)
    if by_rank is None:
        return None
    given = _given(optimizer, scheduler, scaler, sampler)
    return {
        "model": bare(model).state_dict(),
        **{name: _state_of(part) for name, part in given.items()},
        "generators": [generators for generators, _ in by_rank],
        "own": [own for _, own in by_rank],
        "step": step,
        "epoch": epoch,
        "world_size": len(by_rank),
        "torch": torch.__version__.split("+")[0],
        "extra": extra or {},
    }


def restore_state(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """Put a captured state into a run that was built in the same way.

    Call it last before training: whatever is built afterwards may draw from the restored generators. The number of
    ranks may differ from that of the save: `ShardSampler` then continues at the same row, and the random generators
    stay as seeded.

    Returns:
        What could not be carried over, a sentence each; empty if the run goes on exactly.
    Raises:
        CheckpointError: the state holds a part that this run has not, or the other way round, or the model is
            another one.
    Collective: none; each rank restores its own. DDP need not be told: the ranks read the same values.
    """
    given = _given(optimizer, scheduler, scaler, sampler)
    _refuse_other_parts(given, state)
    load_model(model, state["model"])
    for name, part in given.items():
        _restore_part(part, state[name])
    return _restore_generators(state, *place_in(group))


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list | None:
    """Return what each rank gave, on rank 0; None on the other ranks."""
    rank, world_size = place_in(group)
    if world_size == 1:
        return [mine]
    by_rank = [None] * world_size if rank == 0 else None
    dist.gather_object(mine, by_rank, group=group, group_dst=0)
    return by_rank


def _given(*parts: Any) -> dict[str, Any]:
    return {name: part for name, part in zip(PARTS, parts, strict=True) if part is not None}


def _state_of(part: Any) -> dict[str, Any]:
    return part.state_dict() if hasattr(part, "state_dict") else {"epoch": part.epoch}


def _refuse_other_parts(given: dict[str, Any], state: dict[str, Any]) -> None:
    for name in PARTS:
        if (name in state) != (name in given):
            holds, given_here = ("one", "none") if name in state else ("none", "one")
            raise CheckpointError(
                f"{name}: the checkpoint holds {holds}, and {given_here} was given; pass the parts that were captured"
            )


def _restore_part(part: Any, state: dict[str, Any]) -> None:
    if hasattr(part, "load_state_dict"):
        part.load_state_dict(state)
    else:
        part.set_epoch(state["epoch"])


def _restore_generators(state: dict[str, Any], rank: int, world_size: int) -> list[str]:
    """Put this rank's generators back; return what could not be carried over."""
    if state["world_size"] != world_size:
        return [
            f"saved by {state['world_size']} ranks, resumed by {world_size}: the random generators belong to the old "
            "ranks and were left as this program seeded them"
        ]
    mine = state["generators"][rank]
    set_rng_state(mine)
    if ("cuda" in mine) != _uses_a_gpu():
        return [f"rank {rank}: a GPU's generator cannot go on from a CPU's, nor a CPU's from a GPU's; left as seeded"]
    return []


# --- The model, bare or wrapped --------------------------------------------------------------------


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside a wrapper such as DDP, or the module itself.

    A wrapper is known by its names: it has a `module`, and every entry of its state stands below it.
    """
    inner = getattr(model, "module", None)
    wrapped = isinstance(inner, nn.Module) and all(name.startswith(PREFIX) for name in model.state_dict())
    return inner if wrapped else model


def load_model(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load weights saved from a bare or a wrapped model into a bare or a wrapped one.

    Raises:
        CheckpointError: names or shapes differ; shows the first few. Nothing was loaded.
    """
    target = bare(model)
    wanted = target.state_dict()
    if all(name.startswith(PREFIX) for name in state) and not state.keys() <= wanted.keys():
        state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    missing, unknown = [n for n in wanted if n not in state], [n for n in state if n not in wanted]
    # What is no tensor, such as a module's extra state, has no shape; load_state_dict looks at it itself.
    shapes = [
        f"{name} is {list(state[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted
        if name in state and getattr(state[name], "shape", None) != getattr(wanted[name], "shape", None)
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    if said := "; ".join(f"{what} {_few(names)}" for what, names in faults.items() if names):
        raise CheckpointError(
            f"these weights are of another model: {said}. Build the model as the run that saved them did"
        )
    target.load_state_dict(state)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- The random number generators of one rank ------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Return the states of this process's generators: Python's, numpy's, torch's, and the current GPU's if in use."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    state = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if _uses_a_gpu():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned. Generators take their states from the CPU, wherever they were loaded."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    words = numpy_state["words"].cpu().numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and _uses_a_gpu():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _uses_a_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def checksum(model: nn.Module) -> str:
    """Return a short hash of all parameters and buffers: equal bits, equal text."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
