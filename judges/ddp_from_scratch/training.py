"""Wrap a model in the answer to 06.3 or 06.4, and use it, on every rank: what is sent when, and what comes of it?

The loop is the plain one. Gradients are read as soon as backward has returned; each collective is noted with its
moment. In the first step the last rank is late, so an average that nobody waited for is not there.
Read next: `own_ddp.py`, which judges by these notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_course.grading import observe
from judges.ddp_from_scratch import nets
from judges.ddp_from_scratch.causes import bytes_brought

LATE_S = 0.05


class Outer(nn.Module):
    """Has a frozen parameter and a buffer, and gives a dictionary back; used to see whether all goes through."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        torch.manual_seed(width + 100 * rank)
        self.layer = nn.Linear(width, width)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("offset", torch.randn(width))

    def forward(self, x: torch.Tensor, *, times: float = 1.0) -> dict[str, torch.Tensor]:
        return {"scores": self.layer(x) * times + self.frozen + self.offset}

    def values(self) -> dict[str, list]:
        """Return parameters and buffers as plain data."""
        return {name: tensor.tolist() for name, tensor in self.state_dict().items()}


def ddp_driver(rank: int, world_size: int, cls: Callable, task: nets.Task) -> dict:
    """Wrap a model of the rank's own, train it, and note each step."""
    model, memory, steps = task.model(rank), {}, []
    named = dict(model.named_parameters())
    with observe.Collectives() as seen:
        replica = cls(model)
        start = {name: p.detach().tolist() for name, p in named.items()}
        for step in range(len(task.uses)):
            model.zero_grad()
            loss = task.loss(replica, rank, step)
            if step == 0 and rank == world_size - 1:
                time.sleep(LATE_S)
            before = len(seen.calls)
            loss.backward()
            calls = seen.calls[before:]
            calls = [call for call in calls if call.in_backward]
            moved = {"inside": sum(call.n_bytes for call in calls), "brought": bytes_brought(calls)}
            steps.append({"gradients": nets.gradients_of(named), **moved, "late": 0, "calls": len(seen.calls)})
            nets.descend(list(named.values()), memory, task.adam)
            if step:
                steps[step - 1]["late"] = bytes_brought(seen.calls[steps[step - 1]["calls"] : before])
    return {"start": start, "steps": steps, "weights": {name: p.detach().tolist() for name, p in named.items()}}


def module_driver(rank: int, world_size: int, cls: Callable, width: int) -> dict:
    """Use the replica as a module is used; note what the module held first, and what is not as it should be."""
    model = Outer(width, rank)
    replica = cls(model)
    start = model.values()
    try:
        trouble = _trouble(replica, model, torch.ones(2, width))
    except NotImplementedError:
        raise
    except Exception as error:  # the learner's; told in one line, so that the other checks go on
        trouble = f"{type(error).__name__}: {error}"
    return {"start": start, "trouble": trouble}


def _trouble(replica: Any, model: Outer, x: torch.Tensor) -> str:
    if not isinstance(replica, nn.Module):
        return "the replica is no nn.Module"
    if {id(p) for p in replica.parameters()} != {id(p) for p in model.parameters()}:
        return "replica.parameters() does not give the module's own parameters"
    found = replica(x, times=3.0)
    if not isinstance(found, dict) or not torch.equal(found["scores"], model(x, times=3.0)["scores"]):
        return "replica(x, times=3.0) does not return what module(x, times=3.0) returns"
    kept = {name: value.clone() for name, value in replica.state_dict().items()}
    if sorted(name.split(".")[-1] for name in kept) != ["bias", "frozen", "offset", "weight"]:
        return f"replica.state_dict() holds {sorted(kept)}"
    with torch.no_grad():
        model.layer.weight.zero_()
    replica.load_state_dict(kept)
    replica.eval()
    return (
        "" if model.layer.weight.any() and not model.training else "load_state_dict or eval does not reach the module"
    )
