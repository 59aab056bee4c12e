# SPDX-License-Identifier: Apache-2.0
"""``millpond simulate``: fleets and tiers; their files, formulas and events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.host.cli.simulation import fleet as simulate
from millpond.host.cli.simulation import tiers

from .commands import Command

EXAMPLE = Path(__file__).parents[2] / "agent" / "examples" / "fleet-36.toml"
HOSTS = EXAMPLE.with_name("hosts-100.toml")
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
        ("steps = 0\n" + KIND, "steps: 0 is not between 1"),
        (KIND.replace("count = 2", "count = 0"), "count"),
        (KIND.replace("count = 2", "count = 200000"), "workers in all"),
        (KIND.replace("[0.1, 0.3]", "[0.3, 0.1]"), "times must ascend"),
        (KIND.replace("[0.1, 0.3]", "[0.1]"), "as many times as batches"),
        (KIND + "most = 1\n", "nobody has memory"),
        (KIND + "[load]\nbusy = 1.0\n", "load: busy"),
        (KIND + "[load]\nbusy_noise = -0.1\n", "busy_noise"),
        (HOSTS.read_text().replace("count = 100", "count = 100000"), "count"),
        (KIND + "[hosts]\ncount = 2\nvalues = 9\ndevice_gbps = 1\nlink_gbps = 0\n", "link_gbps"),
        (HOSTS.read_text().replace("count = 36", "count = 36\nhost = true"), "no worker is left"),
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


def test_hosts_exchange_in_two_levels_or_flat(tmp_path: Path) -> None:
    text = HOSTS.read_text().replace("steps = 400", "steps = 3").replace("count = 100", "count = 20")

    def results(exchange: str) -> simulate.PolicyResult:
        file = tmp_path / "hosts.toml"
        file.write_text(text.replace('"two-levels"', f'"{exchange}"'))
        found = simulate.read(file)
        return simulate.run(found, simulate.cohort_of(found, file.name))[-1]

    two, ring, star = map(results, ("two-levels", "flat-ring", "flat-star"))
    assert 0 < two.communication < ring.communication < star.communication < 1
    assert two.speed > ring.speed > star.speed


TIERS = Path(__file__).parents[2] / "agent" / "examples" / "tiers.toml"


def test_formula_and_events_agree_at_the_figures_of_summit(command: Command) -> None:
    out = command("simulate", "--format", "json", TIERS).out
    results = {row["repeats"]: row for row in json.loads(out)["results"]}
    for row in results.values():
        one, other = row["predicted"], row["simulated"]
        assert one["throughput"] == pytest.approx(other["throughput"], rel=0.05)
        assert one["read"] == pytest.approx(other["read"], rel=0.05)
        assert one["stall"] == pytest.approx(other["stall"], abs=0.05)
    assert results["1"]["simulated"]["throughput"] == pytest.approx(400e9 / 58.5e6, rel=0.05)
    assert results["10"]["simulated"]["throughput"] == pytest.approx(65000, rel=0.01)  # the paper: rf >= 10
    assert results["128"]["simulated"]["read"] == pytest.approx(30.4e9, rel=0.05)  # the paper: 30.4 GB/s
    assert "read GB/s" in command("simulate", TIERS).out


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("slow = 400e9", "slow = 0", "tiers: slow: 0.* is not greater than 0"),
        ("mini_epochs = 128", "mini_epochs = 1", "tiers: mini_epochs: 1 is not between 2 and 63000"),
        ("deviation = 12", "deviation = -1", "deviation: -1.* is not greater than 0"),
        ("samples = 63000", "sample = 63000", "unknown key 'sample'"),
    ],
)
def test_what_makes_no_sense_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "tiers.toml"
    path.write_text(TIERS.read_text().replace(old, new, 1))
    with pytest.raises(ConfigError, match=told):
        tiers.read(path)


ROOFLINE = TIERS.with_name("roofline.toml")


def test_a_roofline_says_which_networks_reading_limits(command: Command) -> None:
    results = json.loads(command("simulate", "--format", "json", ROOFLINE).out)["results"]
    points = {row["network"]: row["point"] for row in results}
    assert next(iter(points)) == "AlexNet"
    assert points["AlexNet"]["needed"] == pytest.approx(130e9, rel=0.02)  # the paper: up to 130 GB/s
    for own in points.values():
        assert own["needed"] * own["intensity"] == pytest.approx(2.496e15)
        assert own["reached"] == pytest.approx(min(2.496e15, 10e9 * own["intensity"]))
    lines = {line.split("  ")[0]: line.split()[-1] for line in command("simulate", ROOFLINE).out.splitlines()}
    assert (lines["AlexNet"], lines["VGG-19"]) == ("reading", "computing")


@pytest.mark.parametrize("sizes", [(1e30, 1e-300), (1e-300, 1e30)])
def test_a_network_of_sizes_that_no_network_has_is_told(
    command: Command, tmp_path: Path, sizes: tuple[float, float]
) -> None:
    path = tmp_path / "roofline.toml"
    network = f'[[roofline.networks]]\nname = "a"\noperations = {sizes[0]}\nsample_bytes = {sizes[1]}\n'
    path.write_text(f"[roofline]\npeak = 1e12\nbandwidth = 1e9\n{network}")
    assert "1e-300 is" in command("simulate", "--format", "json", path).err


def test_a_roofline_without_networks_is_told(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "roofline.toml"
    path.write_text("[roofline]\npeak = 1e15\nbandwidth = 1e9\nnetworks = []\n")
    assert command("simulate", path).err == "millpond: roofline.toml: roofline: networks: there are none\n"
