# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages of questions about the samples of all devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.train.questions.question import DataQuestion
from millpond.wire.messages import Message, message

COUNT_SECONDS = 600.0
MOST_COUNT_SECONDS = 86_400.0


@message("api.ask")
@dataclass(frozen=True, slots=True)
class AskFleet(Message):
    """Ask a question about ``folders`` of these devices, of all without any; answered by FleetAnswer. Without
    ``masked`` each device tells the host its own sums. A question about a model is about that of a
    ``job``, or of its ``best`` score. With ``rho`` above 0 the sums have noise of that cost. A device that
    needs more than ``deadline`` seconds to count is left out.
    """

    question: DataQuestion
    folders: tuple[str, ...]
    devices: tuple[str, ...] = ()
    masked: bool = True
    rho: float = 0.0
    job: int = 0
    best: bool = False
    deadline: float = COUNT_SECONDS


@message("api.ask.answer")
@dataclass(frozen=True, slots=True)
class FleetAnswer(Message):
    """The sums over ``devices``, those of each device if they are not masked, why others are ``left_out``,
    and the standard deviation of the ``noise`` in each sum.
    """

    words: tuple[int, ...]
    devices: tuple[str, ...]
    by_device: dict[str, tuple[int, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    noise: float = 0.0
