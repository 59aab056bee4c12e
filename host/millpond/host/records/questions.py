# SPDX-License-Identifier: Apache-2.0
"""Pure: the answer of a fleet's devices to a question, as users see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millpond.train.questions.question import DataQuestion


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """The answer of ``devices`` to a question about folders: its ``figures`` by name, for each device too if
    it was not ``masked``, and why others are ``left_out``. Quantiles are asked for by histograms.
    ``noise`` is the standard deviation of the noise in each count of samples, 0 without.
    """

    kind: str
    question: DataQuestion
    folders: tuple[str, ...]
    masked: bool
    devices: tuple[str, ...]
    left_out: dict[str, str]
    figures: dict[str, Any]
    by_device: dict[str, dict[str, Any]]
    noise: float = 0.0
