"""Where do the gradients of a bucket lie?

In one flat tensor, so that one all_reduce takes them all. Each parameter has its place in it, a view, and the view
becomes the parameter's gradient: what has been averaged need not be copied back. Gradients come in one by one, large
ones copied at once, small ones together.

Left out on purpose: when to send, which is `ddp.py`'s part.
Read next: `ddp.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from ddp_course.parallel.bucketing import Bucket

LARGE_BYTES = 64 * 1024  # of a gradient that is worth an operation of its own; smaller ones are copied together


class GradBucket:
    """A bucket at work: one flat tensor, and for each parameter its place in it.

    The methods are those of torch's `dist.GradBucket`, so a communication hook written for the one takes the other.
    """

    def __init__(self, plan: Bucket, params: list[nn.Parameter], is_last: bool):
        self.plan, self.params, self._is_last = plan, params, is_last
        self.flat = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
        pieces = self.flat.split(plan.numels)
        self.views = [piece.view(shape) for piece, shape in zip(pieces, plan.shapes, strict=True)]
        self.large = {slot for slot, view in enumerate(self.views) if view.nbytes >= LARGE_BYTES}
        self.begin()

    def begin(self) -> None:
        """Get ready for a backward pass."""
        self.waiting_for = set(range(len(self.params)))  # the slots whose gradient is not there yet
        self.taken: set[int] = set()  # the slots that are copied and scaled already

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

        If its parameter gets the copy in its place, its own memory is free for the gradients to come. A gradient that
        was added up in the bucket itself is left to `take_rest`.
        """
        view, param = self.views[slot], self.params[slot]
        if param.grad is not view:
            torch.mul(param.grad, scale, out=view)
            self.taken.add(slot)
            if as_view:
                param.grad = view

    @torch.no_grad()
    def take_rest(self, scale: float) -> None:
        """Copy in what `take` has not, in few operations, and scale it."""
        left = [slot for slot in range(len(self.views)) if slot not in self.taken]
        copies, grads = [], []
        for slot in left:
            view, grad = self.views[slot], self.params[slot].grad
            if grad is None:  # unused in this pass
                view.zero_()
            elif grad is not view:
                copies.append(view)
                grads.append(grad)
        if copies:
            torch._foreach_copy_(copies, grads)
        if scale != 1 and left:
            unscaled = [self.flat] if len(left) == len(self.views) else [self.views[slot] for slot in left]
            torch._foreach_mul_(unscaled, scale)

    @torch.no_grad()
    def hand_out(self, as_views: bool) -> None:
        """Make the averages the parameters' gradients: the views themselves, or copies of them."""
        for view, param in zip(self.views, self.params, strict=True):
            if as_views:
                param.grad = view
            elif param.grad is None:
                param.grad = view.clone()
            else:
                param.grad.copy_(view)
