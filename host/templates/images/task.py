"""Handwritten digits: only the model, as data and loss of labelled images are the defaults."""

from torch import nn


def build(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )
