# SPDX-License-Identifier: Apache-2.0
"""Edge: make changes of files and directories durable, keep secrets, compute digests, name the boot."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from millpond.linux import syscalls

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HASHED = 1 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@functools.cache
def boot_id() -> bytes:
    """Return 16 bytes that name this boot of the machine, or this process where the kernel does not tell it.
    The first call is to come before the process is restricted.
    """
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return os.urandom(16)


def storage_id(folder: Path) -> bytes:
    """Return what names the file system of an existing folder for as long as what was written to it is there
    or on its way there: it changes at a boot, and when the file system is mounted again. Raises OSError.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        numbers = os.fstat(descriptor).st_dev, syscalls.mount_number(descriptor)
    finally:
        os.close(descriptor)
    return boot_id() + b"".join(number.to_bytes(8) for number in numbers)


def sync_folder(folder: Path) -> None:
    """Make names that were created, renamed or removed in ``folder`` durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_folders(folder: Path) -> None:
    """Let every user enter and list ``folder`` and those in it, whatever the umask is. Raises OSError."""
    for path, _, _ in os.walk(folder):
        Path(path).chmod(0o755)


def later_than_all(folder: Path) -> int:
    """Return a time in ns, now if it can be, that is later than those of all entries of ``folder``: what is
    marked with it is the last in use, also where the clock was set back. Raises OSError.
    """
    with os.scandir(folder) as entries:
        times = [entry.stat(follow_symlinks=False).st_mtime_ns for entry in entries]
    return max([time.time_ns(), *(time_ns + 1 for time_ns in times)])


def replace_durably(fresh: Path, file: Path) -> None:
    """Rename a whole new file. Also after a power cut ``file`` is the old or the new one, and when this
    returns it is the new one. Raises OSError.
    """
    with fresh.open("rb") as opened:
        os.fsync(opened.fileno())
    fresh.replace(file)
    sync_folder(file.parent)


def write_durably(file: Path, data: bytes, mode: int | None = None) -> None:
    """Write or replace a small file as ``replace_durably`` does. Without a ``mode`` that of the old file
    stays, or it is as the umask has it. Raises OSError, and leaves the old file then.
    """
    fresh = file.with_name(f".{file.name}.new")
    fresh.unlink(missing_ok=True)
    if mode is None and file.exists():
        mode = stat.S_IMODE(file.stat().st_mode)
    try:
        with os.fdopen(os.open(fresh, _NEW, 0o666 if mode is None else 0o600), "wb") as out:
            if mode is not None:
                _set_mode(out.fileno(), mode, file)
            out.write(data)
        replace_durably(fresh, file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _set_mode(descriptor: int, mode: int, file: Path) -> None:
    """Set a mode. Raises OSError where others may do more than it says: FAT has one mode for all files."""
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, mode)
    if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077 & ~mode:
        told = "its file system keeps no modes, so others could read it: choose another one"
        raise PermissionError(errno.EPERM, told, str(file))


def write_secret(file: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, as ``write_durably`` does. Raises OSError."""
    write_durably(file, data, 0o600)


def sha256_of(path: Path, advance: Callable[[int], None] = lambda _count: None) -> str:
    """Compute the SHA-256 of a file's contents, in hexadecimal digits; ``advance`` is called with the bytes
    of each part. Raises OSError.
    """
    import hashlib  # only here: processes that last, and compute none, do without OpenSSL

    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_HASHED):
            digest.update(data)
            advance(len(data))
    return digest.hexdigest()
