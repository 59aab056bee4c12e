# SPDX-License-Identifier: Apache-2.0
"""The boot loader that the firmware starts."""

from __future__ import annotations

import struct
from pathlib import Path

from millpond.images import boards
from millpond.images.build.boot import command_line, take_time_away
from millpond.images.build.verity import VerifiedRoot


def test_a_program_does_not_say_when_it_was_made(tmp_path: Path) -> None:
    def made(time: int) -> Path:
        dos = b"MZ".ljust(0x3C, b"\1") + struct.pack("<I", 0x80) + b"stub".ljust(0x40, b"\2")
        coff = b"PE\0\0" + struct.pack("<HHIIIHH", 0xAA64, 4, time, 0, 0, 240, 0x206)
        optional = struct.pack("<H62xI", 0x20B, 0x1234 + time).ljust(240, b"\3")
        path = tmp_path / f"{time}.efi"
        path.write_bytes(dos + coff + optional + b"sections")
        return path

    first, second = made(1_700_000_000), made(1_700_000_256)
    before = first.read_bytes()
    assert before != second.read_bytes()
    for path in (first, second):
        take_time_away(path)
    after = first.read_bytes()
    assert after == second.read_bytes()
    zeros = bytes(4)
    assert after == before[:0x88] + zeros + before[0x8C:0xD8] + zeros + before[0xDC:]


def test_the_command_line_vouches_for_the_root() -> None:
    """The first program reads these two words, and maps no other root."""
    words = command_line(boards.read("qemu-virt"), VerifiedRoot(32768, "0f" * 32).argument).split()
    assert words.count(f"millpond.verity=32768,{'0f' * 32}") == 1
    assert words[0] == "console=ttyAMA0"
