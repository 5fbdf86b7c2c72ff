"""What else can be sent in place of a bucket's gradients?

A communication hook takes a bucket and returns a Future of its averaged flat tensor. What travels is its own affair:
the gradients as they are, in half the bits, or as two thin matrices whose product comes near them. Fewer bytes are
bought with an error; PowerSGD adds what it lost to the next step's gradient, so nothing is lost for good.

Left out on purpose: PowerSGD in the background. A bucket's second all_reduce needs the result of its first. Started
from a callback, as torch's hook does it, the second ones come in another order on each rank once several buckets are
under way; on gloo that hangs. Here each bucket waits for its own.
Read next: `syncbn.py`; or torch/distributed/algorithms/ddp_comm_hooks/.

Shapes: n rows and m columns of a gradient seen as a matrix, r its approximation's rank.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    Values above 65504 / W become infinite, those below 6e-8 become 0: scale the loss if gradients are small.

    Collective: one all_reduce of half the bytes; every rank of `group`.
    """
    flat = bucket.buffer()
    small = flat.to(torch.float16).div_(dist.get_world_size(group))
    sent = dist.all_reduce(small, group=group, async_op=True).get_future()
    return sent.then(lambda future: flat.copy_(small))


@dataclass
class _Matrix:
    """A gradient that travels as two thin factors."""

    values_nm: torch.Tensor  # the gradient itself: a view into the bucket
    lost_nm: torch.Tensor  # what earlier steps did not send of this rank's gradients
    right_mr: torch.Tensor  # last step's right factor, the first guess of this step


class PowerSGD:
    """What `power_sgd_hook` remembers from step to step.

    Args:
        approximation_rank: r; a gradient of n x m numbers travels as (n + m) r.
        group: None is the default group.
    Attributes:
        bytes_sent: payload of this rank, all buckets and steps so far.
    """

    def __init__(self, approximation_rank: int = 1, group: dist.ProcessGroup | None = None) -> None:
        if approximation_rank < 1:
            raise ValueError(f"approximation_rank={approximation_rank}: must be at least 1")
        self.approximation_rank, self.group, self.bytes_sent = approximation_rank, group, 0
        self._matrices: dict[int, list[_Matrix]] = {}  # by bucket

    def parts_of(self, bucket: GradBucket) -> tuple[list[_Matrix], list[torch.Tensor]]:
        """The gradients for which two factors are smaller than the whole, and the other gradients."""
        small = [self._shrinks(gradient) for gradient in bucket.gradients()]
        if bucket.index() not in self._matrices:
            # The same seed on all ranks: they must multiply by the same factor.
            generator = torch.Generator().manual_seed(bucket.index())
            chosen = [gradient for gradient, is_small in zip(bucket.gradients(), small, strict=True) if is_small]
            self._matrices[bucket.index()] = [self._matrix(gradient, generator) for gradient in chosen]
        others = [gradient for gradient, is_small in zip(bucket.gradients(), small, strict=True) if not is_small]
        return self._matrices[bucket.index()], others

    def _shrinks(self, gradient: torch.Tensor) -> bool:
        return gradient.ndim > 1 and sum(_as_matrix(gradient).shape) * self.approximation_rank < gradient.numel()

    def _matrix(self, gradient: torch.Tensor, generator: torch.Generator) -> _Matrix:
        values_nm = _as_matrix(gradient)
        random_mr = torch.randn(values_nm.shape[1], self.approximation_rank, generator=generator)
        return _Matrix(values_nm, torch.zeros_like(values_nm), random_mr.to(values_nm))

    def mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means over the ranks.

        Collective: one all_reduce if there is a tensor; every rank of the group.
        """
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(dist.get_world_size(self.group))
        dist.all_reduce(flat, group=self.group)
        self.bytes_sent += flat.nbytes
        pieces = flat.split([tensor.numel() for tensor in tensors])
        return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def power_sgd_hook(state: PowerSGD, bucket: GradBucket) -> torch.futures.Future:
    """Average a low-rank approximation of each matrix, and whatever is no matrix as it is.

    One step of a power iteration. With the gradients as M: the mean of P = M Q is made orthonormal, then Q = M^T P is
    averaged, and P Q^T takes M's place. Both products are linear in M, so the mean of the ranks' P is their mean's P.

    Collective: one all_reduce, and a second if the bucket has a matrix; every rank of the group.
    Source: Vogels, Karimireddy, Jaggi 2019 (arXiv 1905.13727), algorithm 1.
    """
    matrices, others = state.parts_of(bucket)
    for matrix in matrices:
        matrix.values_nm += matrix.lost_nm
    means = state.mean([matrix.values_nm @ matrix.right_mr for matrix in matrices] + others)
    lefts = [torch.linalg.qr(left_nr).Q for left_nr in means[: len(matrices)]]
    own_rights = [matrix.values_nm.T @ left_nr for matrix, left_nr in zip(matrices, lefts, strict=True)]
    rights = state.mean(own_rights)
    for matrix, left_nr, own_mr, right_mr in zip(matrices, lefts, own_rights, rights, strict=True):
        matrix.lost_nm = matrix.values_nm - left_nr @ own_mr.T
        matrix.values_nm.copy_(left_nr @ right_mr.T)
        matrix.right_mr = right_mr
    for gradient, mean in zip(others, means[len(matrices) :], strict=True):
        gradient.copy_(mean)
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.view(gradient.shape[0], -1)
