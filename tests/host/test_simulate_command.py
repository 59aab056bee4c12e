# SPDX-License-Identifier: Apache-2.0
"""The file of a simulated fleet, and ``millpond simulate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.host.cli.simulation import fleet as simulate

from .commands import Command, command

EXAMPLE = Path(__file__).parents[2] / "agent" / "examples" / "fleet-36.toml"
__all__ = ["command"]
KIND = '[[kind]]\nname = "a"\ncount = 2\nbatches = [2, 8]\nseconds = [0.1, 0.3]\n'


def test_the_example_runs_and_shows_what_re_tuning_is_worth(command: Command) -> None:
    code, out, err = command("simulate", "--format", "json", EXAMPLE)
    assert code == 0, err
    results = {row["policy"]: row for row in json.loads(out)["results"]}
    assert results["millpond"]["share"] > 0.85 > 0.5 > results["untuned"]["share"]
    assert results["millpond"]["bias"] < 0.01
    code, table, _ = command("simulate", EXAMPLE)
    assert code == 0 and "millpond" in table and "of the ideal" in table


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (KIND + "pace = 3\n", "pace"),
        ("steps = 0\n" + KIND, "steps and patience"),
        (KIND.replace("count = 2", "count = 0"), "count"),
        (KIND.replace("count = 2", "count = 200000"), "workers in all"),
        (KIND.replace("[0.1, 0.3]", "[0.3, 0.1]"), "times must ascend"),
        (KIND.replace("[0.1, 0.3]", "[0.1]"), "as many times as batches"),
        (KIND + "most = 1\n", "nobody has memory"),
        (KIND + "[load]\nbusy = 1.0\n", "load: busy"),
        (KIND + "[load]\nbusy_noise = -0.1\n", "busy_noise"),
        ("steps = [", "fleet.toml"),
    ],
)
def test_a_file_that_means_nothing_is_refused_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as error:
        simulate.cohort_of(simulate.read(file), file.name)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(command: Command) -> None:
    assert command("simulate", "nowhere.toml") == (
        2,
        "",
        "millpond: nowhere.toml: No such file or directory\n",
    )
