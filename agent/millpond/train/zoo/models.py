# SPDX-License-Identifier: Apache-2.0
"""Pure: small models, and models for small processors, for jobs without code of their own.

The factories take ``classes`` and the ``side`` of the square images in pixels. Their logits go into a cross
entropy, which has the softmax in it. MobileNetV2, ShuffleNet and EfficientNet-B0 take small images, see
``layers``.
"""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import avg_pool2d, silu

from millpond.train.zoo.layers import ConvNorm, pooled, strides


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


def mnist_cnn(classes: int = 10, side: int = 28, channels: int = 1) -> nn.Module:
    """Make a CNN of three convolutions for images [N, channels, side, side] from 8x8 on; 93,322 parameters
    for MNIST. Ember's paper (section 4) trains one of three convolutions, and does not print its layers.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(64 * (side // 8) ** 2, 64), nn.ReLU(), nn.Linear(64, classes)
    )


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


_MOBILENET = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
"""Expansion, channels and number of the blocks; the 2nd, 3rd, 4th and 6th row halve (its table 2)."""


class _SqueezeExcite(nn.Module):
    """Scales each channel by a share that follows from the means of all channels (Hu et al. 2018)."""

    def __init__(self, channels: int, middle: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, middle, 1), nn.Conv2d(middle, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        shares: Tensor = self.excite(silu(self.squeeze(mean))).sigmoid()
        return x * shares


class _InvertedResidual(nn.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        expansion: int,
        kernel: int = 3,
        activation: type[nn.Module] = nn.ReLU6,
        squeezed: int = 0,
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        widen = [ConvNorm(inputs, hidden, 1), activation()] if expansion > 1 else []
        depthwise = ConvNorm(hidden, hidden, kernel, stride=stride, groups=hidden)
        excite = [_SqueezeExcite(hidden, squeezed)] if squeezed else []
        self.layers = nn.Sequential(*widen, depthwise, activation(), *excite, ConvNorm(hidden, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


def mobilenet_v2(classes: int = 1000, side: int = 224, dropout: float = 0.2) -> nn.Module:
    """Make MobileNetV2 of Sandler et al. 2018, width 1, images [N, 3, side, side].

    3,504,872 parameters and 301 million multiply-adds for 1000 classes at 224x224, as published.
    """
    stem, second, third, fourth, sixth = strides(side)
    layers: list[nn.Module] = [ConvNorm(3, 32, 3, stride=stem), nn.ReLU6()]
    inputs = 32
    for row, stride in zip(_MOBILENET, (1, second, third, fourth, 1, sixth, 1), strict=True):
        expansion, channels, count = row
        for number in range(count):
            layers.append(_InvertedResidual(inputs, channels, 1 if number else stride, expansion))
            inputs = channels
    layers += [ConvNorm(inputs, 1280, 1), nn.ReLU6()]
    return nn.Sequential(*layers, *pooled(), nn.Dropout(dropout), nn.Linear(1280, classes))


_EFFICIENTNET = (
    (1, 16, 1, 3),
    (6, 24, 2, 3),
    (6, 40, 2, 5),
    (6, 80, 3, 3),
    (6, 112, 3, 5),
    (6, 192, 4, 5),
    (6, 320, 1, 3),
)
"""Expansion, channels, number and kernel of the blocks; the 2nd, 3rd, 4th and 6th row halve (its table 1)."""


def efficientnet_b0(classes: int = 1000, side: int = 224, dropout: float = 0.2) -> nn.Module:
    """Make EfficientNet-B0 of Tan and Le 2019, without stochastic depth, images [N, 3, side, side].

    5,288,548 parameters and 386 million multiply-adds for 1000 classes at 224x224; its table 2 has 5.3
    million and 0.39 billion.
    """
    stem, second, third, fourth, sixth = strides(side)
    layers: list[nn.Module] = [ConvNorm(3, 32, 3, stride=stem), nn.SiLU()]
    inputs = 32
    for row, stride in zip(_EFFICIENTNET, (1, second, third, fourth, 1, sixth, 1), strict=True):
        expansion, channels, count, kernel = row
        for number in range(count):
            first = 1 if number else stride
            layers.append(
                _InvertedResidual(inputs, channels, first, expansion, kernel, nn.SiLU, max(inputs // 4, 1))
            )
            inputs = channels
    layers += [ConvNorm(inputs, 1280, 1), nn.SiLU()]
    return nn.Sequential(*layers, *pooled(), nn.Dropout(dropout), nn.Linear(1280, classes))


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
        self.squeeze = ConvNorm(inputs, middle, 1, groups=groups)
        self.depthwise = ConvNorm(middle, middle, 3, stride=stride, groups=middle)
        self.expand = ConvNorm(middle, outputs - inputs if self.joins else outputs, 1, groups=_GROUPS)

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


def shufflenet(classes: int = 1000, side: int = 224, width: int = 1) -> nn.Module:
    """Make ShuffleNet (the first) of Zhang et al. 2017, 3 groups, ``width`` times the channels, images [N, 3,
    side, side].

    For 1000 classes at 224x224 it has 1,865,728 parameters and 137 million multiply-adds at width 1, and
    5,450,776 and 524 million at width 2. The paper has 137 and 524 million (its table 2) and no count of
    parameters; its authors' own program says 1.9 and 5.4 million.
    """
    stem, pool, *stages = strides(side)
    inputs = first = 24 * width
    layers: list[nn.Module] = [ConvNorm(3, first, 3, stride=stem), nn.ReLU()]
    if pool == 2:
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    for (channels, count), stride in zip(_SHUFFLENET, stages, strict=True):
        for number in range(count):
            groups = _GROUPS if inputs > first else 1  # its first has few channels, and no groups
            layers.append(_ShuffleUnit(inputs, width * channels, 1 if number else stride, groups))
            inputs = width * channels
    return nn.Sequential(*layers, *pooled(), nn.Linear(inputs, classes))
