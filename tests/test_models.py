"""The networks have the shapes and the sizes that their definitions promise."""

import pytest
import torch
from torch import nn

from ddp_course.models import MLP, resnet18_small


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_mlp_gives_one_score_per_class_for_images_and_for_flat_rows():
    model = MLP(64, 32, 10)
    images = torch.rand(5, 1, 8, 8)
    assert model(images).shape == (5, 10)
    assert torch.equal(model(images), model(images.flatten(1)))
    assert parameter_count(model) == (64 * 32 + 32) + (32 * 32 + 32) + (32 * 10 + 10) == 3466


def test_mlp_with_batchnorm_trades_each_bias_for_a_scale_and_a_shift():
    model = MLP(64, 32, 10, batchnorm=True)
    expected = (64 * 32 + 2 * 32) + (32 * 32 + 2 * 32) + (32 * 10 + 10)
    assert parameter_count(model) == expected == 3530
    assert sum(isinstance(layer, nn.BatchNorm1d) for layer in model.modules()) == 2


def test_mlp_with_batchnorm_depends_on_the_other_rows_of_the_batch():
    torch.manual_seed(0)
    x = torch.rand(6, 64)
    plain, normed = MLP(64, 32, 10), MLP(64, 32, 10, batchnorm=True)
    torch.testing.assert_close(plain(x)[:3], plain(x[:3]))
    assert (normed(x)[:3] - normed(x[:3])).abs().max() > 1e-3


def test_resnet18_small_keeps_the_image_until_the_stages_halve_it():
    model = resnet18_small(10).eval()
    x = torch.rand(2, 3, 32, 32)
    stem = model.maxpool(model.relu(model.bn1(model.conv1(x))))
    assert stem.shape == (2, 64, 32, 32)
    last_stage = model.layer4(model.layer3(model.layer2(model.layer1(stem))))
    assert last_stage.shape == (2, 512, 4, 4)
    assert model(x).shape == (2, 10)


@pytest.mark.parametrize(("classes", "in_channels"), [(10, 3), (10, 1), (7, 1)])
def test_resnet18_small_has_the_parameters_of_its_layers(classes, in_channels):
    def block(c_in: int, c_out: int) -> int:  # two 3x3 convolutions, each followed by BatchNorm
        shortcut = c_in * c_out + 2 * c_out if c_in != c_out else 0
        return 9 * c_in * c_out + 9 * c_out * c_out + 4 * c_out + shortcut

    stages = [(64, 64), (64, 128), (128, 256), (256, 512)]
    expected = 9 * in_channels * 64 + 2 * 64  # the stem
    expected += sum(block(c_in, c_out) + block(c_out, c_out) for c_in, c_out in stages)
    expected += 512 * classes + classes
    model = resnet18_small(classes, in_channels).eval()
    assert parameter_count(model) == expected
    assert model(torch.rand(2, in_channels, 8, 8)).shape == (2, classes)  # as small as the digits


def test_resnet18_small_initialises_its_new_stem_as_torchvision_does_the_others():
    torch.manual_seed(0)
    weight = resnet18_small(10).conv1.weight  # 64 x 3 x 3 x 3
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.05)  # fan_out = 64 * 3 * 3
