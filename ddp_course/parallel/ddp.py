"""How is communication hidden behind the backward pass?

Gradients are gathered in buckets, and a bucket's all_reduce is launched as soon as its last gradient is there, while
backward goes on with earlier layers. A forward pass through the wrapper arms it; a hook on each parameter counts; a
callback at the end of backward waits. So `loss.backward()` returns with gradients that are the mean over all ranks, and
the training loop stays as it was.

Left out on purpose: sparse gradients, `join` for ranks with unequal numbers of steps, a static graph, one replica over
several devices. torch's own DistributedDataParallel has them.
Read next: `syncbn.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_course.parallel import replicas
from ddp_course.parallel.bucketing import MIB, plan_buckets
from ddp_course.parallel.grad_bucket import GradBucket
from ddp_course.parallel.nested import parameters_behind


class BucketedDDP(nn.Module):
    """A replica of `module` whose gradients are averaged over the ranks while backward computes them.

    Use it as torch's `DistributedDataParallel`: call it instead of the module, and train. Only what its own `forward`
    has computed is averaged. A copy, by `copy.deepcopy` or `torch.save`, averages too, without the communication hook.

    Args:
        module: the same on every rank; each rank's values are replaced by those of the group's rank 0.
        process_group: None is the default group.
        bucket_cap_mb: the size in MiB at which a bucket closes; see `plan_buckets`.
        first_bucket_mb: the same of the first bucket of each dtype and device.
        forward_sync_buffers: give every rank rank 0's buffers before the first forward pass, and before each that
            follows an averaged one.
        broadcast_buffers: torch's older name for it, and more: False also keeps each rank's buffers at construction.
        find_unused_parameters: allow parameters that take no part in a pass, at the price of a walk through the
            graph and one more all_reduce. A gradient that no rank has computed stays None.
        gradient_as_bucket_view: let `param.grad` be the bucket's own memory, which saves the memory of all gradients.
    Raises:
        ValueError: nothing to train, or a layer with sparse gradients.
        RuntimeError: the models differ between ranks; gradients are missing (at the next forward or optimizer step).
    Collective: at construction one all_gather_object, one broadcast per parameter and buffer. In a forward pass one
        broadcast per dtype and device of the buffers; in its backward one all_reduce per bucket. All ranks.
    Source: Li et al. 2020 (arXiv 2006.15704), section 4; torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        forward_sync_buffers: bool = True,
        broadcast_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        replicas.refuse_sparse(module)
        replicas.check_same_model(module, process_group)
        replicas.broadcast_module(module, process_group, buffers=broadcast_buffers is not False)
        self.module, self.process_group = module, process_group
        self.forward_sync_buffers = forward_sync_buffers if broadcast_buffers is None else broadcast_buffers
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.cap_bytes, self.first_cap_bytes = bucket_cap_mb * MIB, first_bucket_mb * MIB
        self._syncs = True  # False inside no_sync
        self._connect()

    def _connect(self) -> None:
        """Plan the buckets and hang a hook on every parameter; the hooks go when the wrapper goes."""
        params = dict(replicas.trainable(self.module))
        self.buckets = plan_buckets(params.items(), self.cap_bytes, self.first_cap_bytes)
        self._work = [GradBucket(b, [params[n] for n in b.names], b is self.buckets[-1]) for b in self.buckets]
        self._params = set(params.values())
        self._has_buffers = any(True for _ in self.module.buffers())  # not looked for in each step: it takes time
        # Divided before the sum, as in torch: the sum then stays in range. With a hook, dividing is the hook's affair.
        self._scale = 1.0 / dist.get_world_size(self.process_group)
        self._comm: Callable[[GradBucket], torch.futures.Future] | None = None
        self._armed = self._reducing = False  # by a forward pass; by the first gradient after it
        self._averaged_last = True  # whether the last forward pass was one to be averaged
        self._in_graph: set[nn.Parameter] = set()  # behind the outputs since the last averages
        self._used: set[nn.Parameter] = set()  # have had a gradient since the last averages, no_sync included
        # Weak, or the hooks would keep the wrapper alive. Optimizer hooks are global, and a wrapper whose backward has
        # failed would refuse every later step.
        ready, refuse = weakref.WeakMethod(self._gradient_ready), weakref.WeakMethod(self._refuse_half)
        handles = [handle for bucket in self._work for handle in bucket.call_when_ready(ready)]
        handles.append(register_optimizer_step_pre_hook(lambda optimizer, *_: refuse()(optimizer)))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group not in (None, dist.group.WORLD):
            raise RuntimeError("a copy could not find its process group: only a replica on the default one is copied")
        by_connect = ("process_group", "buckets", "_work", "_params", "_comm", "_in_graph", "_used")
        return {name: value for name, value in self.__dict__.items() if name not in by_connect}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = None
        self._connect()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._refuse_half()
        if self.forward_sync_buffers and self._averaged_last and self._has_buffers:
            replicas.broadcast_buffers(self.module, self.process_group)
        outputs = self.module(*inputs, **kwargs)
        self._averaged_last = torch.is_grad_enabled() and self._syncs
        if self._averaged_last:
            self._armed = True
            self._in_graph |= parameters_behind(outputs) if self.find_unused_parameters else set()
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """After a forward pass within the block, backward adds up local gradients and no rank is talked to.

        The backward of the next forward pass outside averages what has been added up.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future]) -> None:
        """Let `hook(state, bucket)` do what the all_reduce does; it returns a Future of the averaged flat tensor.

        Raises:
            RuntimeError: there is a hook already.
        """
        if self._comm:
            raise RuntimeError("a communication hook is registered already; one is all there can be")
        self._comm, self._scale = partial(hook, state), 1.0

    # --- During backward, in the order of events ---------------------------------------------------

    def _gradient_ready(self, bucket: GradBucket, slot: int) -> None:
        """Called by autograd when the parameter's gradient holds all of this pass."""
        # Noted also in a pass that is not averaged: its gradient is added up, and the next averages must have it.
        if self.find_unused_parameters and (param := bucket.params[slot]).grad is not None:
            self._used.add(param)
        if not self._armed:
            return
        if not self._reducing:
            self._begin()
        if slot not in bucket.waiting_for:
            raise RuntimeError(
                f"{bucket.plan.names[slot]} got two gradients before the first was averaged, or one that the outputs "
                "of forward do not lead to: call backward once, on what forward has returned"
            )
        bucket.waiting_for.discard(slot)
        if slot in bucket.large:
            bucket.take(slot, self._scale, self.gradient_as_bucket_view)
        if not bucket.waiting_for:
            self._launch_full_buckets()
            # Called when backward is over, and only if all are launched: _finish takes what is missing for zero, and
            # _refuse_half is to see it missing.
            if not self.find_unused_parameters and self._work[-1].launched:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _begin(self) -> None:
        """The first gradient of this pass is there. To find unused parameters, wait only for those in the graph."""
        self._reducing = True
        if self.find_unused_parameters:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            for bucket in self._work:
                bucket.wait_only_for(self._in_graph)

    def _launch_full_buckets(self) -> None:
        # In the order of the plan, whichever is full first: all ranks must call in one order.
        for bucket in self._work:
            if bucket.waiting_for:
                return
            if not bucket.launched:
                bucket.launch(self._scale, self.gradient_as_bucket_view, self.process_group, self._comm)

    def _finish(self) -> None:
        """Called by autograd when backward has nothing left to compute: wait for the averages."""
        # As torch counts: a parameter in the graph is used if it has a gradient, be it that of an earlier pass.
        self._used |= {param for param in self._in_graph if param.grad is not None}
        for bucket in self._work:
            bucket.wait_only_for(set())  # what is in the graph, and yet the loss did not lead there
        self._launch_full_buckets()
        used = self._used_somewhere() if self.find_unused_parameters else None
        for bucket in self._work:
            bucket.finish(self.gradient_as_bucket_view, used)
        self._armed = self._reducing = False
        self._in_graph.clear()
        self._used.clear()

    def _used_somewhere(self) -> set[nn.Parameter]:
        """Return the parameters that any rank has used.

        Collective: one all_reduce of a flag per parameter.
        """
        params = [param for bucket in self._work for param in bucket.params]
        flags = torch.tensor([param in self._used for param in params], dtype=torch.int32, device=params[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        return {param for param, flag in zip(params, flags.tolist(), strict=True) if flag}

    def _refuse_half(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Raise if gradients are only partly averaged, and if they are of this optimizer's parameters."""
        steps = (param for group in optimizer.param_groups for param in group["params"]) if optimizer else self._params
        if not self._reducing or self._params.isdisjoint(steps):
            return
        missing = ", ".join(bucket.plan.names[slot] for bucket in self._work for slot in sorted(bucket.waiting_for))
        raise RuntimeError(
            f"rank {dist.get_rank(self.process_group)}: no gradient for {missing}, so the averages are incomplete. "
            "Every parameter must take part in the loss, on every rank; if that is meant to be, say "
            "find_unused_parameters=True. If backward ended with an error, wrap the model again"
        )
