# SPDX-License-Identifier: Apache-2.0
"""Pure: models that come with millpond, for jobs without code of their own.

The factories take ``classes``, and some the ``side`` of the square images in pixels. Their logits go into a
cross entropy, which has the softmax in it.
"""

from __future__ import annotations

from torch import Tensor, nn


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
