"""The small networks that the lessons train.

`MLP` learns the 8x8 digits in seconds on two laptop cores. `resnet18_small` is torchvision's ResNet-18 with
its first layers fitted to small images. Both end in one score per class, without a softmax: the loss applies
it.

BatchNorm is an option in the MLP and built into the ResNet. It is the one layer here whose result depends on
the other rows of the batch, so it is the one layer that notices how the batch was divided among the ranks.

Left out on purpose: DDP. A model does not know that it is replicated; `programs/train.py` wraps it.

Shapes: N rows of this rank's batch, F input features, H hidden width, K classes, C image channels.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MLP", "resnet18_small"]


class MLP(nn.Module):
    """Two hidden layers and a score per class.

    Args:
        in_features: F, the numbers in one flattened input.
        hidden: H, the width of both hidden layers.
        classes: K, the number of scores.
        batchnorm: normalise each hidden layer over the batch, so that synchronising the statistics matters.
    """

    def __init__(self, in_features: int, hidden: int, classes: int, *, batchnorm: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Sequential(
            *hidden_layer(in_features, hidden, batchnorm),
            *hidden_layer(hidden, hidden, batchnorm),
        )
        self.scores = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)  # (N, C, height, width) or (N, F) -> (N, F)
        x = self.hidden(x)  # (N, H)
        return self.scores(x)  # (N, K)


def hidden_layer(in_features: int, out_features: int, batchnorm: bool) -> list[nn.Module]:
    # BatchNorm subtracts the mean, and with it any bias that was added before: the layer then needs none.
    layers: list[nn.Module] = [nn.Linear(in_features, out_features, bias=not batchnorm)]
    if batchnorm:
        layers.append(nn.BatchNorm1d(out_features))
    return [*layers, nn.ReLU()]


def resnet18_small(classes: int, in_channels: int = 3) -> nn.Module:
    """torchvision's ResNet-18, for images of about 32x32 instead of 224x224.

    The original begins with a 7x7 convolution of stride 2 and a max-pool of stride 2. Together they quarter a
    photograph of 224 pixels to 56. They would quarter 32 pixels to 8, and the three halvings that follow
    would leave a single pixel. So the first convolution is 3x3 with stride 1, and the max-pool is gone.

    Args:
        classes: K, the number of scores.
        in_channels: C, 3 for colour and 1 for grey images.

    Source: He et al. 2015 (arXiv 1512.03385), section 4.2, whose networks for 32x32 begin in the same way.
    """
    from torchvision.models import resnet18  # imported here: the rest of the course works without torchvision

    model = resnet18(weights=None, num_classes=classes)
    model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    # As torchvision initialises every convolution; a new nn.Conv2d has another default.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model  # (N, C, height, width) -> (N, K)
