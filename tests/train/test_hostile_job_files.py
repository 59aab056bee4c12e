# SPDX-License-Identifier: Apache-2.0
"""Job files that nobody can train are refused in one line, before a device is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.train.job import file

JOB = """
name = "x"
data = {{ private = "private/d", test = "." }}
model = {{ factory = "millpond.train.zoo.models:digits_cnn", arguments = {{ {arguments} }} }}
{more}
"""
MANY = ", ".join(f"a{number} = 1" for number in range(300_000))


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ("", "train = { momentum = nan }", "train: momentum: nan is not between 0 and 1"),
        ("", f"x = {'[' * 5000}{']' * 5000}", "job.toml: it is nested too deeply"),
        (MANY, "", "model: arguments: 300000 are too many, 1000 at most"),
    ],
    ids=["momentum", "nesting", "arguments"],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: str, more: str, words: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(arguments=arguments, more=more))
    with pytest.raises(ConfigError) as caught:
        file.read(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
