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
from millpond.images.build.secure_boot import sign
from millpond.images.build.verity import VerifiedRoot

ESP_BYTES = 96 << 20
PROGRAM = "EFI/BOOT/BOOTAA64.EFI"
_PARTS = ("stub", "os-release", "kernel", "initrd")
"""What the program is made of, as the base keeps it."""
_STUB = "usr/lib/systemd/boot/efi/linuxaa64.efi.stub"
_BASICS = (
    "ro",
    "quiet",
    "loglevel=4",
    "panic=10",
    "softlockup_panic=1",  # a processor that hangs in the kernel for a minute restarts the machine,
    "watchdog_thresh=30",  # which is half of that; for less, some are too slow
    "fsck.repair=yes",  # nobody is there to answer, and without its state a device is lost
    "iommu.passthrough=1",
    "systemd.show_status=no",
    "systemd.gpt_auto=0",
)
_ALIGNMENT = 0x10000
_PE_OFFSET_AT, _PE_TIME, _PE_CHECKSUM = 0x3C, 8, 88


def command_line(board: Board, *more: str) -> str:
    """Return the kernel's command line, with ``more`` of its words at the end."""
    consoles = [f"console={name}" for name in reversed(board.console)]  # the last is /dev/console
    return " ".join([*consoles, *_BASICS, *board.arguments, *more])


def keep_parts(base: Path, root: Path, unpacked: Path, kernel: Path, initrd: Path) -> None:
    """Put into ``base`` what the program is made of, but for the command line, which vouches for the root."""
    for name, source in zip(
        _PARTS, (unpacked / _STUB, root / "usr/lib/os-release", kernel, initrd), strict=True
    ):
        shutil.copyfile(source, base / name)


def make_program(context: Context, base: Path, root: VerifiedRoot) -> Path:
    """Build a unified kernel image that boots ``root``: systemd's stub with sections behind its own. It is
    signed if the context has a key.
    """
    work = context.work
    (work / "cmdline").write_text(command_line(context.board, root.argument))
    stub, release, kernel, initrd = (base / name for name in _PARTS)
    parts = {".osrel": release, ".cmdline": work / "cmdline", ".linux": kernel, ".initrd": initrd}
    made, address, options = work / "BOOTAA64.EFI", 1 << 24, []
    for name, path in parts.items():
        options += ["--add-section", f"{name}={path}", "--change-section-vma", f"{name}={address:#x}"]
        address += -(-path.stat().st_size // _ALIGNMENT) * _ALIGNMENT
    run("aarch64-linux-gnu-objcopy", *options, stub, made)
    take_time_away(made)
    if context.signer:
        sign(made, context.signer, context.epoch)
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
