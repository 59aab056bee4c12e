# SPDX-License-Identifier: Apache-2.0
"""Pure: residual networks, and a network for segmentation on top of one.

Their factories take ``classes`` and the ``side`` of the square images in pixels. Of small images, see
``layers``.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import interpolate

from millpond.train.zoo.layers import ConvNorm, pooled, strides


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) + self.short(x)
        return y.relu()


def _basic(inputs: int, width: int, stride: int, dilation: int) -> _Residual:
    first = ConvNorm(inputs, width, 3, stride=stride, dilation=dilation)
    return _Residual(inputs, width, stride, [first, nn.ReLU(), ConvNorm(width, width, 3, dilation=dilation)])


def _bottleneck(inputs: int, width: int, stride: int, dilation: int) -> _Residual:
    narrow, middle = ConvNorm(inputs, width, 1, stride=stride), ConvNorm(width, width, 3, dilation=dilation)
    wide = ConvNorm(width, 4 * width, 1)
    return _Residual(inputs, 4 * width, stride, [narrow, nn.ReLU(), middle, nn.ReLU(), wide])


_RESNET50 = (3, 4, 6, 3)


def _stages(counts: tuple[int, ...], side: int, *, deep: bool, channels: int = 3) -> list[nn.Sequential]:
    """Return the first layers and the four stages; ``deep`` for blocks of three convolutions."""
    stem, pool, *halvings = strides(side)
    first: list[nn.Module] = [ConvNorm(channels, 64, 7, stride=stem), nn.ReLU()]
    found = [nn.Sequential(*first, *([nn.MaxPool2d(3, 2, 1)] if pool == 2 else []))]
    inputs = 64
    for number, (count, stride) in enumerate(zip(counts, (1, *halvings), strict=True)):
        found.append(_stage(inputs, 64 << number, count, stride, deep=deep))
        inputs = (64 << number) * (4 if deep else 1)
    return found


def _stage(
    inputs: int, width: int, count: int, stride: int, *, deep: bool, dilation: int = 1
) -> nn.Sequential:
    make, outputs = (_bottleneck, 4 * width) if deep else (_basic, width)
    rest = [make(outputs, width, 1, dilation) for _ in range(count - 1)]
    return nn.Sequential(make(inputs, width, stride, dilation), *rest)


def resnet18(classes: int = 1000, side: int = 224) -> nn.Module:
    """Make ResNet-18 of He et al. 2015, images [N, 3, side, side].

    11,689,512 parameters and 1.81 billion multiply-adds for 1000 classes at 224x224; its table 1 has 1.8.
    """
    return nn.Sequential(*_stages((2, 2, 2, 2), side, deep=False), *pooled(), nn.Linear(512, classes))


def resnet50(classes: int = 1000, side: int = 224) -> nn.Module:
    """Make ResNet-50 of He et al. 2015, images [N, 3, side, side]; blocks halve in their first convolution,
    as printed, where later versions halve in the second.

    25,557,032 parameters and 3.86 billion multiply-adds for 1000 classes at 224x224; its table 1 has 3.8.
    """
    return nn.Sequential(*_stages(_RESNET50, side, deep=True), *pooled(), nn.Linear(2048, classes))


class _Pyramid(nn.Module):
    """Looks at maps with holes of several sizes, and at their mean (atrous spatial pyramid pooling)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        rates = [ConvNorm(inputs, outputs, 3, dilation=rate) for rate in (6, 12, 18)]
        self.branches = nn.ModuleList([ConvNorm(inputs, outputs, 1), *rates])
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvNorm(inputs, outputs, 1))
        self.join = nn.Sequential(ConvNorm(5 * outputs, outputs, 1), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        found = [branch(x).relu() for branch in self.branches]
        found.append(self.mean(x).relu().expand_as(found[0]))
        joined: Tensor = self.join(cat(found, 1))
        return joined


class DeepLabV3Plus(nn.Module):
    """Makes logits [N, classes, H, W], one for each pixel, of images [N, channels, H, W]."""

    def __init__(self, classes: int, side: int, channels: int) -> None:
        super().__init__()
        stem, self.low, *deep = _stages(_RESNET50, side, deep=True, channels=channels)[:4]
        self.stem = stem
        self.high = nn.Sequential(*deep, _stage(1024, 512, 3, 1, deep=True, dilation=2), _Pyramid(2048, 256))
        self.narrow = nn.Sequential(ConvNorm(256, 48, 1), nn.ReLU())
        convolutions = [ConvNorm(256 + 48, 256, 3), nn.ReLU(), ConvNorm(256, 256, 3), nn.ReLU()]
        self.decoder = nn.Sequential(*convolutions, nn.Conv2d(256, classes, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        low = self.low(self.stem(images))
        high = interpolate(self.high(low), low.shape[-2:], mode="bilinear", align_corners=False)
        logits = self.decoder(cat((high, self.narrow(low)), 1))
        return interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)


def deeplab_v3_plus(classes: int = 21, side: int = 512, channels: int = 3) -> nn.Module:
    """Make DeepLabv3+ of Chen et al. 2018 on a ResNet-50 whose last stage has holes in place of its halving,
    as Kurth et al. 2018 use it for climate with 16 channels. Batches of training have two images and more.
    """
    return DeepLabV3Plus(classes, side, channels)
