# SPDX-License-Identifier: Apache-2.0
"""A stream that was changed on its way is told from one that was not, and the wrong bytes by their origin."""

from __future__ import annotations

import random
import re

import pytest

from .counted_stream import CountedCheck, counted


def verdict(data: bytes, *cuts: int) -> str:
    check = CountedCheck(5)
    for start, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
        check.take(data[start:end])
    assert check.bytes == len(data)
    return check.verdict


def test_a_stream_is_the_same_however_it_is_cut() -> None:
    whole = counted(5, 0, 100_000)
    cuts = sorted(random.Random(1).sample(range(len(whole)), 50))
    pieces = zip((0, *cuts), (*cuts, len(whole)), strict=True)
    assert b"".join(counted(5, start, end - start) for start, end in pieces) == whole
    assert verdict(whole, *cuts) == "intact"


@pytest.mark.parametrize("start", [0, 29, 40_000, 65_529])
@pytest.mark.parametrize(("stream", "place"), [(7, 98_765), (5, 1 << 20)])
def test_bytes_of_another_place_are_named(start: int, stream: int, place: int) -> None:
    data = bytearray(counted(5, 0, 100_000))
    data[start : start + 1000] = counted(stream, place, 1000)
    found = re.search(r"of those from (\d+) to .* are stream (\d+) at (\d+) and", verdict(bytes(data)))
    assert found
    first, named, at = map(int, found.groups())
    assert start <= first < start + 8 and named == stream and at - place == first - start


def test_other_bytes_are_shown() -> None:
    assert "bytes of no stream, 0000000000" in verdict(counted(5, 0, 4096) + bytes(4096))
