# SPDX-License-Identifier: Apache-2.0
"""Edge: what the firmware starts: kernel, command line and initial file system in one EFI program, and the
small FAT file system that it lies in.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

from millpond.images.boards import Board
from millpond.images.build.context import Context
from millpond.images.build.run import run

ESP_BYTES = 96 << 20
PROGRAM = "EFI/BOOT/BOOTAA64.EFI"
_STUB = "usr/lib/systemd/boot/efi/linuxaa64.efi.stub"
_BASICS = (
    "ro",
    "quiet",
    "loglevel=4",
    "panic=10",
    "fsck.repair=yes",  # nobody is there to answer, and without its state a device is lost
    "iommu.passthrough=1",
    "systemd.show_status=no",
    "systemd.gpt_auto=0",
)
_ALIGNMENT = 0x10000
_PE_OFFSET_AT, _PE_TIME, _PE_CHECKSUM = 0x3C, 8, 88


def command_line(board: Board) -> str:
    """Return the kernel's command line."""
    consoles = [f"console={name}" for name in reversed(board.console)]  # the last is /dev/console
    return " ".join([*consoles, *_BASICS, *board.arguments])


def make_program(context: Context, unpacked: Path, kernel: Path, initrd: Path) -> Path:
    """Build a unified kernel image: systemd's stub with sections behind its own."""
    work = context.work
    (work / "cmdline").write_text(command_line(context.board))
    parts = {
        ".osrel": context.root / "usr/lib/os-release",
        ".cmdline": work / "cmdline",
        ".linux": kernel,
        ".initrd": initrd,
    }
    made, address, options = work / "BOOTAA64.EFI", 1 << 24, []
    for name, path in parts.items():
        options += ["--add-section", f"{name}={path}", "--change-section-vma", f"{name}={address:#x}"]
        address += -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT
    run("aarch64-linux-gnu-objcopy", *options, unpacked / _STUB, made)
    take_time_away(made)
    return made


def take_time_away(program: Path) -> None:
    """Zero the time stamp that objcopy writes into a PE file, and the checksum that covers it."""
    with program.open("r+b") as file:
        file.seek(_PE_OFFSET_AT)
        (header,) = struct.unpack("<I", file.read(4))
        for place in (header + _PE_TIME, header + _PE_CHECKSUM):
            file.seek(place)
            file.write(bytes(4))


def make_esp(context: Context, program: Path) -> Path:
    """Build the EFI system partition, which holds ``program`` alone."""
    made = context.work / "esp.vfat"
    with made.open("wb") as file:
        os.truncate(file.fileno(), ESP_BYTES)
    run("mkfs.vfat", "--invariant", "-F", "32", "-n", "MILLPOND", made, environment=context.clock)
    staged = context.work / "staged"
    shutil.copyfile(program, staged)
    os.utime(staged, (context.epoch, context.epoch))
    parents = [str(parent) for parent in reversed(Path(PROGRAM).parents) if parent.name]
    run("mmd", "-i", made, *(f"::{parent}" for parent in parents), environment=context.clock)
    run("mcopy", "-m", "-i", made, staged, f"::{PROGRAM}", environment=context.clock)
    return made
