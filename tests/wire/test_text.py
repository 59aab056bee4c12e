# SPDX-License-Identifier: Apache-2.0
"""A peer's text, made fit for terminals."""

from __future__ import annotations

import os

import pytest

from millpond.base.text import escaped, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größe 5 µm", "größe 5 µm"),
        ("two\nlines", "two lines"),
        ("\x1b[2Jgone", " [2Jgone"),
        ("a\x00b\x7fc\u202ed", "a b c d"),
        ("", ""),
    ],
)
def test_one_line_without_control_characters(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert escaped("café") == "café"
    assert escaped(os.fsdecode(b"caf\xe9")) == r"caf\xe9"


def test_long_text_is_shortened() -> None:
    assert printable("x" * 50, 10) == "xxxxxxx..."
    assert printable("x" * 10, 10) == "x" * 10
