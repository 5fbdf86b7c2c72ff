"""Where do the gradients of a bucket lie?

In one flat tensor, so that one all_reduce takes them all. Each parameter has its place in it, a view, and the view
becomes the parameter's gradient: what has been averaged need not be copied back.

A bucket belongs to a replica, `BucketedDDP`, which directs it through each backward pass: `begin`; `take` a large
gradient as soon as it is there; when all are there, `launch`, which copies the small ones and sends; at the end
`finish`, which waits. A replica can also let passes add up gradients without sending them.

Left out on purpose: which bucket is sent when, which is `ddp.py`'s part.
Read next: `nested.py`, what a forward pass has used; `ddp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp_course.parallel.bucketing import Bucket

LARGE_BYTES = 64 * 1024  # of a gradient that is worth an operation of its own; smaller ones are copied together


class GradBucket:
    """A bucket at work: one flat tensor, and for each parameter its place in it.

    Instead of an all_reduce a bucket can be sent by a communication hook: a function that gets the bucket, and returns
    a Future of the averaged flat tensor; it divides by the number of ranks itself. What a hook may ask of a bucket,
    from `index` to `is_last`, is called as in torch's `dist.GradBucket`, so a hook written for the one takes the other.
    """

    def __init__(self, plan: Bucket, params: list[nn.Parameter], is_last: bool):
        self.plan, self.params, self._is_last = plan, params, is_last
        self.flat = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
        pieces = self.flat.split(plan.numels)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, plan.shapes, strict=True)]
        # The node of autograd's graph that adds to a parameter's gradient. It is kept here: a parameter holds its node
        # weakly, and what `call_when_ready` hangs on it would die with it.
        self._nodes = [get_gradient_edge(param).node for param in params]
        self.large = {slot for slot, view in enumerate(self.views) if view.nbytes >= LARGE_BYTES}
        self.begin()

    def begin(self) -> None:
        """Get ready for a backward pass."""
        self.waiting_for = set(range(len(self.params)))  # the slots whose gradient is not there yet
        self.taken: set[int] = set()  # the slots that are copied and scaled already
        self.launched: dist.Work | torch.futures.Future | None = None

    def call_when_ready(self, call: Callable[[], Callable[[GradBucket, int], None]]) -> Iterator[RemovableHandle]:
        """Have autograd call `call()(bucket, slot)` whenever it has come to a parameter; yield what ends that.

        `call` is a weak reference: a hook that held the replica would keep it alive as long as its parameters. The hook
        is on the node, called after it has added to `param.grad`; and also where a Function's backward has returned
        None. Then nothing is accumulated, and the public `register_post_accumulate_grad_hook` is not called: the bucket
        would wait for ever.
        """
        for slot, node in enumerate(self._nodes):
            yield node.register_hook(lambda *_, slot=slot: call()(self, slot))

    def index(self) -> int:
        return self.plan.index

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.flat.copy_(buffer)

    def gradients(self) -> list[torch.Tensor]:
        return self.views

    def parameters(self) -> list[nn.Parameter]:
        return self.params

    def is_last(self) -> bool:
        return self._is_last

    @torch.no_grad()
    def take(self, slot: int, scale: float, as_view: bool) -> None:
        """Copy one gradient in, times `scale`: best at once, while it is in the processor's cache.

        If the parameter gets the copy in its place, the gradient's own memory is free for those to come. A gradient
        that was added up in the bucket itself is left to `launch`.

        Args:
            scale: 1 / W, or 1 where a communication hook divides.
            as_view: let the view be the parameter's gradient from now on; otherwise it is copied back at the end.
        """
        view, param = self.views[slot], self.params[slot]
        if param.grad is not None and param.grad is not view:
            torch.mul(param.grad, scale, out=view)
            self.taken.add(slot)
            if as_view:
                param.grad = view

    def wait_only_for(self, params: set[nn.Parameter]) -> None:
        """Do not wait for the other parameters: what earlier passes have added up for them counts, or zero."""
        self.waiting_for = {slot for slot in self.waiting_for if self.params[slot] in params}

    @torch.no_grad()
    def launch(self, scale: float, as_views: bool, group: dist.ProcessGroup | None, hook: Callable | None) -> None:
        """Copy in what `take` has not, in few operations, and send the flat tensor, by `hook(self)` if there is one.

        Collective: one all_reduce, or what the hook does; every rank of `group`, bucket by bucket in the same order.
        """
        left = [slot for slot in range(len(self.views)) if slot not in self.taken]
        copies, grads = [], []
        for slot in left:
            view, param = self.views[slot], self.params[slot]
            if param.grad is None:
                view.zero_()
            elif param.grad is not view:
                copies.append(view)
                grads.append(param.grad)
                if as_views:
                    param.grad = view
        if copies:
            torch._foreach_copy_(copies, grads)
        if scale != 1 and left:
            unscaled = [self.flat] if len(left) == len(self.views) else [self.views[slot] for slot in left]
            torch._foreach_mul_(unscaled, scale)
        self.launched = hook(self) if hook else dist.all_reduce(self.flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self, as_views: bool, used: Collection[nn.Parameter] | None) -> None:
        """Wait for the averages; make them, as views or copies, the gradients of the parameters in `used`, or of all.

        Raises:
            RuntimeError: a gradient is no longer the view it was made: another wrapper averages it, too.
        """
        result = self.launched.wait()
        # The Work of an all_reduce gives no tensor, a hook's Future does.
        if isinstance(result, torch.Tensor) and result.data_ptr() != self.flat.data_ptr():
            self.set_buffer(result)
        for slot, (view, param) in enumerate(zip(self.views, self.params, strict=True)):
            if used is not None and param not in used:
                continue
            if param.grad is None:
                param.grad = view if as_views else view.clone()
            elif not as_views:
                param.grad.copy_(view)
            elif param.grad is not view:
                raise RuntimeError(
                    f"{self.plan.names[slot]}: its gradient was replaced during backward, as by a second replica whose "
                    "forward pass led there too; call one of the two, or say gradient_as_bucket_view=False"
                )
        self.begin()
