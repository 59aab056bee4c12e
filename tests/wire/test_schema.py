# SPDX-License-Identifier: Apache-2.0
"""TOML and texts: what is wrong is named with its place, in one line without control characters."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.errors import ConfigError
from millpond.base.schema import dump, load
from millpond.base.text import escaped, printable


@dataclass(frozen=True, slots=True)
class Link:
    address: str
    mtu: int = 65520


@dataclass(frozen=True, slots=True)
class Settings:
    name: str
    link: Link
    rate: float = 1.0
    quick: bool = False
    token: bytes = b""
    mode: Literal["auto", "always"] = "auto"
    level: Literal[1, 2] = 1
    nice: int | None = None
    size: int | str = 0
    pair: tuple[int, str] = (0, "")
    names: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    peers: dict[str, Link] = field(default_factory=dict)
    anything: Any = None


LEAST: dict[str, Any] = {"name": "csd0", "link": {"address": "10.0.0.1"}}


def test_defaults() -> None:
    assert load(Settings, LEAST, "fleet.toml") == Settings("csd0", Link("10.0.0.1"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nam": 1}, "fleet.toml: unknown key 'nam'; did you mean 'name'?"),
        (
            {"zzz": 1},
            "fleet.toml: unknown key 'zzz'; known: name, link, rate, quick, token, mode, level, nice, size, "
            "pair, names, links, counts, peers, anything",
        ),
        ({"name": 5}, "fleet.toml: name: expected text, got a whole number (5)"),
        ({"name": None}, "fleet.toml: name: expected text, got NoneType (None)"),
        ({"rate": "x"}, "fleet.toml: rate: expected a number, got text ('x')"),
        ({"rate": True}, "fleet.toml: rate: expected a number, got true or false (True)"),
        ({"rate": 10**400}, "fleet.toml: rate: the number has too many digits"),
        ({"quick": 1}, "fleet.toml: quick: expected true or false, got a whole number (1)"),
        ({"token": "x"}, "fleet.toml: token: expected bytes, got text ('x')"),
        ({"mode": "never"}, "fleet.toml: mode: 'never' is not one of auto, always"),
        ({"mode": ["auto"]}, "fleet.toml: mode: ['auto'] is not one of auto, always"),
        ({"level": True}, "fleet.toml: level: True is not one of 1, 2"),
        ({"level": 1.0}, "fleet.toml: level: 1.0 is not one of 1, 2"),
        ({"nice": 1.5}, "fleet.toml: nice: expected a whole number, got a number (1.5)"),
        ({"nice": True}, "fleet.toml: nice: expected a whole number, got true or false (True)"),
        ({"size": 1.5}, "fleet.toml: size: expected text, got a number (1.5)"),
        ({"link": 5}, "fleet.toml: link: expected a table, got a whole number (5)"),
        ({"link": {}}, "fleet.toml: link: missing key 'address'"),
        (
            {"link": {"address": "a", "mtv": 1}},
            "fleet.toml: link: unknown key 'mtv'; did you mean 'mtu'?",
        ),
        (
            {"link": {"address": "a", "mtu": "x"}},
            "fleet.toml: link: mtu: expected a whole number, got text ('x')",
        ),
        ({"pair": [1]}, "fleet.toml: pair: expected 2 values, got 1"),
        ({"pair": ["a", "b"]}, "fleet.toml: pair: expected a whole number, got text ('a')"),
        ({"pair": "ab"}, "fleet.toml: pair: expected a list, got text ('ab')"),
        ({"names": ["a", 2]}, "fleet.toml: names[1]: expected text, got a whole number (2)"),
        ({"names": "ab"}, "fleet.toml: names: expected a list, got text ('ab')"),
        ({"links": [{"address": 1}]}, "fleet.toml: links[0]: address: expected text, got a whole number (1)"),
        ({"counts": []}, "fleet.toml: counts: expected a table, got list ([])"),
        ({"counts": {"a": "b"}}, "fleet.toml: counts.a: expected a whole number, got text ('b')"),
        ({"counts": {1: 1}}, "fleet.toml: counts: expected text, got a whole number (1)"),
        ({"peers": {"csd1": {}}}, "fleet.toml: peers.csd1: missing key 'address'"),
    ],
)
def test_what_is_wrong_and_where(change: dict[Any, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Settings, LEAST | change, "fleet.toml")
    assert str(caught.value) == text


def test_missing_key() -> None:
    with pytest.raises(ConfigError, match=r"^fleet.toml: missing key 'name'$"):
        load(Settings, {"link": {"address": "a"}}, "fleet.toml")


@pytest.mark.parametrize("data", [None, 5, "text", [], [("name", "x")]])
def test_not_a_table(data: object) -> None:
    with pytest.raises(ConfigError, match=r"^fleet.toml: expected a table, got "):
        load(Settings, data, "fleet.toml")


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Settings, LEAST | {"rate": "x" * 10_000}, "fleet.toml")
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rate": 3}, 3.0),
        ({"nice": None}, None),
        ({"nice": 4}, 4),
        ({"size": "4k"}, "4k"),
        ({"size": 4}, 4),
        ({"pair": [1, "x"]}, (1, "x")),
        ({"names": ["a", "b"]}, ("a", "b")),
        ({"links": [{"address": "a"}]}, (Link("a"),)),
        ({"peers": {"x": {"address": "a", "mtu": 9}}}, {"x": Link("a", 9)}),
        ({"anything": [1, {"a": None}]}, [1, {"a": None}]),
    ],
)
def test_accepted(change: dict[str, Any], expected: object) -> None:
    value = getattr(load(Settings, LEAST | change, "f"), next(iter(change)))
    assert value == expected
    assert type(value) is type(expected)


def test_lenient_about_unknown_keys_at_every_depth() -> None:
    data = {"name": "a", "new": 1, "link": {"address": "x", "newer": 2}}
    assert load(Settings, data, "m", strict=False) == Settings("a", Link("x"))
    with pytest.raises(ConfigError, match="expected text"):
        load(Settings, data | {"name": 1}, "m", strict=False)


links = st.builds(Link, st.text(), st.integers())
settings = st.builds(
    Settings,
    name=st.text(),
    link=links,
    rate=st.floats(allow_nan=False),
    quick=st.booleans(),
    token=st.binary(),
    mode=st.sampled_from(["auto", "always"]),
    level=st.sampled_from([1, 2]),
    nice=st.none() | st.integers(),
    size=st.integers() | st.text(),
    pair=st.tuples(st.integers(), st.text()),
    names=st.lists(st.text()).map(tuple),
    links=st.lists(links, max_size=3).map(tuple),
    counts=st.dictionaries(st.text(), st.integers()),
    peers=st.dictionaries(st.text(), links, max_size=3),
)


@given(settings)
def test_dump_and_load_give_the_same(value: Settings) -> None:
    assert load(Settings, dump(value), "x") == value


def test_from_a_file() -> None:
    text = 'name = "a"\nrate = 2\nnames = ["x"]\n[link]\naddress = "b"\n[peers.csd1]\naddress = "c"\n'
    expected = Settings("a", Link("b"), rate=2.0, names=("x",), peers={"csd1": Link("c")})
    assert load(Settings, tomllib.loads(text), "f") == expected


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
