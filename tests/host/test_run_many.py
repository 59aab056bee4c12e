# SPDX-License-Identifier: Apache-2.0
"""A command on many devices: the selection of devices, and their output as lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.api.daemon import DeviceInfo
from millpond.host.remote.run_many import Ended, OutputLines, ParallelRun, _LineSink, choose
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


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((b"a\nb\n",), [("a", "b")]),
        ((b"a", b"b\nc", b"d"), [("ab",), ("cd",)]),
        ((b"\n\n",), [("", "")]),
        ((), []),
        ((b"a\r\nb\rc\n",), [("a", "b c")]),
        ((b"\xff\x1b[31m\tx\n",), [("\N{REPLACEMENT CHARACTER} [31m  x",)]),
    ],
)
def test_output_becomes_whole_lines(pieces: tuple[bytes, ...], lines: list[tuple[str, ...]]) -> None:
    assert shown(*pieces) == lines


def test_a_line_without_end_takes_no_memory_without_end() -> None:
    lines = [line for event in shown(*[b"x" * 10_000] * 30) for line in event]
    assert "".join(lines) == "x" * 300_000
    assert 1 < len(lines) < 6


def test_who_cannot_be_reached_has_ended_and_the_others_follow(tmp_path: Path) -> None:
    run = ParallelRun(tmp_path, "true", USER, None, capture=True)  # there is no fleet here
    events = list(run.follow({"csd0": "not ready but lost", "csd1": ""}))
    found = {event.device: event for event in events if isinstance(event, Ended)}
    assert len(events) == len(found) == 2
    assert found["csd0"].captured == {
        "device": "csd0",
        "exit_code": 255,
        "stdout": "",
        "stderr": "",
        "error": "not ready but lost",
    }
    assert found["csd1"].result.exit_code == 255
    assert "holds no fleet" in found["csd1"].result.error
