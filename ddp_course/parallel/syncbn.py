"""What if a layer looks at the whole batch, and every rank has only a part of it?

BatchNorm normalises by the mean and variance of the batch. Under DDP each rank knows its own rows, so its statistics
are those of a smaller batch. SyncBatchNorm lets the ranks combine theirs: one collective in forward, for the
statistics, and one in backward, because every row's output depends on every row of every rank.

Left out on purpose: second derivatives, and the fused kernels that torch's own uses on GPUs. torch's own refuses CPUs.
Read next: `metrics.py`.

Shapes: W ranks, N local rows (and pixels), C channels; x_NC stands for (N, C) or (N, C, ...).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the rows of all ranks: `nn.BatchNorm1d`, 2d and 3d in one, with their arguments and state.

    The gradients of weight and bias are sums over this rank's rows, as those of every other layer: DDP averages them.
    Ranks may have different numbers of rows, also none. Where no group is initialised it is a BatchNorm. Its backward
    cannot be differentiated again.

    Args:
        num_features: C, the channels.
        eps, momentum, affine, track_running_stats: as in `nn.BatchNorm2d`.
        process_group: the ranks that share statistics; None is the default group.
    Collective: in training one all_gather of 2 C + 1 numbers in each forward pass, also under `no_grad`, and one
        all_reduce of 2 C numbers in each backward pass; every rank of the group. None in eval mode.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def forward(self, x_NC: torch.Tensor) -> torch.Tensor:
        """Normalise; the shape and dtype stay.

        Raises:
            ValueError: another number of channels, or a whole batch of a single value per channel.
        """
        if x_NC.dim() < 2 or x_NC.shape[1] != self.num_features:
            raise ValueError(f"expected (N, {self.num_features}, ...), found {tuple(x_NC.shape)}")
        if not self.training:
            use_batch = self.running_mean is None  # nothing to normalise by but this batch
            return F.batch_norm(
                x_NC, self.running_mean, self.running_var, self.weight, self.bias, use_batch, 0.0, self.eps
            )
        y_NC, mean_C, var_C, count = _Normalise.apply(x_NC, self.weight, self.bias, self.eps, self.process_group)
        if self.running_mean is not None:
            self._follow(mean_C, var_C, count)
        return y_NC

    @torch.no_grad()
    def _follow(self, mean_C: torch.Tensor, var_C: torch.Tensor, count: torch.Tensor) -> None:
        """Move the running statistics towards this batch's; the same numbers on every rank."""
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        # Divided by count - 1: the batch's own variance is too small an estimate for rows not seen.
        unbiased_C = var_C * (count / (count - 1))
        self.running_mean.lerp_(mean_C.to(self.running_mean), share)
        self.running_var.lerp_(unbiased_C.to(self.running_var), share)

    @classmethod
    def convert(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every BatchNorm in `module`, torch's SyncBatchNorm too; parameters and buffers stay the same tensors.

        A layer that stands in several places stays one layer. Layers that are ours already are kept, and move to
        `process_group` if one is given.

        Returns:
            The module itself, or its replacement if it is a BatchNorm.
        Raises:
            ValueError: a lazy layer, which does not know its channels yet.
        """
        done: dict[nn.Module, nn.Module] = {}

        def converted(layer: nn.Module) -> nn.Module:
            if layer in done:
                return done[layer]
            done[layer] = layer
            if isinstance(layer, cls):
                layer.process_group = process_group or layer.process_group
            elif isinstance(layer, _BatchNorm):
                done[layer] = cls._like(layer, process_group)
            for name, child in layer._modules.items():  # named_children() would pass over a second name
                if child is not None:
                    layer._modules[name] = converted(child)
            return done[layer]

        return converted(module)

    @classmethod
    def _like(cls, layer: _BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
        if isinstance(layer, LazyModuleMixin):
            raise ValueError(
                f"{type(layer).__name__} has no channels yet: pass a batch through the model, then convert"
            )
        sync = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, process_group,
            device="meta",
        )  # fmt: skip
        sync.weight, sync.bias = layer.weight, layer.bias
        sync.running_mean, sync.running_var = layer.running_mean, layer.running_var
        sync.num_batches_tracked = layer.num_batches_tracked
        return sync.train(layer.training)


class _Normalise(torch.autograd.Function):
    """Forward and backward of the normalisation; see `SyncBatchNorm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: torch.Tensor,
        weight_C: torch.Tensor | None,
        bias_C: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean_C, var_C, count = combine(all_statistics(local_statistics(x_NC), group))
        # Looking at the count waits for the device, so only a rank with at most one value looks. If all ranks together
        # have fewer than two, each has at most one: then all look, and all raise.
        if x_NC.numel() < 2 * x_NC.shape[1] and count < 2:
            raise ValueError(f"the batch of all ranks has {int(count)} value per channel: its variance needs two")
        inv_std_C = torch.rsqrt(var_C + eps)
        y_NC = (x_NC - _wide(mean_C, x_NC)) * _wide(inv_std_C, x_NC)
        if weight_C is not None:
            y_NC = y_NC * _wide(weight_C, x_NC) + _wide(bias_C, x_NC)
        ctx.save_for_backward(x_NC, weight_C, mean_C, inv_std_C, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean_C, var_C, count)
        return y_NC.to(x_NC.dtype), mean_C, var_C, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Carry the gradient through the mean and the variance, which belong to all rows of all ranks.

        With n = (x - mean) / std:  dx = weight / std * (dy - mean(dy) - n * mean(dy * n)), means over all ranks' rows.
        """
        x_NC, weight_C, mean_C, inv_std_C, count = ctx.saved_tensors
        dims = _all_but_channels(x_NC)
        dy_NC = dy_NC.to(mean_C.dtype)
        normal_NC = (x_NC - _wide(mean_C, x_NC)) * _wide(inv_std_C, x_NC)
        sum_dy_C, sum_dy_normal_C = dy_NC.sum(dims), (dy_NC * normal_NC).sum(dims)
        dweight_C = sum_dy_normal_C.to(weight_C.dtype) if weight_C is not None else None
        dbias_C = sum_dy_C.to(weight_C.dtype) if weight_C is not None else None
        sums_2C = torch.stack([sum_dy_C, sum_dy_normal_C])  # a copy: those of weight and bias stay this rank's own
        if _talks(ctx.group):
            dist.all_reduce(sums_2C, group=ctx.group)
        mean_dy_C, mean_dy_normal_C = sums_2C / count
        dx_NC = dy_NC - _wide(mean_dy_C, x_NC) - normal_NC * _wide(mean_dy_normal_C, x_NC)
        scale_C = inv_std_C if weight_C is None else inv_std_C * weight_C
        return (dx_NC * _wide(scale_C, x_NC)).to(x_NC.dtype), dweight_C, dbias_C, None, None


# --- The statistics ----------------------------------------------------------------------------------


def local_statistics(x_NC: torch.Tensor) -> torch.Tensor:
    """Return this rank's mean of each channel, sum of squared differences from it, and count, shape (2 C + 1,).

    The sum of squares and the square of the sum could travel instead, but their difference loses all digits when the
    mean is large beside the spread. Computed in float32 at least, whatever x is.
    """
    wide_NC = x_NC.to(torch.promote_types(x_NC.dtype, torch.float32))
    count = x_NC.numel() // x_NC.shape[1]
    if not count:  # the mean of no rows is NaN, and NaN times a weight of 0 is still NaN, on every rank
        return wide_NC.new_zeros(2 * x_NC.shape[1] + 1)
    var_C, mean_C = torch.var_mean(wide_NC, _all_but_channels(x_NC), correction=0)
    return torch.cat([mean_C, var_C * count, mean_C.new_full((1,), count)])


def all_statistics(mine: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return every rank's statistics, shape (W, 2 C + 1).

    Collective: one all_gather, every rank of `group`; none without a process group.
    """
    if not _talks(group):
        return mine.unsqueeze(0)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone)


def combine(statistics_W: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance (divided by the count) and count of all ranks' rows together.

    Each rank weighs as many rows as it has, and the distance of its mean from the common one adds to the variance.

    Source: Chan, Golub, LeVeque 1983, Algorithms for computing the sample variance, section 2.
    """
    channels = (statistics_W.shape[1] - 1) // 2
    mean_WC, squares_WC, count_W1 = statistics_W.split([channels, channels, 1], dim=1)
    count = count_W1.sum()
    mean_C = (mean_WC * count_W1).sum(0) / count
    squares_C = (squares_WC + count_W1 * (mean_WC - mean_C).square()).sum(0)
    return mean_C, squares_C / count, count


def _talks(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _all_but_channels(x_NC: torch.Tensor) -> list[int]:
    return [dim for dim in range(x_NC.dim()) if dim != 1]


def _wide(value_C: torch.Tensor, x_NC: torch.Tensor) -> torch.Tensor:
    """View a value per channel so that it broadcasts over x."""
    return value_C.view(1, -1, *[1] * (x_NC.dim() - 2))
