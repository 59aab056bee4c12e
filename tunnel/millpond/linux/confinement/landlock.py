# SPDX-License-Identifier: Apache-2.0
"""Edge (Landlock): restrict this process, for good, to the files below one directory.

The kernel checks the real place of a file, however it was named: through links, /proc/self/fd or a
descriptor of a directory. Files that are open already stay usable. Newer kernels also take away TCP, the
abstract sockets of others, and signals to them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from millpond.linux import syscalls

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all processors
_ASK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_FIRST_FILE_RIGHTS = (1 << 13) - 1
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEVICE = 1 << 15
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1

_ATTRIBUTES = struct.Struct("=QQQ")
_SIZES = ((6, 24), (4, 16), (1, 8))  # bytes of it that each version knows
_BENEATH = struct.Struct("=Qi")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Handled:
    """Access rights that a kernel can forbid: bits of LANDLOCK_ACCESS_FS_*, _NET_* and LANDLOCK_SCOPE_*."""

    files: int
    network: int = 0
    scopes: int = 0


def handled(version: int) -> Handled:
    """Return the rights that kernels with a version of Landlock can forbid, as far as known here."""
    files = _FIRST_FILE_RIGHTS
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        files |= right if version >= since else 0
    network = _BIND_TCP | _CONNECT_TCP if version >= 4 else 0
    return Handled(files, network, _ABSTRACT_SOCKETS | _SIGNALS if version >= 6 else 0)


def version() -> int:
    """Return the kernel's version of Landlock. Raises OSError: ENOSYS if it has none, EOPNOTSUPP if it is
    off.
    """
    return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))


def why_off() -> str:
    """Return why no process can be restricted here; empty if they can be. Raises OSError if that fails."""
    try:
        found = version()
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return "the kernel has none" if error.errno == errno.ENOSYS else "the kernel's is not active"
    return "" if found > 1 else "the kernel's first version forbids to move files between directories"


def restrict(directory: Path) -> str:
    """Let this process, and all that it starts, open and change only files below ``directory`` and execute
    none. Returns in words whether it is so: "on" or "off", and why. Raises OSError if it fails.

    The kernel restricts the calling thread, so there must be no other yet.
    """
    if threading.active_count() > 1:
        raise RuntimeError("Landlock would not hold for the threads that run already")
    if reason := why_off():
        return f"off: {reason}"
    found = version()
    syscalls.no_new_privileges()
    _restrict(directory, handled(found), next(size for since, size in _SIZES if found >= since))
    return f"on, version {found}"


def _restrict(directory: Path, handled: Handled, size: int) -> None:
    attributes = _ATTRIBUTES.pack(handled.files, handled.network, handled.scopes)[:size]
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        beneath = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            rule = _BENEATH.pack(handled.files & ~(_EXECUTE | _IOCTL_DEVICE), beneath)
            _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
        finally:
            os.close(beneath)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
