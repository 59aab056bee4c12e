# SPDX-License-Identifier: Apache-2.0
"""The live view in a real terminal, tmux, of a fleet with real devices."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..waiting import eventually
from .support import MILLPOND, Emulation

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux"),
]
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9\d|10\d)(?:;[\d;]*)?m")


class Terminal:
    """A terminal of 80 x 24 characters in which a command runs."""

    def __init__(self, socket: Path, command: str) -> None:
        self._tmux = ("tmux", "-S", str(socket), "-f", "/dev/null")
        self.run("new-session", "-d", "-x", "80", "-y", "24", command)

    def run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def screen(self, *options: str) -> str:
        """What the terminal shows; with ``-e`` its colours, too."""
        return self.run("capture-pane", "-p", *options)

    def shows(self, text: str) -> str:
        return eventually(lambda: text in (found := self.screen()) and found, f"'{text}'", 60, 0.1) or ""

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def has_ended(self) -> bool:
        done = subprocess.run([*self._tmux, "has-session"], capture_output=True, timeout=30)
        return done.returncode != 0


@pytest.fixture
def terminal(fleet: Emulation, tmp_path: Path) -> Iterator[Terminal]:
    command = shlex.join(("env", "NO_COLOR=1", *MILLPOND, "top", "--fleet", str(fleet.directory)))
    found = Terminal(tmp_path / "tmux", command)
    yield found
    subprocess.run(["tmux", "-S", str(tmp_path / "tmux"), "kill-server"], capture_output=True, timeout=30)


def test_the_view_works_in_a_small_terminal_without_colours(terminal: Terminal) -> None:
    lines = terminal.shows("csd2").splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines if line.startswith("csd")][:3] == [
        ["csd0", "ready"],
        ["csd1", "ready"],
        ["csd2", "ready"],
    ]
    assert not COLOUR.search(terminal.screen("-e"))
    terminal.press("l")
    terminal.shows("log of csd0")
    terminal.press("Escape")
    terminal.shows("3 devices")
    terminal.press("Down", "s")
    eventually(lambda: "3 devices" not in terminal.screen(), "the shell's screen", 60, 0.1)
    terminal.press("echo on-$(uname -n)-$((40 + 2))", "Enter")
    terminal.shows("on-csd1-42")
    terminal.press("exit", "Enter")
    terminal.shows("3 devices")
    terminal.press("q")
    eventually(terminal.has_ended, "the end of the view", 30, 0.1)
