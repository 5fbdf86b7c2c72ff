"""What else can be sent in place of a bucket's gradients?

A communication hook takes a bucket and returns a Future of its averaged flat tensor. What travels is its own affair:
the gradients as they are, or in half the bits. Fewer bytes are bought with an error.

Left out on purpose: PowerSGD, which sends two thin matrices; torch's own hook runs on these buckets.
Read next: `syncbn.py`; or torch/distributed/algorithms/ddp_comm_hooks/.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_course.parallel.grad_bucket import GradBucket


def all_reduce_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future:
    """Average the gradients as they are: what `BucketedDDP` does without a hook.

    Collective: one all_reduce of the bucket; every rank of `group`.
    """
    flat = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(flat, group=group, async_op=True).get_future().then(lambda future: flat)


def fp16_compress_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future:
    """Average the gradients in float16: half of float32's bytes, and 11 bits of each number.

    Values above 65504 become infinite, those below W · 3e-8 become 0, since the division comes before the sum: scale
    the loss if gradients are small.

    Collective: one all_reduce of half the bytes; every rank of `group`.
    """
    flat = bucket.buffer()
    small = flat.to(torch.float16).div_(dist.get_world_size(group))
    sent = dist.all_reduce(small, group=group, async_op=True).get_future()
    return sent.then(lambda future: flat.copy_(small))
