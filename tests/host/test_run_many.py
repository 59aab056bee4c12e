# SPDX-License-Identifier: Apache-2.0
"""A command on many devices: the selection of devices, and their output as lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.api.daemon import DeviceInfo
from millpond.host.remote.run_many import OutputLines, ParallelRun, _LineSink, choose
from millpond.images.ondevice.sshd_config import USER


def device(name: str, state: str = "ready", reason: str = "") -> DeviceInfo:
    return DeviceInfo(name, "emulated", state, reason, "10.0.0.2", None, None, (0, 0))


KNOWN = (device("csd0"), device("csd1", "lost", "it did not answer"), device("csd2", "connecting"))


def test_all_are_all_and_who_is_not_ready_is_told() -> None:
    assert choose(KNOWN, "") == {
        "csd0": "",
        "csd1": "not ready but lost: it did not answer",
        "csd2": "not ready but connecting",
    }
    assert choose((), "") == {}


@pytest.mark.parametrize(
    ("names", "chosen"), [("csd1,csd0", ["csd1", "csd0"]), (" csd2 , csd2", ["csd2"]), ("csd0,", ["csd0"])]
)
def test_those_that_are_named_are_tried(names: str, chosen: list[str]) -> None:
    assert choose(KNOWN, names) == dict.fromkeys(chosen, "")
    assert list(choose(KNOWN, names)) == chosen


@pytest.mark.parametrize(("names", "words"), [("csd0,csd7", "'csd7'.*csd0, csd1, csd2"), (" ,", "no device")])
def test_a_wrong_name_is_told(names: str, words: str) -> None:
    with pytest.raises(LocalError, match=words):
        choose(KNOWN, names)


def shown(*pieces: bytes) -> list[tuple[str, ...]]:
    """What is handed on for each piece, and at the end."""
    run = ParallelRun(Path("/nowhere"), "true", USER, None, capture=False)
    sink = _LineSink(run, "csd0", is_error=True)
    for piece in pieces:
        sink.write(piece)
    sink.end()
    events = [run._queue.get_nowait() for _ in range(run._queue.qsize())]
    assert all(
        isinstance(event, OutputLines) and event.device == "csd0" and event.is_error for event in events
    )
    return [event.lines for event in events if isinstance(event, OutputLines)]


def test_a_line_without_end_takes_no_memory_without_end() -> None:
    lines = [line for event in shown(*[b"x" * 10_000] * 30) for line in event]
    assert "".join(lines) == "x" * 300_000
    assert 1 < len(lines) < 6
