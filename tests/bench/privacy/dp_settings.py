# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the settings that differential privacy is measured with, ours and those of central training,
and their models.

They were found at epsilon 8 by a search over rounds, clips, rates, local steps and momentum, in other
divisions of the digits than the rows have; neither side pays for the search. At smaller epsilons clip and
rate are smaller by the root of the epsilons, on both sides: there is more noise in a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from millpond.train.zoo.models import digits_cnn

PIXELS, CLASSES = 64, 10
_EPSILON = 8.0
_VALUES = {"linear": "a linear model of 650 values", "cnn": "the demo's CNN of 85,066 values"}


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained with noise. A unit's difference, of full local ``steps`` at ``rate``, has the
    norm ``clip`` at most; the server has ``momentum``. The noise is planned for all ``rounds``.
    """

    model: Literal["linear", "cnn"]
    rounds: int
    clip: float
    rate: float
    momentum: float = 0.5
    steps: int = 1

    def at(self, epsilon: float) -> Training:
        """Return the training for another epsilon than that of the search."""
        factor = math.sqrt(epsilon / _EPSILON)
        return replace(self, clip=factor * self.clip, rate=factor * self.rate)

    def told(self, what: str, epsilon: float) -> str:
        """Return the words of a row."""
        told = f"accuracy of the demo's task: {what}, {_VALUES[self.model]}"
        return f"{told}, epsilon {epsilon:g}, {self.rounds} rounds"


@dataclass(frozen=True, slots=True)
class Setting:
    """A job over ``devices``, with groups of ``group`` samples."""

    name: str
    what: str
    unit: Literal["device", "group"]
    devices: int
    group: int
    training: Training


@dataclass(frozen=True, slots=True)
class Central:
    """Central training on units of ``samples`` samples each. With a ``batch`` not all units are in each
    round, but each with the probability of so many on average: that hides units, too.
    """

    name: str
    what: str
    samples: int
    training: Training
    batch: int = 0


_SAMPLES = Training("linear", 8, 8.0, 5.0)
_GROUPS = Training("linear", 12, 2.0, 3.0)
_DEVICES = Training("linear", 12, 0.25, 0.17, steps=10)

SETTINGS = (
    Setting("sample6", "6 devices, each sample a unit", "group", 6, 1, _SAMPLES),
    Setting("group6", "6 devices, groups of 8", "group", 6, 8, _GROUPS),
    Setting("group20", "20 devices, groups of 8", "group", 20, 8, _GROUPS),
    Setting("device6", "6 devices, each a unit", "device", 6, 8, _DEVICES),
    Setting("device20", "20 devices, each a unit", "device", 20, 8, _DEVICES),
    Setting("cnn6", "6 devices, groups of 8", "group", 6, 8, Training("cnn", 20, 0.25, 1.0)),
)

CENTRAL = (
    Central("sample", "each sample a unit, all of them in each round", 1, _SAMPLES),
    Central("group", "groups of 8, all of them in each round", 8, _GROUPS),
    Central(
        "device20", "20 parts, each a unit, all of them in each round", 71, Training("linear", 12, 0.25, 0.5)
    ),
    Central("drawn", "each sample a unit, amplified by sampling", 1, Training("linear", 110, 2.0, 2.0), 256),
    Central(
        "cnn_drawn", "each sample a unit, amplified by sampling", 1, Training("cnn", 460, 0.25, 0.25, 0.0), 64
    ),
)

PEERS = (("sample6", "sample"), ("group6", "group"), ("group20", "group"), ("device20", "device20"))
"""Our settings, and the central ones on the same units."""


def _linear() -> list[nn.Module]:
    """Return a linear model, which begins with zeros, of pixels [..., 64] of mean 0 and deviation 1."""
    head = nn.Linear(PIXELS, CLASSES)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return [nn.LayerNorm(PIXELS, elementwise_affine=False), head]


def model(name: str) -> nn.Module:
    """Return a model of images [n, 1, 8, 8]."""
    return digits_cnn() if name == "cnn" else nn.Sequential(nn.Flatten(), *_linear())


def model_of_units(name: str) -> nn.Module:
    """Return a model of units of images [n, samples, 64]; those of the CNN are single samples."""
    return (
        nn.Sequential(nn.Unflatten(2, (8, 8)), digits_cnn()) if name == "cnn" else nn.Sequential(*_linear())
    )
