# SPDX-License-Identifier: Apache-2.0
"""The scores of a job: when a model is scored, which is the best, and when the job ends early."""

from __future__ import annotations

import pytest

from millpond.host.jobs.context import JobFailed
from millpond.host.jobs.training.scores import Best, ScoreBoard, Scores, described
from millpond.train.job.host_spec import EvaluationSpec


def on_host(**figures: float | None) -> Scores:
    return {"host": dict(figures)}


def board(*losses: float | None, metric: str = "loss", total: int = 100, **spec: object) -> ScoreBoard:
    """Return the board after rounds with these values."""
    rounds = [(number, on_host(**{metric: value})) for number, value in enumerate(losses, 1)]
    return ScoreBoard.of(EvaluationSpec(metric=metric, **spec), total, rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("every", "total", "due"), [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (4, 3, [3]), (3, 6, [3, 6])]
)
def test_the_model_is_scored_after_so_many_rounds_and_after_the_last(
    every: int, total: int, due: list[int]
) -> None:
    made = ScoreBoard(EvaluationSpec(every=every), total)
    assert [number for number in range(1, total + 1) if made.is_due(number)] == due
    assert made.is_due(6 * every) and (every == 1 or not made.is_due(6 * every + 1))  # a resident job goes on
    nowhere = ScoreBoard(EvaluationSpec(every=every, on=()), total)
    assert not any(map(nowhere.is_due, range(1, total + 1)))


@pytest.mark.parametrize(
    ("metric", "mode", "best"),
    [
        ("loss", "", Best(2, 0.25)),
        ("loss", "max", Best(3, 2.0)),
        ("accuracy", "", Best(3, 2.0)),
        ("perplexity", "min", Best(2, 0.25)),
    ],
)
def test_the_best_is_the_first_with_the_best_value(metric: str, mode: str, best: Best) -> None:
    made = board(0.5, 0.25, 2.0, 0.25, 2.0, metric=metric, mode=mode)
    assert (made.best, made.last, made.end) == (best, 2.0, "")
    assert not made.add(6, on_host(**{metric: best.value}))
    assert made.add(7, on_host(**{metric: best.value + (1 if best.value == 2.0 else -1)}))


def test_without_a_metric_it_is_the_accuracy_or_else_the_loss() -> None:
    for figures, metric, best in (
        (on_host(loss=0.5, accuracy=0.75), "accuracy", 0.75),
        (on_host(loss=0.5, f1=0.75), "loss", 0.5),
    ):
        made = ScoreBoard(EvaluationSpec(), 3)
        assert made.add(1, figures)
        assert (made.metric, made.best) == (metric, Best(1, best))


@pytest.mark.parametrize(
    ("mode", "target", "values", "reached"),
    [
        ("min", 0.25, (0.5, 0.3), False),
        ("min", 0.25, (0.5, 0.25), True),
        ("max", 0.25, (0.1, 0.2), False),
        ("max", 0.25, (0.1, 0.3), True),
        ("max", 0.0, (None, None), False),
        ("min", 0.0, (None, -0.5), True),
    ],
)
def test_the_target_ends_the_job(
    mode: str, target: float, values: tuple[float | None, ...], reached: bool
) -> None:
    end = board(*values, metric="f1", mode=mode, target=target).end
    assert end == (f"f1 has reached {target:g}" if reached else "")


def test_patience_ends_the_job_when_nothing_gets_better() -> None:
    assert board(0.5, 0.4, 0.4, patience=2).end == ""
    assert board(0.5, 0.4, 0.4, 0.6, patience=2).end == "loss has not improved on 0.4000 of round 2"
    assert board(0.5, 0.4, 0.4, 0.3, 0.6, patience=2).end == ""
    assert board(None, None, patience=2).end == "loss has not improved"


def test_a_value_that_is_not_finite_is_no_best_one() -> None:
    made = board(None, metric="accuracy")
    assert (made.best, made.last) == (None, None)
    assert made.add(2, on_host(accuracy=-3.0)) and made.best == Best(2, -3.0)
    assert not made.add(3, on_host(accuracy=None))
    assert (made.best, made.last) == (Best(2, -3.0), None)


def test_rounds_that_were_not_scored_where_the_metric_decides_count_for_nothing() -> None:
    spec = EvaluationSpec(on=("devices", "host"), patience=1)
    made = ScoreBoard(spec, 9)
    assert not made.add(1, {}) and not made.add(2, on_host(loss=0.5))
    assert (made.best, made.end) == (None, "")
    assert made.add(3, {"devices": {"loss": 0.25}, "host": {"loss": 0.5}})
    assert made.best == Best(3, 0.25)


def test_a_metric_that_there_is_not_fails_the_job_with_those_that_there_are() -> None:
    with pytest.raises(JobFailed) as caught:
        ScoreBoard(EvaluationSpec(metric="f1"), 3).add(1, on_host(loss=1.0, accuracy=0.5))
    assert str(caught.value) == "evaluate: metric: there is no 'f1' on the host; known: accuracy, loss"


def test_figures_as_text() -> None:
    scores: Scores = {"host": {"accuracy": 0.5, "loss": None}, "devices": {"loss": 1.0}}
    assert described(scores) == ["accuracy 0.5000", "loss not finite", "devices loss 1.0000"]
    assert described({"devices": {"loss": 1.0}}) == ["loss 1.0000"] and described({}) == []


def test_a_last_score_that_is_not_finite_is_a_fault_of_the_job() -> None:
    board = ScoreBoard.of(EvaluationSpec(), 3, [(1, {"host": {"loss": None}}), (2, {"host": {"loss": 0.5}})])
    assert not board.fault
    board.add(3, {"host": {"loss": None}})
    assert board.fault == (
        "loss is not finite after round 3: try a lower learning rate; the best model is that of round 2"
    )
    assert not ScoreBoard.of(EvaluationSpec(), 3, [(1, {})]).fault
