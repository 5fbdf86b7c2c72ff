"""Why should every rank keep the same optimizer state?

It need not. Averaged gradients are equal on all ranks, so each rank can step only its own share of the parameters, and
keep the state of that share alone. Then it sends the new values to the others. The result has the same bits as the
plain optimizer's, and Adam's two moments take 1/W of the memory: this is the first stage of ZeRO.

Whole parameters are dealt out. So every optimizer that treats each parameter by itself can be sharded, also one that
needs whole matrices. One huge parameter stays on one rank; cutting into it is what `fully_sharded.py` does.

Left out on purpose: gradients kept by their owner alone (ZeRO-2), and sending while the next share is stepped.
Read next: `fully_sharded.py`; torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_course.beyond.one_process import Trained, bytes_held, my_rows, whole_parameters
from ddp_course.groups import my_device
from ddp_course.parallel.ddp import BucketedDDP

# --- Pure: who owns what -----------------------------------------------------------------------------


def deal(sizes: Sequence[int], world_size: int, loads: Sequence[int] | None = None) -> list[int]:
    """Return an owner for each size, so that the ranks' totals are nearly equal.

    The largest goes first, each to the rank that has least. The fullest rank then has at most 4/3 of the best possible.

    Args:
        sizes: elements of each parameter.
        loads: what each rank has already; None is nothing.
    Source: R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969.
    """
    loads, owners = list(loads or [0] * world_size), [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # stable: every rank finds the same
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


# --- The optimizer -----------------------------------------------------------------------------------


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided among the ranks; for the training loop, the plain one.

    Gradients must be averaged before `step`, as DDP does in backward. Learning rates are read from, and schedulers set
    them in, `param_groups`, which hold all parameters on every rank. `state` holds this rank's share.

    Args:
        params: parameters, or groups of them, in the same order on every rank.
        optimizer_class: any of torch.optim whose step treats each parameter by itself.
        process_group: None is the default group.
        **defaults: what `optimizer_class` takes, such as lr.
    Raises:
        ValueError: LBFGS, which takes all parameters for one vector.
    Collective: see `step` and `consolidate_state_dict`; none at construction.
    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise ValueError("LBFGS steps along one vector of all parameters, which cannot be dealt out: take Adam")
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owner: dict[nn.Parameter, int] = {}
        self._inner: torch.optim.Optimizer | None = None  # of this rank's share
        self._whole: dict[str, Any] | None = None  # what consolidate_state_dict has gathered
        super().__init__(params, {})
        self._deal([param for group in self.param_groups for param in group["params"]])
        self._inner = optimizer_class([self._share_of(group) for group in self.param_groups], **defaults)
        self.defaults, self.state = self._inner.defaults, self._inner.state
        _copy_options(self._inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Deal out one more group; what was dealt before stays where it is."""
        super().add_param_group(param_group)
        if self._inner is not None:
            self._deal(self.param_groups[-1]["params"])
            self._inner.add_param_group(self._share_of(self.param_groups[-1]))
            _copy_options(self._inner.param_groups, self.param_groups)

    def _deal(self, params: list[nn.Parameter]) -> None:
        loads = [0] * self.world_size
        for param, owner in self._owner.items():
            loads[owner] += _stepped_elements(param)
        owners = deal([_stepped_elements(param) for param in params], self.world_size, loads)
        self._owner.update(zip(params, owners, strict=True))

    def _share_of(self, group: dict[str, Any]) -> dict[str, Any]:
        mine = [param for param in group["params"] if self._owner[param] == self.rank]
        return {**_options(group), "params": mine}

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Step this rank's share, then give and take the new values.

        A frozen parameter is left alone, also if a gradient of earlier times is still there.

        Collective: one broadcast from each rank that owns a trainable parameter, or one per dtype of these; every rank
            of the group. All ranks must have frozen the same parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, owner in self._owner.items():
            if owner == self.rank and not param.requires_grad:
                param.grad = None
        self._whole = None  # is of the step before
        _copy_options(self.param_groups, self._inner.param_groups)
        self._inner.step()
        _copy_options(self._inner.param_groups, self.param_groups)
        for owner in range(self.world_size):
            self._send_share(owner)
        return loss

    def _send_share(self, owner: int) -> None:
        """Bring each rank's parameters to the others, one rank at a time to keep the copy small."""
        trainable = [p for p, other in self._owner.items() if other == owner and p.requires_grad]
        for _, params in groupby(sorted(trainable, key=_kind), key=_kind):
            values = [param.detach() for param in params]
            flat = torch.cat([value.reshape(-1) for value in values])
            dist.broadcast(flat, group=self.process_group, group_src=owner)
            if owner != self.rank:
                pieces = flat.split([value.numel() for value in values])
                for value, piece in zip(values, pieces, strict=True):
                    value.copy_(piece.view(value.shape))

    # --- Saving and loading --------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on the group's rank `to`, where `state_dict` then returns it.

        Collective: one gather_object of each rank's state, by way of the CPU; every rank of the group.
        """
        names = self._numbers()
        mine = {names[param]: _on_cpu(state) for param, state in self._inner.state.items()}
        shares = [None] * self.world_size if self.rank == to else None
        dist.gather_object(mine, shares, group=self.process_group, group_dst=to)
        if shares is None:
            return
        state = {number: state for share in shares for number, state in share.items()}
        groups = [{**g, "params": [names[param] for param in g["params"]]} for g in self.param_groups]
        self._whole = {"state": dict(sorted(state.items())), "param_groups": groups}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the form of the plain optimizer's, which can load it as well.

        Raises:
            RuntimeError: it was not gathered on this rank since the last step.
        Collective: none, so that the one rank which writes the checkpoint can call it.
        """
        if self._whole is None:
            raise RuntimeError(
                f"rank {self.rank} holds 1/{self.world_size} of the state; let all ranks call consolidate_state_dict() "
                "after the last step, and rank 0 alone state_dict()"
            )
        return self._whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of a whole state, whoever saved it: any number of ranks, or the plain optimizer.

        Raises:
            ValueError: it is of other groups; nothing was loaded.
        Collective: none; every rank reads the same state.
        """
        theirs = [group["params"] for group in state_dict["param_groups"]]
        expected, found = [len(group["params"]) for group in self.param_groups], [len(numbers) for numbers in theirs]
        if expected != found:
            raise ValueError(f"rank {self.rank}: expected groups of {expected} parameters, found {found}: build alike")
        number = {
            p: n for g, ns in zip(self.param_groups, theirs, strict=True) for p, n in zip(g["params"], ns, strict=True)
        }
        mine = [param for group in self._inner.param_groups for param in group["params"]]
        place = {param: index for index, param in enumerate(mine)}
        state = {
            place[param]: state_dict["state"][number[param]] for param in mine if number[param] in state_dict["state"]
        }
        groups = [
            {**_options(saved), "params": [place[param] for param in group["params"]]}
            for saved, group in zip(state_dict["param_groups"], self._inner.param_groups, strict=True)
        ]
        self._inner.load_state_dict(copy.deepcopy({"state": state, "param_groups": groups}))
        self.state, self._whole = self._inner.state, None
        _copy_options(self._inner.param_groups, self.param_groups)

    def _numbers(self) -> dict[nn.Parameter, int]:
        params = (param for group in self.param_groups for param in group["params"])
        return {param: number for number, param in enumerate(params)}


def _stepped_elements(param: nn.Parameter) -> int:
    return param.numel() if param.requires_grad else 0  # what is frozen has no state


def _kind(param: nn.Parameter) -> str:
    return f"{param.dtype} {param.device}"


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(source, target, strict=True):
        theirs.update(_options(ours))


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


# --- Side by side ------------------------------------------------------------------------------------


def train_steps(
    rank: int,
    world_size: int,
    model: nn.Module,
    x_NF: torch.Tensor,
    y_N: torch.Tensor,
    steps: int = 5,
    lr: float = 0.01,
    by: str = "course",
) -> Trained:
    """Train a copy of `model` by DDP with a sharded Adam, each rank on its share of the rows.

    Args:
        by: "course" for this file's, "torch" for ZeroRedundancyOptimizer, "plain" for an Adam that is not sharded.
    Raises:
        ValueError: the rows cannot be shared equally.
    Collective: those of `BucketedDDP` and of the optimizer's step, and one all_reduce of the losses; every rank.
    """
    device = my_device()
    x, y = my_rows(x_NF, rank, world_size).to(device), my_rows(y_N, rank, world_size).to(device)
    replica = BucketedDDP(copy.deepcopy(model).to(device))
    optimizer = _adam(by, replica.parameters(), lr)
    losses = torch.zeros(steps, dtype=x.dtype, device=device)
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(replica(x), y)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach() / world_size
    dist.all_reduce(losses)
    inner = getattr(optimizer, "optim", optimizer)  # where torch's has its state
    return Trained(tuple(losses.tolist()), whole_parameters(replica.module), bytes_held(replica.parameters(), inner))


def _adam(by: str, params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    if by == "plain":
        return torch.optim.Adam(params, lr=lr)
    if by == "course":
        return ShardedOptimizer(params, torch.optim.Adam, lr=lr)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

    return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=lr)
