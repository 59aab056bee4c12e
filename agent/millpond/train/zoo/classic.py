# SPDX-License-Identifier: Apache-2.0
"""Pure: the models that FireCaffe's table 1 compares, of the years before BatchNorm.

Their factories take ``classes`` and the ``side`` of the square images in pixels. Of small images, see
``layers``.
"""

from __future__ import annotations

from torch import Tensor, cat, nn

from millpond.train.zoo.layers import pooled, strides


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int | None = None
) -> list[nn.Module]:
    around = kernel // 2 if padding is None else padding
    return [nn.Conv2d(inputs, outputs, kernel, stride, around), nn.ReLU()]


def _pool(stride: int) -> list[nn.Module]:
    """Return the pooling of a halving, nothing for one that is left out."""
    return [nn.MaxPool2d(3, 2, ceil_mode=True)] if stride == 2 else []


def alexnet(classes: int = 1000, side: int = 224) -> nn.Module:
    """Make AlexNet of Krizhevsky et al. 2012 on one processor, without groups of channels, images [N, 3,
    side, side] from 7x7 on.

    62,378,344 parameters, the 249 MB of FireCaffe's table 1, for 1000 classes.
    """
    stem, second, *pools = strides(side - 6)  # which the first convolution takes away
    layers = [
        *_conv(3, 96, 11, stem * second, 2), nn.LocalResponseNorm(5, k=2.0), *_pool(pools[0]),
        *_conv(96, 256, 5), nn.LocalResponseNorm(5, k=2.0), *_pool(pools[1]),
        *_conv(256, 384, 3), *_conv(384, 384, 3), *_conv(384, 256, 3), *_pool(pools[2]),
    ]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(6), *_dense(256 * 36, 4096, classes))


def _dense(inputs: int, hidden: int, classes: int) -> list[nn.Module]:
    return [
        *(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)),
    ]


def vgg19(classes: int = 1000, side: int = 224) -> nn.Module:
    """Make VGG-19 of Simonyan and Zisserman 2014 (its configuration E), images [N, 3, side, side].

    143,667,240 parameters for 1000 classes; its table 2 has 144 million.
    """
    layers, inputs = list[nn.Module](), 3
    for outputs, count, stride in zip((64, 128, 256, 512, 512), (2, 2, 4, 4, 4), strides(side), strict=True):
        for _ in range(count):
            layers += _conv(inputs, outputs, 3)
            inputs = outputs
        layers += [nn.MaxPool2d(2)] if stride == 2 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), *_dense(512 * 49, 4096, classes))


def nin(classes: int = 1000, side: int = 224) -> nn.Module:
    """Make Network in Network of Lin et al. 2013 as its authors trained it on ImageNet, images [N, 3, side,
    side] from 11x11 on, with the first weights of FireCaffe's section 7.1: normal, deviation 0.01 for 1x1
    convolutions and 0.05 for others, no bias.

    7,595,176 parameters, the 30 MB of FireCaffe's table 1, for 1000 classes.
    """
    stem, second, *pools = strides(side - 10)
    layers = [
        *_conv(3, 96, 11, stem * second, 0), *_conv(96, 96, 1), *_conv(96, 96, 1), *_pool(pools[0]),
        *_conv(96, 256, 5), *_conv(256, 256, 1), *_conv(256, 256, 1), *_pool(pools[1]),
        *_conv(256, 384, 3), *_conv(384, 384, 1), *_conv(384, 384, 1), *_pool(pools[2]), nn.Dropout(),
        *_conv(384, 1024, 3), *_conv(1024, 1024, 1), *_conv(1024, classes, 1),
    ]  # fmt: skip
    model = nn.Sequential(*layers, *pooled())
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, 0.0, 0.01 if layer.kernel_size == (1, 1) else 0.05)
            _fill_bias(layer, 0.0)
    return model


def _fill_bias(layer: nn.Conv2d | nn.Linear, value: float) -> None:
    assert layer.bias is not None
    nn.init.constant_(layer.bias, value)


