"""How is each operation of a program carried out on a rank?

One object holds the net, its wrapper and optimizer, and what has come out of forward passes; each operation is one of
its methods. Inputs and random numbers follow from the case, the operation's index and the rank.
Read next: `fuzz_on_ranks.py`, which plays a program twice.
"""

from __future__ import annotations

import copy
import gc
import io
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from tests.parallel.fuzz_modules import Net, fill, outputs_in
from tests.parallel.fuzz_programs import Case

HOOKS = {"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}


class Player:
    """Carries out the operations of a program; each method named in `fuzz_programs.py` is one."""

    def __init__(self, wrapper: type, case: Case, rank: int):
        self.wrapper, self.case, self.rank = wrapper, case, rank
        self.module = Net(case.net, rank)
        self.ddp, self.old, self.optimizer = None, None, None
        self.pending: list[Any] = []  # results of forward passes that backward has not been called for
        self.shown: dict[str, Any] = {}  # what this operation returned
        self.own: torch.Tensor | None = None
        self.kept: list[nn.Module] = []  # wrappers that live on and are not used
        self.second = None
        self.views = False  # whether any wrapper so far made gradients views of its buckets

    def perform(self, index: int, op) -> None:
        self.seed = (self.case.seed * 100 + index) * 10 + self.rank
        torch.default_generator.manual_seed(self.seed)  # for dropout
        self.shown = {}
        getattr(self, op.name)(**op.options)

    # --- Wrappers

    def wrapped(self, **changes) -> nn.Module:
        options = {**self.case.wrapping, **changes}
        if not issubclass(self.wrapper, DistributedDataParallel):
            options["first_bucket_mb"] = options["bucket_cap_mb"]  # as torch has it when a cap is given
        self.views |= options["gradient_as_bucket_view"]
        if "process_group" in options:
            options["process_group"] = dist.group.WORLD
        ddp = self.wrapper(self.module, **options)
        if self.case.hook != "none":
            ddp.register_comm_hook(None, HOOKS[self.case.hook])
        return ddp

    def wrap(self):
        self.ddp = self.wrapped()
        self.new_optimizer()
        if self.case.second:
            module = nn.Linear(2, 2).double()
            fill(module, seed=self.rank)
            self.second = self.wrapper(module)

    def new_optimizer(self):
        parameters = self.ddp.parameters()
        self.optimizer = {
            "SGD": lambda: torch.optim.SGD(parameters, lr=0.1),
            "SGD with momentum": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            # A large eps: dividing by a gradient that is zero but for rounding would make rounding visible.
            "Adam": lambda: torch.optim.Adam(parameters, lr=0.02, eps=1e-2),
        }[self.case.optimizer]()

    def wrap_again(self, old, view=None):
        self.old = self.ddp if old == "kept" else None
        if old == "deleted":
            self.ddp = None
            gc.collect()
        self.ddp = self.wrapped(**({} if view is None else {"gradient_as_bucket_view": view}))

    def back_to_old(self):
        self.ddp, self.old = self.old or self.ddp, self.ddp

    def deepcopy(self, used, other):
        copied = copy.deepcopy(self.ddp)
        if other == "kept":
            self.kept.append(self.ddp if used == "copy" else copied)
        if used == "copy":
            self.go_on_with(copied)

    def save_and_load(self):
        memory = io.BytesIO()
        torch.save(self.ddp, memory)
        memory.seek(0)
        self.go_on_with(torch.load(memory, weights_only=False))

    def go_on_with(self, ddp):
        self.ddp, self.module, self.old, self.own = ddp, ddp.module, None, None
        self.pending.clear()
        self.new_optimizer()

    # --- Steps

    def forward(self, mode, step, rows, call, fails=False, recomputed=False):
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(rows + self.rank, 4, generator=generator, dtype=torch.float64).to(
            getattr(torch, self.case.net.dtype)
        )
        args, kwargs = {
            "positional": ((x, step), {}),
            "keyword": ((), {"x": x, "step": step, "unknown": [x]}),
            "nested": (({"batch": (x, "label")},), {"step": step}),
        }[call]
        called = self.module if mode == "local" else self.ddp
        if recomputed:
            args, called = (called, *args), partial(checkpoint, use_reentrant=False)
        context = {"no_sync": self.ddp.no_sync, "no_grad": torch.no_grad}.get(mode, nullcontext)
        try:
            with context():
                result = called(*args, **kwargs, **({"fails": True} if fails else {}))
        except ArithmeticError:
            return
        self.shown["output type"] = type(result).__name__
        for head, output in enumerate(outputs_in(result)):
            self.shown[f"output {head}"] = output.detach().clone()
            self.shown[f"output {head} requires_grad"] = output.requires_grad
        if mode != "no_grad":
            self.pending.append(result)

    def drop(self):
        self.pending.clear()

    def backward(self, heads, no_sync=False, retain=False, in_place=False, fails=False):
        losses = []
        for result in self.pending:
            for head, output in enumerate(outputs_in(result)):
                if head in heads if heads is not None else head not in self.case.net.outside_loss:
                    output = (output.mul_(2) if in_place else output).double()
                    output = self.second(output) if self.second and head == 0 else output
                    losses.append((head + 1) * output.square().mean())
        if losses:
            loss = sum(losses)
            if fails:
                loss.register_hook(fail)
            with self.ddp.no_sync() if no_sync else nullcontext(), suppress(ArithmeticError):
                loss.backward(retain_graph=retain)
        if not retain:
            self.pending.clear()

    def step(self, clip=False):
        if clip:
            gradients = [parameter.grad.double() for parameter in self.ddp.parameters() if parameter.grad is not None]
            self.shown["norm"] = get_total_norm(gradients)  # in float64: exact, however gradients lie in memory
            clip_grads_with_norm_(self.ddp.parameters(), 0.5, self.shown["norm"])
        self.optimizer.step()

    def zero(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)

    def mode(self, train):
        self.ddp.train(train)

    # --- What a user may do to the module meanwhile

    def parameter_at(self, index) -> nn.Parameter:
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        return trained[index % len(trained)]

    def gradient(self, parameter, becomes):
        chosen = self.parameter_at(parameter)
        value = 1.0 + (self.rank if becomes == "own, of the rank" else 0)
        own = torch.full_like(chosen, value)
        if becomes == "own, a slice":
            own = torch.full((chosen.numel() + 3,), value, dtype=chosen.dtype)[3:].view(chosen.shape)
        elif becomes == "own, transposed" and own.dim() > 1:
            own = own.transpose(0, 1).contiguous().transpose(0, 1)
        chosen.grad = self.own = None if becomes == "none" else own

    def data(self, parameter, becomes):
        chosen = self.parameter_at(parameter)
        copied = chosen.data.clone()
        if becomes == "other strides" and copied.dim() > 1:
            copied = copied.transpose(0, 1).contiguous().transpose(0, 1)
        chosen.data = copied * 0.5 if becomes == "other values" else copied

    def load_state(self, of_rank):
        other = Net(self.case.net, self.rank)
        fill(other, seed=self.seed if of_rank else self.seed - self.rank)
        self.ddp.load_state_dict({f"module.{name}": value for name, value in other.state_dict().items()})

    def trainable(self, block, flag):
        if self.module.blocks:
            self.module.blocks[block % len(self.module.blocks)].requires_grad_(flag)

    def user_hook(self, parameter, kind):
        chosen = self.parameter_at(parameter)
        if kind == "on the tensor":
            chosen.register_hook(lambda grad: None if grad is None else 2 * grad)
        else:
            chosen.register_post_accumulate_grad_hook(add_a_quarter)

    # --- What is compared

    def state(self) -> dict[str, Any]:
        found = dict(self.shown)
        if self.ddp is None:
            return found
        found["state_dict keys"] = list(self.ddp.state_dict())
        for name, parameter in self.module.named_parameters():
            found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
            found[f"parameter {name}"] = parameter.detach().clone()
        for name, buffer in self.module.named_buffers():
            found[f"buffer {name}"] = buffer.clone()
        # A wrapper that makes gradients views leaves behind what it replaces, at times that are its own affair.
        if self.own is not None and not self.views:
            found["own tensor that the user set as a gradient"] = self.own.clone()
        if self.second:
            for name, parameter in self.second.module.named_parameters():
                found[f"gradient of the second module's {name}"] = (
                    None if parameter.grad is None else parameter.grad.clone()
                )
        return found

    def reduction_ended(self) -> bool:
        """Whether torch's reducer would take another forward pass."""
        try:
            for ddp in (self.ddp, self.old, self.second):
                if ddp is not None:
                    ddp.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True


def add_a_quarter(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:  # None where an output is outside the loss
        parameter.grad.add_(0.25)


def fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("on purpose, on every rank")
