"""What the tests of the sharded optimizer run on ranks. Ranks import this file."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import StepLR

from ddp_course.beyond.one_process import state_bytes
from ddp_course.beyond.sharded_optimizer import ShardedOptimizer
from ddp_course.grading.observe import Collectives
from tests.beyond.strategies_on_ranks import network

CASES = [
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1}),  # has no state
]


def take_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give every trainable parameter the gradients of this step, the same on all ranks, and step."""
    generator = torch.Generator().manual_seed(step)
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
            param.grad = grad if param.requires_grad else None
    optimizer.step()


def equal(one: nn.Module, two: nn.Module) -> bool:
    """Whether two models have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def same_bits(rank: int, world_size: int) -> dict[str, bool]:
    """Each optimizer sharded by us, by torch, and plain: the same parameters after each of 4 steps?"""
    found = {}
    for number, (optimizer_class, options) in enumerate(CASES):
        models = [network() for _ in range(3)]
        plain = optimizer_class(models[0].parameters(), **options)
        ours = ShardedOptimizer(models[1].parameters(), optimizer_class, **options)
        theirs = ZeroRedundancyOptimizer(models[2].parameters(), optimizer_class, **options)
        same = []
        for step in range(4):
            for optimizer in (plain, ours, theirs):
                take_step(optimizer, step)
            same.append(equal(models[0], models[1]) and equal(models[0], models[2]))
        found[f"{number} {optimizer_class.__name__}"] = all(same) and not equal(models[0], network())
    return found


def awkward(rank: int, world_size: int) -> dict[str, bool]:
    """Groups, a schedule, frozen parameters, a group that comes later, two dtypes, a closure: still the same bits?"""
    models, optimizers, schedules = [network(), network()], [], []
    later = [nn.Linear(3, 3).double() for _ in models]
    later[1].load_state_dict(later[0].state_dict())
    for part in later:
        dist.broadcast(part.weight.detach(), 0)
        dist.broadcast(part.bias.detach(), 0)
    for model, wrap in zip(models, (lambda groups, **o: torch.optim.Adam(groups, **o), _sharded), strict=True):
        model[2].requires_grad_(False)
        model[6].float()
        groups = [{"params": model[:4].parameters(), "lr": 0.5}, {"params": list(model[4:].parameters())}]
        optimizers.append(wrap(groups, lr=0.01))
        schedules.append(StepLR(optimizers[-1], step_size=2, gamma=0.1))
    found = {}

    def go(name: str, first: int, steps: int = 3) -> None:
        same = []
        for step in range(first, first + steps):
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                take_step(optimizer, step)
                schedule.step()
            same.append(equal(*models) and equal(*later))
        found[name] = all(same)

    go("groups and a schedule", 0)
    for model, optimizer, part in zip(models, optimizers, later, strict=True):
        model[2].requires_grad_(True)
        model[0].requires_grad_(False)
        model[0].weight.grad = torch.ones_like(model[0].weight) if optimizer is optimizers[1] else None  # left over
        optimizer.add_param_group({"params": part.parameters(), "lr": 0.3})
    go("thawed, frozen, added", 3)
    found["rates"] = [g["lr"] for g in optimizers[0].param_groups] == [g["lr"] for g in optimizers[1].param_groups]
    before = models[1][0].weight.clone()
    models[1][0].weight.grad = torch.ones_like(before)
    optimizers[1].step()
    found["frozen is left alone"] = torch.equal(before, models[1][0].weight)
    loss = optimizers[1].step(lambda: models[1][2].weight.square().sum())
    found["closure"] = loss.requires_grad
    return found


def _sharded(groups: list, **options: float) -> ShardedOptimizer:
    return ShardedOptimizer(groups, torch.optim.Adam, **options)


def facts(rank: int, world_size: int) -> dict:
    """State in bytes, collectives of a step, and what is said to mistakes."""
    model = network()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with Collectives() as seen:
        take_step(optimizer, 0)
    facts = {
        "bytes": state_bytes(optimizer),
        "calls": [(call.op, call.n_bytes) for call in seen.calls],
        "own": sum(p.numel() for p in optimizer.state),
        "lr": optimizer.param_groups[0]["betas"],
    }
    facts["early"] = _refusal(optimizer)
    optimizer.consolidate_state_dict()
    facts["gathered"] = len(optimizer.state_dict()["state"]) if rank == 0 else _refusal(optimizer)
    take_step(optimizer, 1)
    facts["stale"] = _refusal(optimizer)
    state = torch.optim.Adam([{"params": [p]} for p in model.parameters()]).state_dict()
    for name, attempt in {
        "groups": lambda: optimizer.load_state_dict(state),
        "LBFGS": lambda: ShardedOptimizer(model.parameters(), torch.optim.LBFGS),
    }.items():
        try:
            attempt()
        except ValueError as error:
            facts[name] = str(error)
    few = nn.Linear(2, 1)  # more ranks than parameters
    take_step(ShardedOptimizer(few.parameters(), torch.optim.Adam), 0)
    return facts


def _refusal(optimizer: ShardedOptimizer) -> str:
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        return str(error)
    return ""


def resharded(rank: int, world_size: int) -> dict[str, bool]:
    """Save after 3 steps, load at another number of ranks, go on: the same bits as a plain run of 6 steps?"""
    plain = network()
    whole = torch.optim.Adam(
        [{"params": plain[:4].parameters(), "lr": 0.5}, {"params": plain[4:].parameters()}], lr=0.1
    )
    for step in range(3):
        take_step(whole, step)
    plain_state = {"state": dict(whole.state_dict()["state"]), "param_groups": whole.state_dict()["param_groups"]}
    plain_state = _copied(plain_state)
    middle = {name: value.clone() for name, value in plain.state_dict().items()}
    for step in range(3, 6):
        take_step(whole, step)
    found, saved = {}, None
    for size in (world_size, world_size - 1):
        group = dist.new_group(list(range(world_size - size, world_size)))  # of the last ones: numbers differ
        saved = saved or _saved(group, world_size)
        if rank < world_size - size:
            continue
        for name, state in {"own": saved, "plain": plain_state}.items():
            model = network()
            model.load_state_dict(middle)
            groups = [{"params": model[:4].parameters()}, {"params": model[4:].parameters()}]
            optimizer = ShardedOptimizer(groups, torch.optim.Adam, group)
            optimizer.load_state_dict(state)
            for step in range(3, 6):
                take_step(optimizer, step)
            found[f"{name} state at {size}"] = equal(model, plain) and optimizer.param_groups[0]["lr"] == 0.5
    model = network()
    model.load_state_dict(middle)
    back = torch.optim.Adam([{"params": model[:4].parameters()}, {"params": model[4:].parameters()}])
    back.load_state_dict(saved)
    for step in range(3, 6):
        take_step(back, step)
    found["by the plain optimizer"] = equal(model, plain)
    return found


def _saved(group: dist.ProcessGroup, world_size: int) -> dict:
    """Train 3 steps sharded, gather the state on the group's last rank, and give it to all, as a file would."""
    model = network()
    groups = [{"params": model[:4].parameters(), "lr": 0.5}, {"params": model[4:].parameters()}]
    optimizer = ShardedOptimizer(groups, torch.optim.Adam, group, lr=0.1)
    for step in range(3):
        take_step(optimizer, step)
    optimizer.consolidate_state_dict(to=world_size - 1)
    box = [optimizer.state_dict() if dist.get_rank() == world_size - 1 else None]
    dist.broadcast_object_list(box, src=world_size - 1)
    return box[0]


def _copied(state: dict) -> dict:
    return {
        "state": {n: {k: v.clone() for k, v in values.items()} for n, values in state["state"].items()},
        "param_groups": state["param_groups"],
    }
