# SPDX-License-Identifier: Apache-2.0
"""Sets of devices as users write them, and names folded into such texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.errors import ConfigError, LocalError
from millpond.host.fleet.directory import DeviceConfig, FleetConfig, checked
from millpond.host.records.device_set import expand, fold, is_one

KNOWN = ("csd0", "csd1", "csd2", "csd10", "rack1-csd3", "rack2-csd3", "csd07", "csd08", "dpu")
GROUPS = {"fast": "csd[0-1],dpu", "gone": "csd99"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("csd0", "csd0"),
        (" csd1 ,csd0,csd1,", "csd1 csd0"),
        ("csd[0-2]", "csd0 csd1 csd2"),
        ("csd[2,0-1,10]", "csd2 csd0 csd1 csd10"),
        ("csd[07-08]", "csd07 csd08"),
        ("rack[1-2]-csd[3]", "rack1-csd3 rack2-csd3"),
        ("@fast", "csd0 csd1 dpu"),
        ("csd2,@fast", "csd2 csd0 csd1 dpu"),
        ("@all", " ".join(KNOWN)),
    ],
)
def test_a_text_names_devices(text: str, names: str) -> None:
    assert expand(text, KNOWN, GROUPS) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("csd3", "there is no device 'csd3'; the fleet has csd0, csd1"),
        ("csd[0-3]", "there is no device 'csd3'"),
        ("@gone", "there is no device 'csd99'"),
        ("@slow", "there is no group '@slow'; there are @all, @fast, @gone"),
        ("csd[2-0]", "'csd[2-0]': '[2-0]' is no range; write numbers as in csd[0-3,7]"),
        ("csd[]", "is no range"),
        ("csd[0-99999999]", "is no range"),
        ("csd[a]", "is no range"),
        ("csd[0", "write devices as csd0,csd1 or csd[0-3,7], groups as @fast"),
        ("csd0]", "write devices as"),
        ("csd@", "write devices as"),
        (",", "',' names no device"),
    ],
)
def test_a_wrong_text_is_told(text: str, told: str) -> None:
    with pytest.raises(LocalError) as error:
        expand(text, KNOWN, GROUPS)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("csd2 csd0 csd1", "csd[0-2]"),
        ("csd0", "csd0"),
        ("csd7 csd1 csd2", "csd[1-2,7]"),
        ("dpu csd0 csd1", "csd[0-1],dpu"),
        ("csd07 csd08 csd9", "csd[07-08],csd9"),
        ("", ""),
    ],
)
def test_names_are_folded(names: str, text: str) -> None:
    assert fold(names.split()) == text


NAMES = st.from_regex(r"[a-z]{1,2}(-?[0-9]{1,3}){0,2}(-[a-z])?", fullmatch=True)


@given(st.lists(NAMES, min_size=1, max_size=30, unique=True))
def test_folded_names_are_the_same_devices(names: list[str]) -> None:
    assert sorted(expand(fold(names), names, {})) == sorted(names)


def test_one_device_is_told_from_a_set() -> None:
    assert [is_one(text) for text in ("csd0", "csd0,", "csd[0]", "@fast", "")] == [True, *[False] * 4]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("all", "csd0", "groups: all: a group's name is"),
        ("A b", "csd0", "groups: A b: a group's name is"),
        ("fast", "csd[", "groups: fast: 'csd[': write devices as"),
        ("fast", "@slow", "groups: fast: '@slow': a group holds devices, no groups"),
    ],
)
def test_a_wrong_group_is_told_with_its_place(name: str, text: str, told: str) -> None:
    config = FleetConfig("f", device=(DeviceConfig("csd0"),), groups={name: text})
    with pytest.raises(ConfigError) as error:
        checked(config)
    assert told in str(error.value)
    checked(FleetConfig("f", groups={"fast": "csd[0-9]"}))  # devices may be removed


def test_ranges_multiply_to_a_bounded_number() -> None:
    """Before: the names of each were made, until memory ran out."""
    with pytest.raises(LocalError, match="names more than 10000 devices"):
        expand("csd[0-9999][0-9999]", ["csd0"], {})
    assert expand("csd[0-9][0-9]", [f"csd{number:02}" for number in range(100)], {})
