# SPDX-License-Identifier: Apache-2.0
"""Pure: how often a mini-epoch is repeated: a number, or rules that look at the fetch and at scores.

A score is a loss or an error, lower is better, which the caller reports after each repetition. The rules on
scores are those of mini-epoch training (Xu et al., *Data-Aware Storage Tiering for Deep Learning*), with two
differences: a band has an upper side, too, as its lower side alone stops where the model improves; and no
rule repeats for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Protocol

MOST = 128
"""Repetitions of one mini-epoch by a rule, as many as the paper's largest."""


@dataclass(frozen=True, slots=True)
class RepeatHistory:
    """A mini-epoch that has been repeated ``done`` times: whether the ``next_is_there``, the ``scores`` of
    its repetitions, and all scores ``before`` it.
    """

    done: int
    next_is_there: bool
    scores: Sequence[float] = ()
    before: Sequence[float] = ()


class RepeatRule(Protocol):
    """Decides after each repetition."""

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        """Return whether the mini-epoch is repeated once more."""


@dataclass(frozen=True, slots=True)
class FixedRepeats:
    """As many repetitions as this."""

    times: int

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ValueError(f"repeat: {self.times} is less than 1")

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        return progress.done < self.times


@dataclass(frozen=True, slots=True)
class AutoRepeats:
    """The fewest repetitions that hide the fetch: until the next mini-epoch is there. That is the paper's
    ``rf >= EB1 / B2``, consumption over the bandwidth of the slow tier, without an estimate of either.

    Where accuracy suffers it waits instead: a mini-epoch whose last ``patience`` scores are all worse than
    the best one before is not repeated any more.
    """

    most: int = MOST
    patience: int = 2

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        if progress.next_is_there or progress.done >= self.most:
            return False
        return not _is_stuck(progress, self.patience)


@dataclass(frozen=True, slots=True)
class ScoredRepeats:
    """Repetitions until the best score of all so far has not been beaten ``patience`` times in a row (the
    paper's Fig. 6).
    """

    patience: int = 3
    most: int = MOST

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        return progress.done < self.most and not _is_stuck(progress, self.patience)


@dataclass(frozen=True, slots=True)
class BandedRepeats:
    """Repetitions until a score leaves the Bollinger band: the mean of the last ``period`` scores and
    ``width`` standard deviations on either side. Beyond the upper side the model gets worse on what is held
    out; beyond the lower one, by a score of the training loss, it learns the mini-epoch by heart. Until there
    are so many scores, it repeats ``first`` times.
    """

    period: int = 10
    width: float = 2.0
    first: int = 4
    most: int = MOST

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        known = [*progress.before, *progress.scores]
        if progress.done >= self.most or not progress.scores:
            return progress.done < min(self.first, self.most)
        band = known[-self.period - 1 : -1]
        if len(band) < self.period:
            return progress.done < self.first
        return abs(known[-1] - fmean(band)) <= self.width * stdev(band)


def _is_stuck(progress: RepeatHistory, patience: int) -> bool:
    """Return whether the last ``patience`` scores of a mini-epoch did not beat the best one before them."""
    known = [*progress.before, *progress.scores]
    if len(progress.scores) < patience or len(known) <= patience:
        return False
    return min(known[-patience:]) >= min(known[:-patience])


def rule_of(given: int | str | RepeatRule) -> RepeatRule:
    """Return the rule of a number, or of "auto", "score", "bands". Raises ValueError."""
    if isinstance(given, int):
        return FixedRepeats(given)
    if isinstance(given, str):
        named: dict[str, RepeatRule] = {
            "auto": AutoRepeats(),
            "score": ScoredRepeats(),
            "bands": BandedRepeats(),
        }
        if given not in named:
            raise ValueError(f"repeat: '{given}' is no number, and none of {', '.join(named)}")
        return named[given]
    return given
