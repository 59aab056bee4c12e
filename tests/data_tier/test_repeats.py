# SPDX-License-Identifier: Apache-2.0
"""The rules that say how often a mini-epoch is repeated."""

from __future__ import annotations

import pytest

from millpond.data.tier.repeats import (
    AutoRepeats,
    BandedRepeats,
    FixedRepeats,
    RepeatHistory,
    RepeatRule,
    ScoredRepeats,
    rule_of,
)


def repetitions(rule: RepeatRule, scores: list[float], before: list[float], there_at: int = 99) -> int:
    """How often a mini-epoch with these scores is repeated."""
    for done in range(1, len(scores) + 1):
        if not rule.goes_on(RepeatHistory(done, done >= there_at, scores[:done], before)):
            return done
    return len(scores) + 1


def test_rules_without_scores() -> None:
    assert repetitions(FixedRepeats(4), [0.0] * 9, []) == 4
    assert repetitions(AutoRepeats(), [], []) == 1
    for there_at in (1, 5):
        done = 1
        while AutoRepeats(most=8).goes_on(RepeatHistory(done, done >= there_at)):
            done += 1
        assert done == there_at
    assert not AutoRepeats(most=8).goes_on(RepeatHistory(8, False))


def test_auto_waits_where_accuracy_suffers() -> None:
    assert repetitions(AutoRepeats(), [3.0, 2.9, 3.1, 3.2, 1.0], [3.5]) == 4
    assert repetitions(AutoRepeats(), [3.0, 2.9, 2.8, 2.7, 2.6], [3.5], there_at=5) == 5


def test_scores_end_repetitions_when_the_best_is_not_beaten() -> None:
    assert repetitions(ScoredRepeats(patience=3), [3, 2, 1, 1, 2, 1, 0], []) == 6
    assert repetitions(ScoredRepeats(patience=2), [3, 2.5, 2.4], [1.0, 2.0]) == 2
    assert repetitions(ScoredRepeats(most=5), [9, 8, 7, 6, 5, 4], []) == 5


def test_bands_have_two_sides() -> None:
    usual = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]
    rule = BandedRepeats(period=10, width=2.0)
    assert repetitions(rule, [1.05, 0.95, 1.0, 1.0, 1.5, 1.0], usual) == 5  # worse
    assert repetitions(rule, [1.05, 0.95, 0.5, 1.0, 1.0], usual) == 3  # better than can be learnt
    assert repetitions(rule, [1.05, 0.95, 1.0, 1.0, 0.95], usual) == 6
    assert repetitions(rule, [5.0, 1.0, 9.0, 0.0, 7.0], []) == 4  # as long as there is no band


def test_names() -> None:
    assert rule_of(3) == FixedRepeats(3) and rule_of("auto") == AutoRepeats()
    assert rule_of(ScoredRepeats(9)) == ScoredRepeats(9)
    for given, told in ((0, "0 is less than 1"), ("bollinger", "'bollinger' is no number, and none of auto")):
        with pytest.raises(ValueError, match=told):
            rule_of(given)
