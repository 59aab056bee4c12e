# SPDX-License-Identifier: Apache-2.0
"""The rules that say how often a mini-epoch is repeated."""

from __future__ import annotations

import math

import pytest

from millpond.base.errors import ConfigError
from millpond.train.repeats import (
    AutoRepeats,
    BandedRepeats,
    FixedRepeats,
    RepeatHistory,
    RepeatRule,
    RepeatSpec,
    ScoredRepeats,
    rule_of,
    score_of,
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


def test_the_papers_band_has_a_lower_side_alone() -> None:
    usual = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]
    for rule, worse in ((rule_of("bands"), 2), (rule_of("bollinger"), 4)):
        assert repetitions(rule, [1.05, 1.5, 1.0], usual) == worse
        assert repetitions(rule, [1.05, 0.5, 1.0], usual) == 2


def test_a_score_is_the_weighted_sum_of_a_loss_and_two_errors() -> None:
    rule = ScoredRepeats(weights=(0.5, 1.0, 2.0))
    assert score_of(rule, 4.0, 0.3, 0.1) == pytest.approx(2.5)
    assert score_of(AutoRepeats(), 4.0, None, None) == score_of(ScoredRepeats(), 4.0, 9.0, None) == 4.0
    for scored, told in (
        ((4.0, None, 0.1), "the rule weighs the train_error, which was not reported"),
        ((math.nan, 0.3, 0.1), "a score of nan says nothing: the training has diverged"),
    ):
        with pytest.raises(ValueError, match=told):
            score_of(rule, *scored)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("auto", {}, "there is no rule 'auto' in jobs; it goes by the clock"),
        ("bolinger", {}, "there is no rule 'bolinger' in jobs; did you mean 'bollinger'"),
        ("score", {"weights": [0, 0, 0]}, "weights: .* are not three numbers from 0 on"),
        ("score", {"weights": [1, 0]}, "weights: expected 3 values, got 2"),
        ("score", {"patience": 0}, "patience: 0 is less than 1"),
        ("bands", {"width": -1.0}, "width: -1.0 is less than 0"),
        ("bands", {"period": 1}, "period: 1 is less than 2"),
        ("bollinger", {"upper": True}, "upper: there is no such key"),
        ("score", {"most": 9}, "most: there is no such key"),
    ],
)
def test_rules_of_jobs_are_checked(name: str, arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^train: repeat: {told}"):
        RepeatSpec(name, arguments).rule(5)


def test_rules_of_jobs_repeat_as_often_as_there_are_epochs_at_most() -> None:
    assert RepeatSpec("score", {"weights": [1, 0, 1]}).rule(5) == ScoredRepeats(3, 5, (1.0, 0.0, 1.0))
    assert RepeatSpec("bollinger", {"period": 6}).rule(5) == BandedRepeats(6, most=5, upper=False)


def test_names() -> None:
    assert rule_of(3) == FixedRepeats(3) and rule_of("auto") == AutoRepeats()
    assert rule_of(ScoredRepeats(9)) == ScoredRepeats(9)
    for given, told in ((0, "0 is less than 1"), ("keltner", "'keltner' is no number, and none of auto")):
        with pytest.raises(ValueError, match=told):
            rule_of(given)
