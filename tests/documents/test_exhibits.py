# SPDX-License-Identifier: Apache-2.0
"""Exhibits of papers in pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.papers.exhibit import Paper, choose, computed, key, measured
from bench.papers.papers import PAPERS
from bench.papers.results import Result, published
from documents.exhibits import names, with_exhibits
from documents.figures import NoFigureError
from documents.site import ROOT

FOLDER = ROOT / "docs" / "papers"
RESULT = Result(
    "Fig. 6: speed",
    (measured("as planned", "img/s", 93.4, [90.0, 91.0, 95.0]), computed("batch", "", 140, 138)),
    "workers sleep",
    "Ours is noisy.",
    "x.svg",
    quick=False,
    seconds=2.0,
)


def test_an_exhibit_shows_the_paper_beside_ours() -> None:
    text = with_exhibits("<!--exhibit a/fig-6--><!--/exhibit-->\n", {"a/fig-6": RESULT})
    assert "| as planned | 93.4 | 91 | 90 to 95 | img/s |" in text and "*Values*: 3 for each median." in text
    assert "*Emulated*: workers sleep." in text and "*Difference*: Ours is noisy." in text
    assert "![Fig. 6: speed](x.svg)" in text
    assert with_exhibits(text, {"a/fig-6": RESULT}) == text


def test_rows_with_unlike_numbers_of_values_say_theirs_and_a_number_that_is_not_printed_is_left_empty() -> (
    None
):
    rows = (measured("a", "s", None, [1.0, 3.0]), measured("b", "s", 5, [1.0, 2.0, 4.0]))
    text = with_exhibits("<!--exhibit a/b--><!--/exhibit-->", {"a/b": replace(RESULT, rows=rows)})
    assert "| a |  | 2 | 1 to 3 | 2 | s |\n| b | 5 | 2 | 1 to 4 | 3 | s |" in text
    assert "*Values*" not in text


def test_an_exhibit_without_a_result_is_an_error() -> None:
    with pytest.raises(NoFigureError, match="no result of 'a/fig-7'"):
        with_exhibits("<!--exhibit a/fig-7--><!--/exhibit-->", {})


def test_exhibits_are_chosen_by_paper_and_by_name() -> None:
    assert choose(PAPERS, []) == [(paper, exhibit) for paper in PAPERS for exhibit in paper.exhibits]
    with pytest.raises(ValueError, match="no paper or exhibit is called 'fig-99'"):
        choose(PAPERS, ["fig-99"])


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_the_page_of_a_paper_has_all_its_exhibits(paper: Paper) -> None:
    expected = [key(paper, exhibit) for exhibit in paper.exhibits]
    assert names((FOLDER / f"{paper.name}.md").read_text()) == expected
    assert [name for name in published(FOLDER) if name.startswith(f"{paper.name}/")] == expected
