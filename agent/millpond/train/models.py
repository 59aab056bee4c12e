"""Pure: models that come with millpond, for jobs without code of their own."""

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
        """Logits [N, classes] of images [N, 1, side, side]."""
        x = self.conv1(images).relu()
        x = self.pool(self.conv2(x).relu())
        logits: Tensor = self.head(self.hidden(x.flatten(1)).relu())
        return logits


def digits_cnn(classes: int = 10) -> nn.Module:
    """The model of the digits example: images 1x8x8."""
    return DigitsCNN(classes)
