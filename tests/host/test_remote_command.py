# SPDX-License-Identifier: Apache-2.0
"""A command on one device or on many: what is around it, its output, and this side's standard streams."""

from __future__ import annotations

import functools
import os
import pty
import shlex
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.api.daemon import DeviceInfo
from millpond.host.remote import ssh
from millpond.host.remote.run_many import OutputLines, ParallelRun, _LineSink, choose
from millpond.host.remote.shared_input import SharedInput
from millpond.host.terminal import streams
from millpond.host.terminal.folded_output import folded
from millpond.host.terminal.streams import WholeOutput
from millpond.images.ondevice.sshd_config import USER

from ..waiting import eventually

MILLPOND = (sys.executable, "-m", "millpond.host.main")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("exit 3", 3, ""),
        ("exit 130", 130, ""),
        ("exit 147", 147, ""),  # as SIGSTOP would be: nothing stops
        ("exit 255", 255, ""),
        ("kill -s KILL $$", 137, "Killed\n"),
        ("kill -s INT $$", 130, ""),
        ("kill -s TERM 0; sleep 60", 143, ""),
        ("kill -s KILL 0", -9, ""),
    ],
)
def test_a_command_ends_with_its_own_code_or_that_of_its_signal(line: str, code: int, said: str) -> None:
    run = ("sh", "-c", ssh._TIED + shlex.quote(line))
    done = subprocess.run(
        run, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, timeout=30
    )
    assert done.returncode == code
    assert said in done.stderr


def test_output_waits_for_a_reader_of_a_pipe_that_does_not_block() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    data = os.urandom(3_000_000)
    with open(read, "rb") as reader:  # noqa: PTH123
        writer = threading.Thread(target=lambda: (WholeOutput(write).write(data), os.close(write)))
        writer.start()
        assert reader.read() == data
        writer.join()


class Channel:
    """What a command's input goes to."""

    def __init__(self) -> None:
        self.got = b""
        self.ended = threading.Event()

    def sendall(self, data: bytes) -> None:
        self.got += data

    def shutdown_write(self) -> None:
        self.ended.set()


def test_input_that_does_not_block_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    channel = Channel()
    source = functools.partial(streams.read, read, 1 << 16)
    feeder = threading.Thread(target=ssh._feed, args=(source, channel), daemon=True)
    feeder.start()
    os.write(write, b"first ")
    eventually(lambda: channel.got == b"first ", "the first part")
    assert not channel.ended.is_set()
    os.write(write, b"second")
    os.close(write)
    assert channel.ended.wait(30)
    assert channel.got == b"first second"
    os.close(read)


def test_input_that_cannot_be_read_is_an_end_of_input(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    channel = Channel()
    ssh._feed(functools.partial(streams.read, folder, 1 << 16), channel)  # type: ignore[arg-type]
    assert channel.ended.is_set()
    os.close(folder)


@pytest.mark.parametrize(
    ("command", "closed"),
    [("--version", "<&- >&-"), ("cp a", "2>&-"), ("devices --fleet /nowhere", "<&- >&- 2>&-")],
)
def test_a_command_ends_as_usual_with_closed_standard_streams(command: str, closed: str) -> None:
    usual = subprocess.run([*MILLPOND, *command.split()], capture_output=True, text=True, check=False)
    line = f"exec {shlex.join(MILLPOND)} {command} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == usual.returncode
    assert done.stdout == ""
    assert done.stderr == ("" if "2>&-" in closed else usual.stderr)


def test_what_is_printed_waits_for_its_reader() -> None:
    """The help waits where its pipe is nearly full."""
    usual = subprocess.run([*MILLPOND, "--help"], capture_output=True, check=True).stdout
    read, write = os.pipe()
    os.set_blocking(write, False)
    filler = b"x" * ((1 << 16) - 100)
    os.write(write, filler)
    with subprocess.Popen([*MILLPOND, "--help"], stdout=write, stderr=subprocess.PIPE) as command:
        os.close(write)
        waits = Path(f"/proc/{command.pid}/wchan")
        eventually(lambda: command.poll() is not None or "poll" in waits.read_text(), "a wait for the reader")
        with open(read, "rb") as reader:  # noqa: PTH123
            assert reader.read() == filler + usual
        assert command.wait() == 0


def test_a_reader_of_the_output_that_has_ended_is_a_broken_pipe() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*MILLPOND, "--version"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_terminal_has_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    with os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        assert ssh._terminal_size() == (120, 40)
    os.close(ours)


def device(name: str, state: str = "ready", reason: str = "") -> DeviceInfo:
    return DeviceInfo(name, "emulated", state, reason, "10.0.0.2", None, None, (0, 0))


KNOWN = (device("csd0"), device("csd1", "lost", "it did not answer"), device("csd2", "connecting"))


def test_all_are_all_and_who_is_not_ready_is_told() -> None:
    assert choose(KNOWN, "", {}) == {
        "csd0": "",
        "csd1": "not ready but lost: it did not answer",
        "csd2": "not ready but connecting",
    }
    assert choose((), "", {}) == {}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("csd1,csd0", ["csd1", "csd0"]),
        (" csd2 , csd2", ["csd2"]),
        ("csd0,", ["csd0"]),
        ("csd[1-2]", ["csd1", "csd2"]),
        ("@some,csd0", ["csd2", "csd0"]),
        ("@all", ["csd0", "csd1", "csd2"]),
    ],
)
def test_those_that_are_named_are_tried(names: str, chosen: list[str]) -> None:
    found = choose(KNOWN, names, {"some": "csd[2,0]"})
    assert found == dict.fromkeys(chosen, "") and list(found) == chosen


@pytest.mark.parametrize(("names", "words"), [("csd0,csd7", "'csd7'.*csd0, csd1, csd2"), (" ,", "no device")])
def test_a_wrong_name_is_told(names: str, words: str) -> None:
    with pytest.raises(LocalError, match=words):
        choose(KNOWN, names, {})


def test_equal_output_is_printed_once_under_the_names_of_its_devices() -> None:
    lines = {"csd0": ["6.1"], "csd1": ["6.1"], "csd9": ["a", "b"], "csd2": ["6.1"], "csd3": []}
    assert list(folded(lines)) == ["csd[0-2]: 6.1", "csd9:\n  a\n  b"]


def test_each_command_gets_the_whole_input_at_its_own_pace() -> None:
    read, write = os.pipe()
    shared = SharedInput(read)
    first, second = shared.reader(), shared.reader()
    os.write(write, b"begin ")
    assert first() == b"begin "
    data = os.urandom(300_000)
    writer = threading.Thread(target=lambda: (os.write(write, data), os.close(write)))
    writer.start()
    whole = [b"".join(iter(reader, b"")) for reader in (first, second)]
    writer.join()
    os.close(read)
    assert whole == [data, b"begin " + data]


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
