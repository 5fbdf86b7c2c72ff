"""What the tests of the sharded optimizer run on ranks. Ranks import this file."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import StepLR

from ddp_course.beyond.one_process import state_bytes
from ddp_course.beyond.sharded_optimizer import ShardedOptimizer
from ddp_course.grading.vocabulary.observe import Collectives
from tests.beyond.strategies_on_ranks import network
from tests.refusals import message_of

CASES = [
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1}),  # has no state
]


def take_steps(optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """In each step, give every trainable parameter its gradients, the same on all ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
                param.grad = grad if param.requires_grad else None
        optimizer.step()


def groups_of(model: nn.Sequential, **first: float) -> list[dict]:
    """Two groups of parameters; the first with options of its own."""
    return [{"params": list(model[:4].parameters()), **first}, {"params": list(model[4:].parameters())}]


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
                take_steps(optimizer, step)
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
        optimizers.append(wrap(groups_of(model, lr=0.5), lr=0.01))
        schedules.append(StepLR(optimizers[-1], step_size=2, gamma=0.1))
    found = {}

    def go(name: str, first: int, steps: int = 3) -> None:
        same = []
        for step in range(first, first + steps):
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                take_steps(optimizer, step)
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
        take_steps(optimizer, 0)
    facts = {
        "bytes": state_bytes(optimizer),
        "calls": [(call.op, call.n_bytes) for call in seen.calls],
        "own": sum(p.numel() for p in optimizer.state),
        "lr": optimizer.param_groups[0]["betas"],
    }
    facts["early"] = message_of(optimizer.state_dict)
    optimizer.consolidate_state_dict()
    facts["gathered"] = len(optimizer.state_dict()["state"]) if rank == 0 else message_of(optimizer.state_dict)
    take_steps(optimizer, 1)
    facts["stale"] = message_of(optimizer.state_dict)
    state = torch.optim.Adam([{"params": [p]} for p in model.parameters()]).state_dict()
    facts["groups"] = message_of(lambda: optimizer.load_state_dict(state))
    facts["LBFGS"] = message_of(lambda: ShardedOptimizer(model.parameters(), torch.optim.LBFGS))
    few = nn.Linear(2, 1)  # more ranks than parameters
    take_steps(ShardedOptimizer(few.parameters(), torch.optim.Adam), 0)
    return facts


def trained_on(optimizer: torch.optim.Optimizer, model: nn.Module, middle: dict, state: dict) -> nn.Module:
    """Continue with steps 3 to 5 from a model and a state of the optimizer."""
    model.load_state_dict(middle)
    optimizer.load_state_dict(state)
    take_steps(optimizer, 3, 4, 5)
    return model


def resharded(rank: int, world_size: int) -> dict[str, bool]:
    """Save after 3 steps, load at another number of ranks, go on: the same bits as a plain run of 6 steps?"""
    plain = network()
    whole = torch.optim.Adam(groups_of(plain, lr=0.5), lr=0.1)
    take_steps(whole, 0, 1, 2)
    middle, plain_state = copy.deepcopy((plain.state_dict(), whole.state_dict()))
    take_steps(whole, 3, 4, 5)
    found, saved = {}, None
    for size in (world_size, world_size - 1):
        group = dist.new_group(list(range(world_size - size, world_size)))  # of the last ones: numbers differ
        saved = saved or _saved(group, world_size)
        if rank < world_size - size:
            continue
        for name, state in {"own": saved, "plain": plain_state}.items():
            model = network()
            optimizer = ShardedOptimizer(groups_of(model), torch.optim.Adam, group)
            same = equal(trained_on(optimizer, model, middle, state), plain)
            found[f"{name} state at {size}"] = same and optimizer.param_groups[0]["lr"] == 0.5
    model = network()
    found["by the plain optimizer"] = equal(trained_on(torch.optim.Adam(groups_of(model)), model, middle, saved), plain)
    return found


def _saved(group: dist.ProcessGroup, world_size: int) -> dict:
    """Train 3 steps sharded, gather the state on the group's last rank, and give it to all, as a file would."""
    optimizer = ShardedOptimizer(groups_of(network(), lr=0.5), torch.optim.Adam, group, lr=0.1)
    take_steps(optimizer, 0, 1, 2)
    optimizer.consolidate_state_dict(to=world_size - 1)
    box = [optimizer.state_dict() if dist.get_rank() == world_size - 1 else None]
    dist.broadcast_object_list(box, src=world_size - 1)
    return box[0]
