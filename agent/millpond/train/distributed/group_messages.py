# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a confined script's exchanges: from its process, by its agent, to the host.

Every request is a collective: all workers make it, in the same order, and the answer comes when all have.
Bulk follows a head in GroupParts, so nobody between has to keep more than one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millpond.wire.messages import Kind, Message, message

GROUP_CHANNEL = "MILLPOND_GROUP_CHANNEL"
"""The variable of a confined script's environment that holds the descriptor of its channel."""
PART_BYTES = 1 << 18
"""The bytes of every GroupPart but the last."""
MOST_SAMPLES = 1 << 24
MOST_COUNT = 1 << 16
"""The most that a loss counts per sample, such as tokens."""
MOST_GROUPS = 64
LONGEST_NAME = 40
"""Most characters of a metric's name."""


@message("group.join", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class JoinGroup(Message):
    """Say that an exchange of this worker covers ``least`` samples or more. Answered by GroupJoined."""

    least: int


@message("group.joined")
@dataclass(frozen=True, slots=True)
class GroupJoined(Message):
    """The least samples of an exchange, by rank."""

    least: tuple[int, ...]


@message("group.gather", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Gather(Message):
    """Give all workers a number, such as that of samples. Answered by Gathered."""

    value: int


@message("group.gathered")
@dataclass(frozen=True, slots=True)
class Gathered(Message):
    """The numbers, by rank."""

    values: tuple[int, ...]


@message("group.share_state", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class ShareState(Message):
    """Give all workers ``size`` bytes of rank 0, whose GroupParts follow. Answered by SharedState."""

    size: int


@message("group.shared_state")
@dataclass(frozen=True, slots=True)
class SharedState(Message):
    """The bytes of rank 0 follow in GroupParts; none for rank 0."""

    size: int


@message("group.contribute", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Contribution(Message):
    """A worker's part of a step of the ``group``-th model: sums over ``samples`` samples, float32 [size] in
    GroupParts, none for 0 samples; the ``largest`` of their magnitudes; the ``seconds`` of its own work. The
    sums count ``count`` in the mean's divisor, such as tokens; the samples, if that is None.
    Answered by MeanOfStep.
    """

    group: int
    size: int
    samples: int
    seconds: float
    largest: float
    count: int | None = None

    @property
    def divisor(self) -> int:
        """The part of this worker in the mean's divisor."""
        return self.samples if self.count is None else self.count


@message("group.wanted")
@dataclass(frozen=True, slots=True)
class VectorWanted(Message):
    """All workers have come: a device's GroupParts are read now, and do not wait in its connection."""


@message("group.mean")
@dataclass(frozen=True, slots=True)
class MeanOfStep(Message):
    """A step's samples and seconds by rank; the mean over all samples follows in GroupParts."""

    samples: tuple[int, ...]
    seconds: tuple[float, ...]


@message("group.part", Kind.METRICS, payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class GroupPart(Message):
    """The bytes of a vector or state from ``start`` on."""

    start: int


@message("group.report", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class ReportMetric(Message):
    """Add up a metric: the ``total`` of ``samples`` samples. Answered by ReportedMetric."""

    name: str
    total: float
    samples: int


@message("group.reported")
@dataclass(frozen=True, slots=True)
class ReportedMetric(Message):
    """The sums over all workers."""

    total: float
    samples: int


GroupRequest = JoinGroup | Gather | ShareState | Contribution | ReportMetric


def parts(size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the GroupParts of ``size`` bytes."""
    return ((start, min(start + PART_BYTES, size)) for start in range(0, size, PART_BYTES))
