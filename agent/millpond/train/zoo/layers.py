# SPDX-License-Identifier: Apache-2.0
"""Pure: what the models of the zoo share: convolutions with BatchNorm, and strides that suit small images.

Published models for images halve their maps five times, so that the last ones have 7x7 pixels for the
published 224x224. For images so small that less than 3x3 would be left, the models of the zoo leave out the
first halvings: two of them at 32x32, one at 64x64. Nothing else changes, and no parameter.
"""

from __future__ import annotations

from torch import nn

_HALVINGS, _LEAST_MAP = 5, 3


def strides(side: int) -> list[int]:
    """Return the strides of the five layers that halve their maps: 1 for those that are left out."""
    halvings = next((n for n in range(_HALVINGS, 0, -1) if -(-side >> n) >= _LEAST_MAP), 0)
    return (_HALVINGS - halvings) * [1] + halvings * [2]


class ConvNorm(nn.Sequential):
    """A convolution that keeps the maps' size but for ``stride``, and a BatchNorm."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1, dilation: int = 1
    ) -> None:
        padding = dilation * (kernel // 2)
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False),
            nn.BatchNorm2d(outputs),
        )


def pooled() -> list[nn.Module]:
    """Return layers that average maps [N, channels, any, any] to [N, channels]."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
