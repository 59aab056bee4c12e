# SPDX-License-Identifier: Apache-2.0
"""Edge (loop devices): the power of a file system that lies in a file, cut and given back.

The cut is ext4's own emergency stop (FS_IOC_SHUTDOWN) without a last commit of its journal, the harshest that
it has: what was not synced is not written any more. What the drive was sent before is there: a drive that
forgets what is in its cache is not played.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux import syscalls

_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_SECONDS = 10.0
_PATH = ":/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Power:
    """That of the file system at ``flash``, which lies in ``image``."""

    flash: Path
    image: Path

    def cut(self) -> None:
        """From now on nothing reaches the image; who uses the file system gets EIO."""
        top = os.open(self.flash, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(top, _SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))
        finally:
            os.close(top)

    def restore(self) -> None:
        """As at the next start: the journal is replayed. Nobody may use what was mounted before. Raises
        LocalError if the file system is damaged then.
        """
        self._unmount()
        self._mount()  # the kernel replays the journal; e2fsck would do it by other code
        self._unmount()
        _run(["e2fsck", "-fn", str(self.image)])
        self._mount()

    def _mount(self) -> None:
        _run(["mount", "-o", "loop", str(self.image), str(self.flash)])

    def _unmount(self) -> None:
        """And wait until it is gone everywhere: a killed process's namespace ends a bit later."""
        loop = _loop(self.flash)
        end = time.monotonic() + _SECONDS
        while not _unmounted(self.flash):
            _wait(end, f"{self.flash} is still in use")
        while _file_behind(loop) == str(self.image):
            _wait(end, f"{self.flash} is still mounted somewhere")


def find(flash: Path) -> Power | None:
    """That of the file system at ``flash``, if it has one that can be cut."""
    image = _file_behind(_loop(flash))
    return Power(flash, Path(image)) if image else None


def _loop(flash: Path) -> Path:
    device = flash.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/loop/backing_file")


def _file_behind(loop: Path) -> str:
    try:
        return loop.read_text().removesuffix("\n")
    except OSError:  # it is none, or has been given back
        return ""


def _unmounted(place: Path) -> bool:
    try:
        syscalls.unmount(place, 0)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _wait(end: float, complaint: str) -> None:
    if time.monotonic() > end:
        raise LocalError(complaint)
    time.sleep(0.01)


def _run(argv: list[str]) -> None:
    environment = os.environ | {"PATH": os.environ["PATH"] + _PATH}
    done = subprocess.run(argv, capture_output=True, check=False, env=environment, text=True)
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip().splitlines() or [f"exit code {done.returncode}"]
        raise LocalError(f"{argv[0]}: {'; '.join(said[-3:])}")
