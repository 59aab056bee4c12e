# SPDX-License-Identifier: Apache-2.0
"""Pure: models that come with millpond, for jobs without code of their own.

The factories take ``classes`` and the ``side`` of the square images in pixels. Their logits go into a cross
entropy, which has the softmax in it. MobileNetV2 and ShuffleNet halve their maps five times, so that the last
ones have 7x7 pixels for the published 224x224; for images so small that less than 3x3 would be left, they
leave out the first halvings: two of them at 32x32. Nothing else changes, and no parameter.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import avg_pool2d

_HALVINGS, _LEAST_MAP = 5, 3


class DigitsCNN(nn.Module):
    """Two convolutions and two linear layers for small grey images; 85,000 parameters at 8x8.

    No BatchNorm: its running statistics would mix what unlike devices see.
    """

    def __init__(self, classes: int = 10, side: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(64 * (side // 2) ** 2, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, classes] of images [N, 1, side, side]."""
        x = self.conv1(images).relu()
        x = self.pool(self.conv2(x).relu())
        logits: Tensor = self.head(self.hidden(x.flatten(1)).relu())
        return logits


def digits_cnn(classes: int = 10) -> nn.Module:
    """Make the model of the digits example: images 1x8x8."""
    return DigitsCNN(classes)


def cifar_cnn(classes: int = 10, side: int = 32, channels: int = 3, dropout: float = 0.5) -> nn.Module:
    """Make the CNN of the paper on aggregation by a DPU (its footnote 1), images [N, channels, side, side].

    2,029,642 parameters for CIFAR-10. As printed there: convolutions without padding, and no activation
    between the linear layers. Each worker's dropout is its own, so workers together are exactly one process
    only with ``dropout`` 0. Raises ValueError for a ``side`` under 16, whose maps would be empty.
    """
    left = ((side - 4) // 2 - 4) // 2
    if left < 1:
        raise ValueError(f"images of {side}x{side}: this model takes 16x16 and more")
    return nn.Sequential(
        *_two_convolutions(channels, 32, 64),
        *_two_convolutions(64, 128, 256),
        nn.Flatten(),
        nn.Linear(256 * left**2, 256),
        nn.Dropout(dropout),
        nn.Linear(256, classes),
    )


def _two_convolutions(inputs: int, middle: int, outputs: int) -> list[nn.Module]:
    first, second = nn.Conv2d(inputs, middle, 3), nn.Conv2d(middle, outputs, 3)
    return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2)]


def _strides(side: int) -> list[int]:
    """Return the strides of the five layers that halve their maps: 1 for those that are left out."""
    halvings = next((n for n in range(_HALVINGS, 0, -1) if -(-side >> n) >= _LEAST_MAP), 0)
    return (_HALVINGS - halvings) * [1] + halvings * [2]


class _ConvNorm(nn.Sequential):
    """A convolution that keeps the maps' size but for ``stride``, and a BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        padding = kernel // 2
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
        )


_MOBILENET = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
"""Expansion, channels and number of the blocks; the 2nd, 3rd, 4th and 6th row halve (its table 2)."""


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [_ConvNorm(inputs, hidden, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = _ConvNorm(hidden, hidden, 3, stride=stride, groups=hidden)
        self.layers = nn.Sequential(*widen, depthwise, nn.ReLU6(), _ConvNorm(hidden, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


def mobilenet_v2(classes: int = 1000, side: int = 224, dropout: float = 0.2) -> nn.Module:
    """Make MobileNetV2 of Sandler et al. 2018, width 1, images [N, 3, side, side].

    3,504,872 parameters and 301 million multiply-adds for 1000 classes at 224x224, as published.
    """
    stem, second, third, fourth, sixth = _strides(side)
    layers: list[nn.Module] = [_ConvNorm(3, 32, 3, stride=stem), nn.ReLU6()]
    inputs = 32
    for row, stride in zip(_MOBILENET, (1, second, third, fourth, 1, sixth, 1), strict=True):
        expansion, channels, count = row
        for number in range(count):
            layers.append(_InvertedResidual(inputs, channels, 1 if number else stride, expansion))
            inputs = channels
    layers += [_ConvNorm(inputs, 1280, 1), nn.ReLU6()]
    return nn.Sequential(*layers, *_pooled(), nn.Dropout(dropout), nn.Linear(1280, classes))


def _pooled() -> list[nn.Module]:
    """Average maps [N, channels, any, any] to [N, channels]."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


_SHUFFLENET = ((240, 4), (480, 8), (960, 4))
"""Channels and number of the units for 3 groups; the first of each row halves (its table 1)."""
_GROUPS = 3


class _ShuffleUnit(nn.Module):
    """A ShuffleNet unit: makes maps with ``outputs`` channels of maps with ``inputs``; where these differ,
    the input is a part of the output, halved if ``stride`` is 2.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.stride, self.joins = stride, inputs != outputs
        middle = outputs // 4
        self.squeeze = _ConvNorm(inputs, middle, 1, groups=groups)
        self.depthwise = _ConvNorm(middle, middle, 3, stride=stride, groups=middle)
        self.expand = _ConvNorm(middle, outputs - inputs if self.joins else outputs, 1, groups=_GROUPS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.squeeze(x).relu()
        y = self.expand(self.depthwise(_shuffle(y)))
        if not self.joins:
            return (x + y).relu()
        short = avg_pool2d(x, 3, self.stride, padding=1) if self.stride > 1 else x
        joined: Tensor = cat((short, y), 1)
        return joined.relu()


def _shuffle(x: Tensor) -> Tensor:
    """Take channels of all groups in turn, so that each group of the next layer sees a part of each."""
    count, channels, height, width = x.shape
    grouped = x.view(count, _GROUPS, channels // _GROUPS, height, width)
    return grouped.transpose(1, 2).reshape(count, channels, height, width)


def shufflenet(classes: int = 1000, side: int = 224) -> nn.Module:
    """Make ShuffleNet (the first) of Zhang et al. 2017, 3 groups, width 1, images [N, 3, side, side].

    1,865,728 parameters and 137 million multiply-adds for 1000 classes at 224x224. The paper has 137 million
    and no count of parameters; its authors' own program says 1.9 million.
    """
    stem, pool, *stages = _strides(side)
    layers: list[nn.Module] = [_ConvNorm(3, 24, 3, stride=stem), nn.ReLU()]
    if pool == 2:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    inputs = 24
    for (channels, count), stride in zip(_SHUFFLENET, stages, strict=True):
        for number in range(count):
            groups = _GROUPS if inputs > 24 else 1  # its first has few channels, and no groups
            layers.append(_ShuffleUnit(inputs, channels, 1 if number else stride, groups))
            inputs = channels
    return nn.Sequential(*layers, *_pooled(), nn.Linear(inputs, classes))