class _Inception(nn.Module):
    def __init__(self, inputs: int, one: int, to_3: int, three: int, to_5: int, five: int, pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*layers)
            for layers in (
                _conv(inputs, one, 1),
                _conv(inputs, to_3, 1) + _conv(to_3, three, 3),
                _conv(inputs, to_5, 1) + _conv(to_5, five, 5),
                [nn.MaxPool2d(3, 1, 1), *_conv(inputs, pool, 1)],
            )
        )
        self.outputs = one + three + five + pool

    def forward(self, x: Tensor) -> Tensor:
        return cat([branch(x) for branch in self.branches], 1)


_INCEPTIONS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    ((192, 96, 208, 16, 48, 64),),
    ((160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64)),
    ((256, 160, 320, 32, 128, 128),),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""The modules (its table 1), from one place to the next at which the network pools or has a second head."""


class GoogLeNet(nn.Module):
    """Makes logits [N, classes] of images [N, 3, side, side]; in training, with two ``heads`` more, a list of
    three: the paper adds the losses of the last two with weight 0.3.
    """

    def __init__(self, classes: int, side: int, *, heads: bool) -> None:
        super().__init__()
        stem, *pools = strides(side)
        layers: list[nn.Module] = [*_conv(3, 64, 7, stem), *_pool(pools[0]), nn.LocalResponseNorm(5)]
        layers += [*_conv(64, 64, 1), *_conv(64, 192, 3), nn.LocalResponseNorm(5), *_pool(pools[1])]
        inputs, parts = 192, []
        for number, rows in enumerate(_INCEPTIONS):
            for row in rows:
                layers.append(_Inception(inputs, *row))
                inputs = layers[-1].outputs  # type: ignore[assignment]
            layers += _pool(pools[2]) if number == 0 else _pool(pools[3]) if number == 3 else []
            if number in (1, 2, 4):
                parts.append(nn.Sequential(*layers))
                layers = []
        self.parts = nn.ModuleList(parts)
        self.heads = nn.ModuleList([_head(512, classes), _head(528, classes)] if heads else [])
        self.last = nn.Sequential(*pooled(), nn.Dropout(0.4), nn.Linear(1024, classes))

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        """Return the logits of images."""
        found, x = list[Tensor](), images
        for number, part in enumerate(self.parts):
            x = part(x)
            if self.training and number < len(self.heads):
                found.append(self.heads[number](x))
        logits: Tensor = self.last(x)
        return [logits, *found] if found else logits


def _head(inputs: int, classes: int) -> nn.Module:
    pool = [nn.AvgPool2d(5, 3, ceil_mode=True), nn.AdaptiveAvgPool2d(4)]  # 4x4 of 14x14 as published
    dense = [nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(), nn.Dropout(0.7), nn.Linear(1024, classes)]
    return nn.Sequential(*pool, *_conv(inputs, 128, 1), *dense)


def googlenet(classes: int = 1000, side: int = 224, heads: bool = False) -> nn.Module:
    """Make GoogLeNet of Szegedy et al. 2014, images [N, 3, side, side], with FireCaffe's first weights
    (section 7.1): Xavier, each bias 0.2.

    6,998,552 parameters for 1000 classes, 13,378,280 with the two ``heads`` that the paper adds for training:
    the 54 MB of FireCaffe's table 1.
    """
    model = GoogLeNet(classes, side, heads=heads)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            _fill_bias(layer, 0.2)
    return model


def speech_dnn(classes: int = 9304, inputs: int = 429, layers: int = 7, width: int = 2048) -> nn.Module:
    """Make the network for speech of Seide et al. 2011: fully connected ``layers`` of ``width`` sigmoids, of
    eleven frames with 39 features [N, inputs] the logits of 9304 senones. 45,122,648 parameters.
    """
    hidden, size = list[nn.Module](), inputs
    for _ in range(layers):
        hidden += [nn.Linear(size, width), nn.Sigmoid()]
        size = width
    return nn.Sequential(*hidden, nn.Linear(size, classes))
