"""How is communication hidden behind the backward pass?

Gradients are gathered in buckets, and a bucket's all_reduce is launched as soon as its last gradient is there, while
backward goes on with earlier layers. A hook on each parameter counts; a callback at the end of backward waits. So
`loss.backward()` returns with gradients that are the mean over all ranks, and the training loop stays as it was.

Left out on purpose: sparse gradients, `join` for ranks with unequal numbers of steps, a static graph, one replica over
several devices, checkpointed activations with `use_reentrant=True` (those with False are fine). torch's own
DistributedDataParallel has them.
Read next: `comm_hooks.py`, what else a bucket can do than be averaged; `syncbn.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.parallel.bucketing import MIB, plan_buckets
from ddp_course.parallel.grad_bucket import GradBucket
from ddp_course.parallel.nested import leaves
from ddp_course.parallel.replicas import broadcast_buffers, broadcast_module, check_same_model, trainable

Hook = Callable[[Any, GradBucket], torch.futures.Future]


class BucketedDDP(nn.Module):
    """A replica of `module` whose gradients are averaged over the ranks while backward computes them.

    Use it as torch's `DistributedDataParallel`: call it instead of the module, and train.

    Args:
        module: the same on every rank; each rank's values are replaced by those of the group's rank 0.
        process_group: None is the default group.
        bucket_cap_mb, first_bucket_mb: sizes in MiB at which buckets close; see `plan_buckets`.
        broadcast_buffers: give every rank rank 0's buffers before each forward pass in training.
        find_unused_parameters: allow parameters that take no part in a pass, at the price of a walk through the
            graph and one more all_reduce. A gradient that no rank has computed stays as it was.
        gradient_as_bucket_view: let `param.grad` be the bucket's own memory, which saves a copy of all gradients.
    Raises:
        ValueError: nothing to train, or a layer with sparse gradients.
        RuntimeError: the models differ between ranks.
    Collective: at construction one all_gather_object, one broadcast per parameter and buffer. In a forward pass in
        training one broadcast per dtype of the buffers. In a backward pass outside `no_sync` one all_reduce per
        bucket, in the order of the plan. Every rank of the group.
    Source: Li et al. 2020 (arXiv 2006.15704), section 4; torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        named = trainable(module)
        if sparse := [name for name, layer in module.named_modules() if getattr(layer, "sparse", False)]:
            raise ValueError(f"{sparse[0]} has sparse gradients, which buckets cannot hold: build it with sparse=False")
        check_same_model(module, process_group)
        broadcast_module(module, process_group)
        self.module, self.process_group = module, process_group
        self.broadcast_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.buckets = plan_buckets(named, bucket_cap_mb * MIB, first_bucket_mb * MIB)
        self._names = {param: name for name, param in named}
        # Divided before the sum, as in torch: the sum then stays in range. With a hook, dividing is the hook's affair.
        self._scale = 1.0 / dist.get_world_size(process_group)
        self._comm: tuple[Any, Hook] | None = None
        self._syncs = True  # False inside no_sync
        self._in_backward = False
        self._used: set[nn.Parameter] = set()  # since the last all_reduce; only with find_unused_parameters
        params = dict(named)
        self._work = [GradBucket(b, [params[n] for n in b.names], b is self.buckets[-1]) for b in self.buckets]
        self._launched: list[dist.Work | torch.futures.Future] = []  # by bucket; its length is the next one's index
        for bucket in self._work:
            for slot, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket, slot))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._in_backward:
            raise RuntimeError("the backward pass before ended with an error, half-way through its buckets: build anew")
        if self.broadcast_buffers and self.training and self._syncs and torch.is_grad_enabled():
            broadcast_buffers(self.module, self.process_group)
        outputs = self.module(*inputs, **kwargs)
        if self.find_unused_parameters and torch.is_grad_enabled():
            self._used |= parameters_behind(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward passes add up local gradients and no rank is talked to.

        The next backward pass outside averages what has been added up.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` do what the all_reduce does; it returns a Future of the averaged flat tensor.

        Raises:
            RuntimeError: there is a hook already.
        """
        if self._comm:
            raise RuntimeError("a communication hook is registered already; one is all there can be")
        self._comm, self._scale = (state, hook), 1.0

    # --- During backward, in the order of events ---------------------------------------------------

    def _gradient_ready(self, bucket: GradBucket, slot: int, param: nn.Parameter) -> None:
        """Called by autograd when `param.grad` holds all of this pass's gradient."""
        if not self._syncs:
            return
        if not self._in_backward:
            self._begin()
        if slot not in bucket.waiting_for:
            raise RuntimeError(f"{self._names[param]} got two gradients in one backward pass: use it once in a graph")
        bucket.waiting_for.discard(slot)
        if slot in bucket.large:
            bucket.take(slot, self._scale, self.gradient_as_bucket_view)
        if not bucket.waiting_for:
            self._launch_full_buckets()

    def _begin(self) -> None:
        """The first gradient of this pass is there; unused parameters are not waited for."""
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._kept: dict[nn.Parameter, torch.Tensor | None] = {}  # gradients of unused parameters, as they were
        if self.find_unused_parameters:
            for bucket in self._work:
                for slot, param in enumerate(bucket.params):
                    if param not in self._used:
                        self._kept[param] = None if param.grad is None else param.grad.clone()
                        bucket.waiting_for.discard(slot)

    def _launch_full_buckets(self) -> None:
        # In the order of the plan, whatever is full first: collectives must come in the same order on every rank.
        while len(self._launched) < len(self._work) and not self._work[len(self._launched)].waiting_for:
            bucket = self._work[len(self._launched)]
            bucket.take_rest(self._scale)
            if self._comm:
                state, hook = self._comm
                self._launched.append(hook(state, bucket))
            else:
                self._launched.append(dist.all_reduce(bucket.flat, group=self.process_group, async_op=True))

    def _finish(self) -> None:
        """Called by autograd when backward has nothing left to compute: wait for the averages."""
        missing = [self._names[b.params[slot]] for b in self._work for slot in sorted(b.waiting_for)]
        if missing:
            self._forget()
            way_out = (
                "A forward pass used them and its loss was dropped; run such a pass under torch.no_grad()"
                if self.find_unused_parameters
                else "Every parameter must take part in the loss, on every rank; if that is meant to be, say "
                "find_unused_parameters=True"
            )
            rank = dist.get_rank(self.process_group)
            raise RuntimeError(f"rank {rank}: no gradient for {', '.join(missing)}. {way_out}")
        used_somewhere = self._used_somewhere() if self.find_unused_parameters else None
        for bucket, launched in zip(self._work, self._launched, strict=True):
            result = launched.wait()
            if self._comm and result.data_ptr() != bucket.flat.data_ptr():
                bucket.set_buffer(result)
            bucket.hand_out(self.gradient_as_bucket_view)
        for param, kept in self._kept.items():
            if param not in used_somewhere:
                param.grad = kept
        self._forget()

    def _used_somewhere(self) -> set[nn.Parameter]:
        """Collective: one all_reduce of a flag per parameter."""
        params = list(self._names)
        flags = torch.tensor([param in self._used for param in params], dtype=torch.int32, device=params[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.process_group)
        return {param for param, flag in zip(params, flags.tolist(), strict=True) if flag}

    def _forget(self) -> None:
        self._in_backward, self._launched = False, []
        self._used.clear()
        for bucket in self._work:
            bucket.begin()


def parameters_behind(outputs: Any) -> set[nn.Parameter]:
    """Return the leaves that autograd would reach from the tensors in `outputs`, which may be nested."""
    found, seen = set(), set()
    nodes = [leaf.grad_fn for leaf in leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad, where a path ends
            found.add(node.variable)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return found
