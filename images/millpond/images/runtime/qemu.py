# SPDX-License-Identifier: Apache-2.0
"""Edge: a board in QEMU: the same image as on a real one, and every instruction of it emulated.

Its slot, a folder shared with the host, holds the doorbell server's socket: the tunnel is its only network.
QEMU emulates devices for a guest that the host does not trust, so it has a system call filter of its own and,
where this process is root, runs as a user without privileges that owns the board's files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.boards import Board
from millpond.linux.confinement.userns import has_many_uids
from millpond.linux.logs import rotate
from millpond.linux.syscalls import killed_with_parent

log = logging.getLogger(__name__)

PROGRAM = "qemu-system-aarch64"
FIRMWARE = (Path("/usr/share/AAVMF/AAVMF_CODE.fd"), Path("/usr/share/qemu-efi-aarch64/QEMU_EFI.fd"))
VARIABLES = Path("/usr/share/AAVMF/AAVMF_VARS.fd")
DISK, FLASH, CONSOLE = "disk.img", "flash.img", "console.log"
USER = 64007
"""The uid and gid of QEMU where this process is root."""
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_SERVER_SECONDS = 20.0
_FIRMWARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class QemuSpec:
    """A board to run in QEMU: its name, the directory of its ``disk.img`` and ``slot``, and its hardware."""

    name: str
    directory: Path
    board: Board
    extra: tuple[str, ...] = ()
    """More arguments for QEMU."""


def flash_name(name: str) -> str:
    """Return udev's name of the flash in the board called ``name``, by model and serial number."""
    return f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{name}"


def refusal_reason() -> str:
    """Return what this machine lacks to run such a board, and what to install; "" if nothing."""
    if not shutil.which(PROGRAM):
        return f"{PROGRAM} is not installed: sudo apt install qemu-system-arm"
    if not VARIABLES.exists() or not any(path.exists() for path in FIRMWARE):
        return "there is no UEFI firmware for QEMU: sudo apt install qemu-efi-aarch64"
    return ""


class QemuBoard:
    """A board that can be switched on and off. Call from one thread: QEMU dies with it."""

    off_seconds = 60.0

    def __init__(self, spec: QemuSpec) -> None:
        self.spec = spec
        self._server: subprocess.Popen[bytes] | None = None
        self._qemu: subprocess.Popen[bytes] | None = None

    def power_on(self) -> None:
        """Start the board. Raises LocalError if it has no disk, or cannot be."""
        directory = self.spec.directory
        if reason := refusal_reason():
            raise LocalError(reason)
        if not (directory / DISK).exists():
            raise LocalError(
                f"{self.spec.name} has no {DISK}: 'millpond emulate --qemu' makes it from an image"
            )
        self._prepare()
        try:
            self._start_both()
        except (LocalError, OSError):
            self._cut()
            raise

    def _start_both(self) -> None:
        path = self.spec.directory / CONSOLE
        rotate(path)
        with path.open("ab") as console:
            self._start_server(console.fileno())
            if drops_privileges():
                self._hand_over()
            self._qemu = self._start(arguments(self.spec), console.fileno(), _become_user)

    def _prepare(self) -> None:
        """Create the board's flash and its firmware's variables, if it has none yet."""
        directory = self.spec.directory
        assert self.spec.board.qemu
        (directory / "slot").mkdir(exist_ok=True)
        flash, variables = directory / FLASH, directory / "variables.fd"
        if not flash.exists():
            flash.touch(mode=0o600)
            os.truncate(flash, self.spec.board.qemu.flash << 20)
        if not variables.exists():
            shutil.copyfile(VARIABLES, directory / "variables.new")
            os.truncate(directory / "variables.new", _FIRMWARE_BYTES)
            (directory / "variables.new").rename(variables)

    def _start_server(self, console: int) -> None:
        """Start the doorbell server, which QEMU asks once, at its start."""
        doorbells = self.spec.directory / "slot" / "doorbells"
        doorbells.unlink(missing_ok=True)
        self._server = self._start(
            [sys.executable, "-P", "-m", "millpond.tunnel.transports.ivshmem", "--socket", str(doorbells)],
            console,
        )
        deadline = time.monotonic() + _SERVER_SECONDS
        while not _is_private(doorbells):  # the server's last step before it listens
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise LocalError(f"{self.spec.name}: the doorbell server does not start: see {CONSOLE}")
            time.sleep(0.01)

    def _hand_over(self) -> None:
        """Give the files that QEMU opens to its user, who may pass through the board's directory: QEMU begins
        there, and needs none of those around it.
        """
        directory = self.spec.directory
        mode = stat.S_IMODE(directory.stat().st_mode)
        if not mode & stat.S_IXOTH:
            os.chown(directory, -1, USER)
            directory.chmod(mode | stat.S_IXGRP)
        slot = directory / "slot"
        for path in (directory / DISK, directory / FLASH, directory / "variables.fd", slot):
            os.chown(path, USER, USER, follow_symlinks=False)
        _share(slot / "doorbells")

    def _start(
        self, argv: list[str], console: int, become: Callable[[], None] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program in the board's directory; ``become`` runs in it first."""
        die = killed_with_parent()

        def prepare() -> None:
            if become is not None:
                become()
            die()  # last: a change of the user would undo it

        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            preexec_fn=prepare,
            start_new_session=True,
            cwd=self.spec.directory,
        )

    @property
    def name(self) -> str:
        """Return the device's name."""
        return self.spec.name

    @property
    def pids(self) -> set[int]:
        """Return the board's processes while it is on."""
        return {process.pid for process in (self._server, self._qemu) if process}

    def died(self) -> bool:
        """Return whether the board has gone off by itself, as it must without doorbell server; true once."""
        if self._qemu is None or self._server is None:
            return False
        if self._qemu.poll() is None and self._server.poll() is None:
            return False
        self._cut()
        return True

    @property
    def exit_code(self) -> int | None:
        """Return QEMU's exit code once it has ended: 0 if the machine switched itself off."""
        return self._qemu.poll() if self._qemu else None

    def shut_down(self) -> None:
        """Press the power button; return at once."""
        if self._qemu is not None:
            with contextlib.suppress(OSError):
                _command(self.spec.directory / "slot" / "qmp", "system_powerdown")

    def power_off(self, patience: float) -> None:
        """Wait ``patience`` seconds until the board is off, then cut its power."""
        deadline = time.monotonic() + patience
        while self._qemu is not None and self._qemu.poll() is None:
            if time.monotonic() > deadline:
                log.warning("%s does not shut down; its power is cut", self.spec.name)
                self._qemu.kill()
                deadline = math.inf
            time.sleep(0.02)
        self._cut()

    def _cut(self) -> None:
        for process in (self._qemu, self._server):
            if process:
                process.kill()
                process.wait()
        self._qemu = self._server = None


