# SPDX-License-Identifier: Apache-2.0
"""Board files: each holds all that an image needs, and a mistake in one is reported in one line."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.images import boards
from millpond.images.build import boot, kernel, recipe
from millpond.images.build.recipe import RECIPE

BOARD = """title = "t"
kernel = "arm64"
console = ["ttyS0"]
early = ["nvme"]
modules = []
tried = "nothing"
"""
TUNNEL = '[tunnel]\ntransport = "nvme"\n'
README = Path(__file__).parents[2] / "images" / "README.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(boards, "FOLDER", tmp_path)
    return tmp_path


def test_the_boards_of_the_issue_are_there() -> None:
    assert {"qemu-virt", "generic-uefi", "bluefield2"} <= set(boards.names())
    assert boards.EMULATED not in boards.names()


@pytest.mark.parametrize("name", boards.names())
def test_every_board_says_what_an_image_needs(name: str) -> None:
    board = boards.read(name)
    assert board.title and board.tried and board.console and board.early
    assert "squashfs" in board.early  # the root is one
    assert board.watchdog
    for word in (*board.watchdog, *board.early, *board.modules, *kernel.common()):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", word)
    assert board.flash.disk in ("boot", "own")  # no name that the kernel gives as it finds them
    line = boot.command_line(board)
    assert "\n" not in line and line.split().count("ro") == 1
    assert [word for word in line.split() if word.startswith("console=")][-1] == f"console={board.console[0]}"


def test_a_system_that_hangs_is_restarted() -> None:
    """Before systemd had started, nothing did that; and where there was no state, a person was waited for."""
    words = boot.command_line(boards.read("qemu-virt")).split()
    assert {"panic=10", "softlockup_panic=1"} <= set(words)
    first = (RECIPE / "initrd-init").read_text()
    assert 0 < first.index("watchdog -F") < first.index("/modules/*.ko")
    assert "reboot" in (RECIPE / "root/etc/systemd/system/emergency.service").read_text()
    assert "emergency.service" not in recipe.read("root.toml")["mask"]


def test_a_new_board_is_one_file(folder: Path) -> None:
    (folder / "mine.toml").write_text(BOARD + TUNNEL)
    assert boards.names() == ["mine"]
    assert boards.read("mine").tunnel.transport == "nvme"
    assert boards.read("mine").qemu is None


def test_the_board_of_the_readme_is_one(folder: Path) -> None:
    (board,) = re.findall(r"^ *```toml\n(.*?)^ *```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "mine.toml").write_text(textwrap.dedent(board))
    assert boards.read("mine").tried == "nothing yet"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOARD, "missing key 'tunnel'"),
        ('titel = "t"\n' + BOARD + TUNNEL, "unknown key 'titel'; did you mean 'title'"),
        (BOARD + TUNNEL + "[flash]\ndisc = 1\n", "disk"),
        (BOARD + '[tunnel]\ntransport = "pigeon"\n', "transport"),
        (BOARD.replace('["ttyS0"]', '["ttyS0 init=/bin/sh"]') + TUNNEL, "cannot stand in"),
        (BOARD.replace('"nvme"', '"nvme\\nloop"') + TUNNEL, "cannot be a kernel's module"),
        (BOARD.replace("modules = []", 'modules = ["../x"]') + TUNNEL, "cannot be a kernel's module"),
        ("[[[", "mine.toml"),
    ],
)
def test_a_mistake_in_a_board_is_one_line(folder: Path, text: str, words: str) -> None:
    (folder / "mine.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        boards.read("mine")
    assert words in str(caught.value) and "mine.toml" in str(caught.value)
    assert "\n" not in repr(str(caught.value))


@pytest.mark.parametrize("name", ["paper", "", "../recipe/root", "emulated"])
def test_an_unknown_board_is_told_with_those_that_there_are(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no board .*; there are emulated, bluefield2, generic-uefi"
    ):
        boards.read(name)
