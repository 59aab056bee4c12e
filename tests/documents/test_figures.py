# SPDX-License-Identifier: Apache-2.0
"""Figures of benchmark files in pages."""

from __future__ import annotations

import pytest

from bench.rows import Row
from documents.figures import NoFigureError, filled

FILES = {
    "train": [
        Row("ratio", "a round beside its computation", 1.0812, 1.05, 1.1, "", None, 5, None),
        Row("ratio.seconds", "a round", 12345.0, 12000.0, 13000.0, "s", "plain torch", 5, "virtual devices"),
        Row("gone", "not measured: no peer", None, None, None, "s", None, 0, None),
    ]
}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("train ratio", "1.081"),
        ("train ratio value.2", "1.1"),
        ("train ratio range", "1.05 to 1.1"),
        ("train ratio.seconds all", "12,340 s (12,000 to 13,000)"),
        ("train ratio.seconds unit", "s"),
        ("train ratio value.2?", "1.1"),
        ("train gone all?", "not measured"),
        ("train coming all.2?", "not measured"),
        ("later coming all?", "not measured"),
    ],
)
def test_a_figure_stands_between_its_comments(words: str, shown: str) -> None:
    text = f"It takes <!--figure {words}-->7<!--/figure--> times as long.\n"
    assert filled(text, FILES) == text.replace("-->7<", f"-->{shown}<")
    assert filled(filled(text, FILES), FILES) == filled(text, FILES)


def test_a_table_has_the_figures_that_match() -> None:
    text = filled("<!--table train ratio*--><!--/table-->\n", FILES)
    assert text.count("\n| ") == 4 and "virtual devices" in text
    assert filled(text, FILES) == text


@pytest.mark.parametrize(
    ("comment", "error"),
    [
        ("<!--figure tain ratio-->1<!--/figure-->", "no file tain.json; it has train"),
        ("<!--figure train ration-->1<!--/figure-->", "no figure 'ration'"),
        ("<!--figure train ratio mean?-->1<!--/figure-->", "'mean' is none of value, low"),
        ("<!--figure train ratio mean-->1<!--/figure-->", "'mean' is none of value, low"),
        ("<!--figure train gone-->1<!--/figure-->", "it has no value: not measured"),
        ("<!--table train x*--><!--/table-->", "no figure like 'x*'"),
    ],
)
def test_a_wrong_name_is_an_error(comment: str, error: str) -> None:
    with pytest.raises(NoFigureError) as raised:
        filled(comment, FILES)
    assert error in str(raised.value)


def test_a_figure_in_a_block_is_an_example() -> None:
    text = "```text\n<!--figure no such-->1<!--/figure-->\n```\n"
    assert filled(text, FILES) == text