def _is_private(path: Path) -> bool:
    return path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o600


def drops_privileges() -> bool:
    """Return whether QEMU runs as ``USER``: where this process is root and may become another user."""
    return os.geteuid() == 0 and has_many_uids()


def _share(path: Path) -> None:
    """Let QEMU's user connect to a socket of root's, as the host's end of the tunnel does, too: that is root
    without the capability to pass over modes. The folder is that user's, so no link is followed.
    """
    socket_itself = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        os.chown(f"/proc/self/fd/{socket_itself}", -1, USER)
        Path(f"/proc/self/fd/{socket_itself}").chmod(0o660)
    finally:
        os.close(socket_itself)


def _become_user() -> None:
    if drops_privileges():
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)


def _command(path: Path, name: str) -> None:
    """Send a command by QMP and ignore the answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as monitor:
        monitor.settimeout(2.0)
        monitor.connect(str(path))
        with monitor.makefile("rwb") as stream:
            stream.readline()
            for command in ("qmp_capabilities", name):
                stream.write(json.dumps({"execute": command}).encode() + b"\n")
                stream.flush()
                stream.readline()


def arguments(spec: QemuSpec) -> list[str]:
    """Return QEMU's command line, to be run in the board's directory. Raises LocalError for another board."""
    hardware = spec.board.qemu
    if hardware is None:
        raise LocalError(f"{spec.board.title} cannot be run in QEMU")
    firmware = next(path for path in FIRMWARE if path.exists())
    argv = [PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-name", spec.name]
    argv += ["-sandbox", SANDBOX]
    argv += [*hardware.arguments, "-m", str(hardware.memory), "-smp", str(hardware.processors)]
    argv += ["-serial", "stdio", "-qmp", "unix:slot/qmp,server=on,wait=off"]
    argv += ["-drive", f"if=pflash,format=raw,readonly=on,file={firmware}"]
    argv += ["-drive", "if=pflash,format=raw,file=variables.fd"]
    argv += ["-drive", f"if=none,id=disk,format=raw,file={DISK},discard=unmap,cache=writeback"]
    argv += ["-device", "virtio-blk-pci,drive=disk,romfile=,bootindex=0"]
    argv += ["-drive", f"if=none,id=flash,format=raw,file={FLASH},discard=unmap,cache=writeback"]
    argv += ["-device", f"nvme,drive=flash,serial={spec.name}"]
    argv += ["-device", "virtio-rng-pci,romfile="]
    argv += ["-chardev", "socket,id=doorbells,path=slot/doorbells"]
    argv += ["-device", "ivshmem-doorbell,chardev=doorbells,vectors=3"]
    return [*argv, *spec.extra]
