# SPDX-License-Identifier: Apache-2.0
# SPDX-License-Identifier: Apache-2.0
"""Firmware that asks for a signature (UEFI Secure Boot) starts a signed image, and nothing else.

Its db holds one certificate, which Debian's qemu-efi-aarch64 brings with its key for such tests. The device
does not get ready: Debian's kernel is locked down by Secure Boot, and gives no program PCI memory.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.images.build.secure_boot import SigningKey
from millpond.images.runtime.qemu import CONSOLE, DISK, VARIABLES

from ..system.qemu import Board, create
from ..waiting import eventually
from .image_support import Builder

ENROLLED = VARIABLES.with_name("AAVMF_VARS.snakeoil.fd")
_KEY = Path("/usr/share/qemu-efi-aarch64/PkKek-1-snakeoil.key")
_REFUSED = "Access Denied"
_SECONDS = 900.0

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not ENROLLED.exists(), reason=f"there is no {ENROLLED}"),
    pytest.mark.skipif(shutil.which("osslsigncode") is None, reason="osslsigncode is not installed"),
]


@pytest.fixture(scope="module")
def signed(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = tmp_path_factory.mktemp("keys") / "key.pem"
    argv = ["openssl", "pkey", "-in", _KEY, "-passin", "pass:snakeoil", "-out", key]
    subprocess.run(argv, check=True, timeout=60)
    return builder.build("signed", 4_000_000_000, signer=SigningKey(key, _KEY.with_suffix(".pem")))


@contextlib.contextmanager
def started(board: Board) -> Iterator[None]:
    """The board on, with firmware that asks."""
    shutil.copyfile(ENROLLED, board.directory / "variables.fd")
    (board.directory / CONSOLE).touch()
    board.emulation.start()
    try:
        yield
    finally:
        left = board.emulation.stop(120.0)
    assert not left, f"left behind: {left}"


def is_refused(board: Board) -> bool:
    assert board.boots() == 0, board.console()
    return _REFUSED in board.console()


def test_a_signed_image_starts(signed: Path, tmp_path: Path) -> None:
    board = create(tmp_path, signed)
    with started(board):
        eventually(lambda: board.boots() == 1, "the first program", _SECONDS, 1.0)
        lockdown = "a kernel that is locked down, as under Secure Boot"
        eventually(lambda: lockdown in board.console(), "the agent's reason", _SECONDS, 1.0)


def test_an_image_without_a_signature_does_not_start(image: Path, tmp_path: Path) -> None:
    board = create(tmp_path, image)
    with started(board):
        eventually(lambda: is_refused(board), "the firmware's refusal", _SECONDS, 1.0)


def test_another_command_line_does_not_start(signed: Path, tmp_path: Path) -> None:
    board = create(tmp_path, signed)
    disk = board.directory / DISK
    replaced = subprocess.run(["grep", "-obUa", "millpond.verity=", disk], check=True, capture_output=True)
    (place,) = {int(line.partition(b":")[0]) for line in replaced.stdout.splitlines()}
    with disk.open("r+b") as file:
        file.seek(place)
        file.write(b"millpond_verity=")
    with started(board):
        eventually(lambda: is_refused(board), "the firmware's refusal", _SECONDS, 1.0)
