# SPDX-License-Identifier: Apache-2.0
"""``millpond simulate tiers.toml``: equation 1 and the events agree, and have the paper's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.host.cli.simulation import tiers

from .commands import Command, command

__all__ = ["command"]
EXAMPLE = Path(__file__).parents[2] / "agent" / "examples" / "tiers.toml"


def test_formula_and_events_agree_at_the_figures_of_summit(command: Command) -> None:
    out = command("simulate", "--format", "json", EXAMPLE).out
    results = {row["repeats"]: row for row in json.loads(out)["results"]}
    for row in results.values():
        one, other = row["predicted"], row["simulated"]
        assert one["throughput"] == pytest.approx(other["throughput"], rel=0.05)
        assert one["read"] == pytest.approx(other["read"], rel=0.05)
        assert one["stall"] == pytest.approx(other["stall"], abs=0.05)
    assert results["1"]["simulated"]["throughput"] == pytest.approx(400e9 / 58.5e6, rel=0.05)
    assert results["10"]["simulated"]["throughput"] == pytest.approx(65000, rel=0.01)  # the paper: rf >= 10
    assert results["128"]["simulated"]["read"] == pytest.approx(30.4e9, rel=0.05)  # the paper: 30.4 GB/s
    assert "read GB/s" in command("simulate", EXAMPLE).out


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("slow = 400e9", "slow = 0", "tiers: slow: 0.* is not greater than 0"),
        ("mini_epochs = 128", "mini_epochs = 1", "tiers: mini_epochs: 1 is not between 2 and 63000"),
        ("deviation = 12", "deviation = -1", "tiers: adaptive: bands: -1.* is not greater than 0"),
        ("samples = 63000", "sample = 63000", "unknown key 'sample'"),
    ],
)
def test_what_makes_no_sense_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(EXAMPLE.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=told):
        tiers.read(path)
