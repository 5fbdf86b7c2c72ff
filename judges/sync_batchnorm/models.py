"""Which models does a conversion have to get right? Nested ones, unusual arguments, one layer in several places.

Each maker returns a model and an input for it. Read next: `convert.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from ddp_course.parallel import SyncBatchNorm


class Block(nn.Module):
    """A convolution with a way around it, as in a ResNet."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)
        self.around = nn.ModuleList([nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))])
        self.other = nn.InstanceNorm2d(channels, affine=True)  # another kind of layer

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """Add both ways."""
        return torch.tanh(self.other(self.norm(self.conv(x_NCHW))) + self.around[0](x_NCHW))


def nested_model(features: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with layers of three kinds, at several depths, one that is converted already, and an input."""
    model = nn.Sequential(
        nn.BatchNorm3d(1), nn.Flatten(2, 3), nn.Conv2d(1, features, 1), Block(features), nn.Flatten(),
        nn.Linear(features * 8, features), nn.BatchNorm1d(features), SyncBatchNorm(features),
    )  # fmt: skip
    return model, torch.randn(4, 1, 2, 2, 2)


def unusual_model(features: int, **settings: float) -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose layers have other arguments than the usual ones, and an input; one is frozen."""
    unusual = [settings, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
    layers = [nn.BatchNorm1d(features, **arguments) for arguments in unusual]
    frozen = nn.BatchNorm1d(features).eval().requires_grad_(False)
    return nn.Sequential(*layers, nn.Tanh(), frozen), torch.randn(5, features)


def tied_model(features: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model that has one layer in three places, one of them in a child, and an input."""
    layer = nn.BatchNorm1d(features)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Sequential(layer)), torch.randn(5, features)


def lone_layer(features: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a layer alone, and an input."""
    return nn.BatchNorm2d(features), torch.randn(4, features, 2, 2)
