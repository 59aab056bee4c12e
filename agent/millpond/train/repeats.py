# SPDX-License-Identifier: Apache-2.0
"""Pure: how often a mini-epoch is repeated: a number, or rules that look at the fetch and at scores.

A score is the weighted sum of a loss and two errors, lower is better, see ``Weights``; it is known after each
repetition. The rules on scores are those of mini-epoch training (Xu et al., *Data-Aware Storage Tiering for
Deep Learning*, section III.C): "score" and "bollinger" as printed, but none repeats for ever. "bands" has an
upper side, too: the lower side alone stops where the model improves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Final, Protocol

from millpond.base.errors import ConfigError
from millpond.base.schema import load, nearest

MOST = 128
"""Repetitions of one mini-epoch by a rule, as many as the paper's largest."""
Weights = tuple[float, float, float]
"""Weights of the training loss, the training error and the validation error in a score (the paper's
Fig. 6)."""
LOSS_ALONE: Final[Weights] = (1.0, 0.0, 0.0)


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
    weights: Weights = LOSS_ALONE

    def __post_init__(self) -> None:
        _check(self.weights, patience=(self.patience, 1), most=(self.most, 1))

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        return progress.done < self.most and not _is_stuck(progress, self.patience)


@dataclass(frozen=True, slots=True)
class BandedRepeats:
    """Repetitions until a score leaves the Bollinger band: the mean of the last ``period`` scores and
    ``width`` standard deviations on either side. Beyond the upper side the model gets worse on what is held
    out; beyond the lower one, by a score of the training loss, it learns the mini-epoch by heart. Until there
    are so many scores, it repeats ``first`` times. Without ``upper`` the band has a lower side alone, as in
    the paper.
    """

    period: int = 10
    width: float = 2.0
    first: int = 4
    most: int = MOST
    weights: Weights = LOSS_ALONE
    upper: bool = True

    def __post_init__(self) -> None:
        _check(self.weights, period=(self.period, 2), first=(self.first, 1), most=(self.most, 1))
        if not 0 <= self.width < math.inf:
            raise ValueError(f"width: {self.width} is less than 0, or not finite")

    def goes_on(self, progress: RepeatHistory, /) -> bool:
        known = [*progress.before, *progress.scores]
        if progress.done >= self.most or not progress.scores:
            return progress.done < min(self.first, self.most)
        band = known[-self.period - 1 : -1]
        if len(band) < self.period:
            return progress.done < self.first
        above, most = known[-1] - fmean(band), self.width * stdev(band)
        return -most <= above and (above <= most or not self.upper)


def _is_stuck(progress: RepeatHistory, patience: int) -> bool:
    """Return whether the last ``patience`` scores of a mini-epoch did not beat the best one before them."""
    known = [*progress.before, *progress.scores]
    if len(progress.scores) < patience or len(known) <= patience:
        return False
    return min(known[-patience:]) >= min(known[:-patience])


def _check(weights: Weights, **least: tuple[int, int]) -> None:
    """Refuse weights without a meaning, and numbers below their least. Raises ValueError."""
    for name, (value, bound) in least.items():
        if value < bound:
            raise ValueError(f"{name}: {value} is less than {bound}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights: {weights} are not three numbers from 0 on, one of them above 0")


RULES: Final[Mapping[str, RepeatRule]] = {
    "auto": AutoRepeats(),
    "score": ScoredRepeats(),
    "bands": BandedRepeats(),
    "bollinger": BandedRepeats(upper=False),
}
"""The rules by their names."""


def rule_of(given: int | str | RepeatRule) -> RepeatRule:
    """Return the rule of a number, or of a name of RULES. Raises ValueError."""
    if isinstance(given, int):
        return FixedRepeats(given)
    if isinstance(given, str):
        if given not in RULES:
            raise ValueError(f"repeat: '{given}' is no number, and none of {', '.join(RULES)}")
        return RULES[given]
    return given


@dataclass(frozen=True, slots=True)
class RepeatSpec:
    """The rule of a job by its ``name``, with its ``arguments``. Without a name a mini-epoch is repeated in
    all epochs of a round.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)

    def rule(self, epochs: int, where: str = "train: repeat") -> RepeatRule:
        """Return the rule, which repeats ``epochs`` times at most. "auto" goes by the clock, so a job that is
        done again would not give the same model: it is for scripts alone. Raises ConfigError.
        """
        if not self.name:
            return FixedRepeats(epochs)
        found = RULES.get(self.name)
        if not isinstance(found, ScoredRepeats | BandedRepeats):
            known = [name for name in RULES if name != "auto"]
            why = "; it goes by the clock, and jobs are repeatable" if self.name == "auto" else ""
            raise ConfigError(
                f"{where}: there is no rule '{self.name}' in jobs{why or nearest(self.name, known)}"
            )
        if taken := {"most", "upper"} & self.arguments.keys():
            raise ConfigError(f"{where}: {min(taken)}: there is no such key")
        upper = {} if isinstance(found, ScoredRepeats) else {"upper": found.upper}
        try:
            return load(type(found), {**self.arguments, **upper, "most": epochs}, where)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None


def weights_of(rule: RepeatRule) -> Weights:
    """Return the weights of a score for a rule: those of its own, or the loss alone."""
    found: Weights = getattr(rule, "weights", LOSS_ALONE)
    return found


def score_of(rule: RepeatRule, loss: float, train_error: float | None, held_error: float | None) -> float:
    """Return the score of a repetition by the weights of ``rule``; a rule without weights goes by the loss
    alone. Raises ValueError for an error that has a weight and is not known, and for a score that is not
    finite.
    """
    known = {"loss": loss, "train_error": train_error, "validation_error": held_error}
    total = 0.0
    for weight, (name, value) in zip(weights_of(rule), known.items(), strict=True):
        if weight and value is None:
            raise ValueError(f"the rule weighs the {name}, which was not reported")
        total += weight * (value or 0.0)
    if not math.isfinite(total):
        raise ValueError(f"a score of {total} says nothing: the training has diverged")
    return total
