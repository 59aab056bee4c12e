# SPDX-License-Identifier: Apache-2.0
"""Questions: their sums against numpy, over parts of a data set, and the columns of all formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from millpond.base.errors import ConfigError
from millpond.train.data.errors import DataError
from millpond.train.questions import columns
from millpond.train.questions.answers import figures
from millpond.train.questions.quantiles import quantiles, refined
from millpond.train.questions.question import UNIT, DataQuestion, check
from millpond.train.questions.scores import score_sums
from millpond.train.questions.sums import fault, sums

VALUES = st.lists(st.one_of(st.floats(-50, 50), st.sampled_from([math.nan, math.inf, -math.inf])), min_size=1)


def asked(question: DataQuestion, *parts: list[float]) -> dict[str, Any]:
    found = [sums(question, np.array(part)) for part in parts]
    for part, words in zip(parts, found, strict=True):
        assert fault(question, words, len(part)) == ""
    return figures(question, np.sum(found, axis=0).tolist())


@given(VALUES, VALUES)
def test_a_mean_over_devices_is_that_of_all_clipped_values(one: list[float], other: list[float]) -> None:
    found = asked(DataQuestion("mean", "x", -10, 30), one, other)
    values = np.array(one + other)
    known = np.clip(values[~np.isnan(values)], -10, 30)
    assert (found["count"], found["missing"]) == (len(known), len(values) - len(known))
    if len(known):
        assert found["mean"] == pytest.approx(known.mean(), abs=40 / UNIT)
        assert found["deviation"] ** 2 == pytest.approx(known.std() ** 2, abs=40 * 40 * 4 / UNIT)
    else:
        assert found["mean"] is found["deviation"] is None


@given(VALUES, VALUES)
def test_a_histogram_over_devices_has_all_values_once(one: list[float], other: list[float]) -> None:
    found = asked(DataQuestion("histogram", "x", -10, 30, 7), one, other)
    values = np.array(one + other)
    known = values[np.isfinite(values)]
    counts, edges = np.histogram(known, 7, (-10, 30))
    assert [each.count for each in found["bins"]] == counts.tolist()
    assert [each.low for each in found["bins"]] == pytest.approx(edges[:-1].tolist())
    assert found["below"] == (values < -10).sum()
    assert found["above"] == (values > 30).sum()
    assert found["missing"] == np.isnan(values).sum()
    assert found["count"] == len(values) - found["missing"]


@given(VALUES, VALUES, st.lists(st.floats(0, 1), min_size=1, max_size=3), st.integers(1, 4))
def test_quantiles_lie_in_bins_that_each_round_makes_smaller(
    one: list[float], other: list[float], shares: list[float], rounds: int
) -> None:
    question = asked_one = DataQuestion("histogram", "x", -10, 30, 6)
    values = np.array(one + other)
    known = np.clip(values[~np.isnan(values)], -10, 30)
    for _ in range(rounds):
        words = sums(asked_one, np.array(one)) + sums(asked_one, np.array(other))
        found = quantiles(asked_one, words.tolist(), shares)
        asked_one = refined(question, found)
        check(asked_one)
    assert bool(found) == bool(len(known))
    for each in found:
        true = np.quantile(known, each.share, method="inverted_cdf")
        assert each.low <= true <= each.high
        assert each.high - each.low <= 40 / 6**rounds + 1e-9


@given(VALUES, st.sampled_from(["count", "mean", "histogram"]))
def test_a_sample_more_adds_no_more_than_the_sensitivity(values: list[float], kind: Any) -> None:
    question = DataQuestion(kind, "x", -10, 30, 5)
    more = sums(question, np.array(values)) - sums(question, np.array(values[1:]))
    assert np.linalg.norm(more.astype(float)) <= question.sensitivity


Scored = tuple[float, tuple[float, ...]]
SAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 5, -1, math.nan]), st.lists(st.floats(-9, 9), min_size=3, max_size=3)
    ),
    min_size=1,
)


@given(SAMPLES)
def test_a_confusion_counts_each_label_by_what_is_predicted(
    samples: list[Scored],
) -> None:
    labels, outputs = np.array([one[0] for one in samples]), np.array([one[1] for one in samples])
    question = DataQuestion("confusion", labels=3)
    words = score_sums(question, labels, outputs)
    assert fault(question, words, len(samples)) == ""
    found, wanted = figures(question, words.tolist()), np.zeros((3, 3), int)
    for label, scores in samples:
        if label in (0, 1, 2):
            wanted[int(label), int(np.argmax(scores))] += 1
    assert found["matrix"] == wanted.tolist()
    assert found["other"] == len(samples) - wanted.sum()
    assert found["accuracy"] == (pytest.approx(np.trace(wanted) / wanted.sum()) if wanted.any() else None)
    for label in range(3):
        of_label, as_label = wanted[label].sum(), wanted[:, label].sum()
        assert found["recall"][label] == (wanted[label, label] / of_label if of_label else None)
        assert found["precision"][label] == (wanted[label, label] / as_label if as_label else None)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-20, 20)), min_size=1, max_size=40))
def test_an_auc_is_the_share_of_pairs_in_the_right_order(samples: list[tuple[int, int]]) -> None:
    labels, outputs = np.array(samples, float).T
    question = DataQuestion("auc", bins=5000)
    words = score_sums(question, labels, outputs[:, None] / 4)
    assert fault(question, words, len(samples)) == ""
    found = figures(question, words.tolist())
    positive, negative = outputs[labels == 1][:, None], outputs[labels == 0]
    if positive.size * negative.size:
        true = (positive > negative).mean() + (positive == negative).mean() / 2
        assert found["low"] <= true + 1e-9 and true - 1e-9 <= found["high"]
        coarse = figures(
            question := DataQuestion("auc", bins=3), score_sums(question, labels, outputs[:, None]).tolist()
        )
        assert coarse["low"] <= true + 1e-9 and true - 1e-9 <= coarse["high"]
    else:
        assert found["auc"] is None


@pytest.mark.parametrize(
    "change",
    [lambda words: words[:-1], lambda words: words + 1, lambda words: -words, lambda words: words * 0],
)
def test_sums_that_no_samples_have_are_known(change: Callable[[Any], Any]) -> None:
    question = DataQuestion("histogram", "x", 0, 1, 4)
    words = sums(question, np.array([0.1, 0.5, math.nan, 7.0]))
    assert fault(question, words, 4) == ""
    assert fault(question, change(words), 4)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (DataQuestion("mean", "x", 1.0, 1.0), "bounds: 1 and 1 are no range"),
        (DataQuestion("mean", "x", 0.0, math.inf), "bounds"),
        (DataQuestion("mean", "x", math.nan, 1.0), "bounds"),
        (DataQuestion("mean", "x", -1.7e308, 1.7e308), "too large"),
        (DataQuestion("histogram", "x", 0, 1, 2, edges=(0.0, 0.5)), "edges: they are those of"),
        (DataQuestion("histogram", "x", 0, 1, 2, edges=(0.0, 0.5, 0.5, 1.0)), "edges: each is greater"),
        (DataQuestion("histogram", "", 0, 1, 4), "column: a histogram is of the values of a column"),
        (
            DataQuestion("histogram", "x", 0, 1, 1 << 17),
            "the question: bins: 131072 is not between 1 and 65536",
        ),
    ],
    ids=str,
)
def test_a_question_without_sense_is_refused(question: DataQuestion, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(question)


def column(folder: Path, name: str, classes: tuple[str, ...] = ()) -> list[float]:
    found: list[float] = np.concatenate([*columns.values(folder.parent, folder.name, name, classes)]).tolist()
    return found


def test_columns_of_images(tmp_path: Path) -> None:
    images = np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2)
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", np.array([2, 0, 1]))
    assert column(tmp_path, "label") == [2, 0, 1]
    assert column(tmp_path, "image") == pytest.approx((images.mean(axis=(1, 2)) / 255).tolist())
    assert len(column(tmp_path, "")) == 3
    with pytest.raises(DataError, match=f"{tmp_path.name} has no column age"):
        column(tmp_path, "age")


def test_folders_of_classes_count_by_the_names_of_the_asker(tmp_path: Path) -> None:
    for name in ("well", "sick"):
        (tmp_path / name).mkdir()
        Image.new("L", (2, 2)).save(tmp_path / name / "a.png")
    assert column(tmp_path, "label", ("well", "sick")) == [1, 0]  # in the order of folders


def test_columns_of_csv_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age, state\n50,well\n,sick\nold,other\n60\n")
    (tmp_path / "b.csv").write_text("state,age\nsick,1e2\n")
    ages = column(tmp_path, "age")
    assert [ages[0], ages[3], ages[4]] == [50, 60, 100]
    assert [math.isnan(age) for age in ages] == [False, True, True, False, False]
    states = column(tmp_path, "state", ("sick", "well"))
    assert [states[0], states[1], states[4]] == [1, 0, 0]
    assert math.isnan(states[2]) and math.isnan(states[3])
    assert len(column(tmp_path, "")) == 5
    with pytest.raises(DataError, match="no column weight"):
        column(tmp_path, "weight")


def test_a_csv_file_without_names_has_numbered_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2\n\n3,4\n")
    assert column(tmp_path, "1") == [2, 4]


def test_columns_of_parquet_files(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table(
        {"age": [50, None, 70], "measured": [[1.0, 3.0], [2.0], []], "state": ["a", "b", "c"]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    ages, measured = column(tmp_path, "age"), column(tmp_path, "measured")
    assert [ages[0], ages[2], *measured[:2]] == [50, 70, 2, 2]
    assert math.isnan(ages[1]) and math.isnan(measured[2])
    assert column(tmp_path, "state", ("b", "a", "c")) == [1, 0, 2]
    with pytest.raises(DataError, match="no column weight"):
        column(tmp_path, "weight")
