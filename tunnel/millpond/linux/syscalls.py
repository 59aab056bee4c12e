# SPDX-License-Identifier: Apache-2.0
"""Edge: call the system calls that Python 3.11 has no binding for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOSYMFOLLOW = 0x100
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SHARED = 0x100000

MNT_DETACH = 0x2

CAP_CHOWN = 0
CAP_DAC_OVERRIDE = 1
CAP_FOWNER = 3
CAP_FSETID = 4
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_NET_BIND_SERVICE = 10
CAP_NET_ADMIN = 12
CAP_SYS_RAWIO = 17
CAP_SYS_CHROOT = 18
CAP_SYS_ADMIN = 21
CAP_LEASE = 28
CAP_AUDIT_WRITE = 29

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_GET_NAME = 16
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_SECCOMP_MODE_FILTER = 2
_PR_SET_NO_NEW_PRIVS = 38
UTIME_NOW = (1 << 30) - 1
UTIME_OMIT = (1 << 30) - 2

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442  # the same on all processors
_MOUNT_ATTR_NOSYMFOLLOW = 0x200000
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_STATX_MNT_ID_UNIQUE = 0x4000
_MOUNT = struct.Struct("@I140xQ")  # struct statx, from its mask to stx_mnt_id
_DIRENT = struct.Struct("@QqHB")  # struct linux_dirent64, up to its name

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), call)


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` (CLONE_NEW*). Raises OSError."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def enter_namespace(descriptor: int, kind: int) -> None:
    """Enter the namespace that ``descriptor`` is open on, of kind CLONE_NEW*. Raises OSError."""
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)), "setns")


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """Call mount(2). Raises OSError that names the target."""
    result = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(result, str(target))


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Bind ``source`` (a file or tree, with its submounts) to ``target``. Raises OSError."""
    mount(str(source), target, "", MS_BIND | MS_REC)
    if read_only and not _set_tree(target, MS_RDONLY):
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY
        try:
            mount("", target, "", flags)
        except PermissionError:  # a user namespace may not drop flags that the source carries
            mount("", target, "", flags | _locked_flags(target))


def _set_tree(target: Path, flags: int, propagation: int = 0) -> bool:
    """Add ``flags``, of MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC and MS_NOSYMFOLLOW, to those of a mount and
    its submounts, which a remount leaves as they are. False before Linux 5.12.
    """
    if flags & MS_NOSYMFOLLOW:
        flags ^= MS_NOSYMFOLLOW | _MOUNT_ATTR_NOSYMFOLLOW
    attributes = ctypes.create_string_buffer(struct.pack("=4Q", flags, 0, propagation, 0), 32)
    arguments = (ctypes.c_int(_AT_FDCWD), os.fsencode(target), ctypes.c_uint(_AT_RECURSIVE), attributes)
    result = _libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), *arguments, ctypes.c_size_t(32))
    if result < 0 and ctypes.get_errno() == errno.ENOSYS:
        return False
    _check(result, str(target))
    return True


def _locked_flags(path: Path) -> int:
    have = os.statvfs(path).f_flag
    pairs = ((os.ST_NOSUID, MS_NOSUID), (os.ST_NODEV, MS_NODEV), (os.ST_NOEXEC, MS_NOEXEC))
    noatime, relatime = (0x400, 0x400), (0x1000, 0x200000)
    return sum(flag for bit, flag in (*pairs, noatime, relatime) if have & bit)


def restrict(target: Path, flags: int) -> None:
    """Add ``flags`` (MS_NOSUID and the like) to those of the mount at ``target``. Raises OSError."""
    mount("", target, "", MS_BIND | MS_REMOUNT | flags | _locked_flags(target))


def restrict_tree(target: Path, flags: int) -> None:
    """Add ``flags``, of MS_RDONLY, MS_NOSUID, MS_NODEV and MS_NOEXEC, to those of the mount at ``target`` and
    of all below it. What is mounted later where it was bound from does not appear below it, as it would
    without these flags. Before Linux 5.12 only the mount itself gets them. Raises OSError.
    """
    if not _set_tree(target, flags, MS_PRIVATE):
        mount("", target, "", MS_REC | MS_PRIVATE)
        restrict(target, flags)


def follow_no_links(target: Path) -> None:
    """Have the kernel follow no symbolic link below the mount at ``target``. Raises OSError."""
    flags = MS_BIND | MS_REMOUNT | MS_NOSYMFOLLOW | MS_NOSUID | MS_NODEV
    mount("", target, "", flags)


def follow_no_links_in_tree(target: Path) -> None:
    """Have the kernel follow no symbolic link below the mount at ``target``, nor in the mounts below it.
    Raises OSError, also before Linux 5.14.
    """
    if not _set_tree(target, MS_NOSYMFOLLOW):
        raise OSError(errno.ENOSYS, "mounts without links need Linux 5.14", str(target))


def unmount(target: Path, flags: int = MNT_DETACH) -> None:
    """Call umount2(2); lazy by default, so it never waits for a dead server."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), str(target))


def pivot_root(new_root: Path) -> None:
    """Make ``new_root``, a mount point, the root directory and forget the old root."""
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, "pivot_root is not known on this processor", os.uname().machine)
    os.chdir(new_root)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), str(new_root))
    unmount(Path())
    os.chdir("/")


def die_with_parent(signal: int) -> None:
    """Have the kernel send this process ``signal`` when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal), 0, 0, 0), "prctl")


def thread_name() -> bytes:
    """Return the name of this thread in /proc, at most 15 bytes."""
    name = ctypes.create_string_buffer(16)
    _check(_libc.prctl(_PR_GET_NAME, name, 0, 0, 0), "prctl")
    return name.value


def set_thread_name(name: bytes) -> None:
    """Set the name of this thread in /proc, of which the kernel keeps 15 bytes."""
    _check(_libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0), "prctl")


def make_dumpable() -> None:
    """Make /proc/self this user's again after a change of credentials, as execve does."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def killed_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that has the child killed when this thread ends, also if it had
    ended before.
    """
    parent = os.getpid()

    def tie() -> None:
        die_with_parent(SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return tie


def no_new_privileges() -> None:
    """Set no_new_privs: set-uid programs have no effect for this process and its descendants."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def keep_capabilities(*numbers: int) -> None:
    """Drop every capability but those of CAP_* ``numbers`` that this process has. A program that root of the
    namespace executes would regain them.
    """
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, data), "capget")
    low, high = struct.unpack("=4xI8xI4x", data.raw)  # the permitted ones
    kept = (high << 32 | low) & sum(1 << number for number in numbers)
    words = [kept & 0xFFFFFFFF] * 2 + [0] + [kept >> 32] * 2 + [0]  # effective, permitted, inheritable, twice
    _check(_libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words), 24)), "capset")


@contextlib.contextmanager
def without_capability(number: int) -> Iterator[None]:
    """Return a context in which this thread acts without capability CAP_* ``number`` if it has it."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    before = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, before), "capget")
    word, bit = 3 * (number // 32), 1 << number % 32  # effective, permitted, inheritable, twice
    words = list(struct.unpack("=6I", before.raw))
    words[word] &= ~bit
    _check(_libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words), 24)), "capset")
    try:
        yield
    finally:
        _check(_libc.capset(header, before), "capset")


def drop_bounding_set(*numbers: int) -> None:
    """Drop every capability but CAP_* ``numbers`` for good, also for programs that root executes."""
    for number in range(64):
        if number not in numbers and _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            if ctypes.get_errno() == errno.EINVAL:  # the kernel has no more capabilities
                break
            _check(-1, "prctl")
    keep_capabilities(*numbers)


def drop_capabilities() -> None:
    """Drop every capability."""
    keep_capabilities()


def filter_system_calls(program: bytes) -> None:
    """Install a seccomp program of 8-byte instructions for every later system call; ``no_new_privileges``
    must come first.
    """
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    arguments = (ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.create_string_buffer(header, len(header)))
    _check(_libc.prctl(_PR_SET_SECCOMP, *arguments, 0, 0), "seccomp")


def has_system_call_filters() -> bool:
    """Return whether the kernel takes seccomp programs: it then finds that there is none at address 0."""
    _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def set_hostname(name: str) -> None:
    """Name the machine of this UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def set_times(path: str, atime: tuple[int, int], mtime: tuple[int, int]) -> None:
    """Call utimensat(2): seconds and nanoseconds of each time, or UTIME_NOW or UTIME_OMIT for these."""
    times = ctypes.create_string_buffer(struct.pack("@qlql", *atime, *mtime), 32)
    _check(_libc.utimensat(ctypes.c_int(_AT_FDCWD), os.fsencode(path), times, 0), path)


def rename(here: int, name: bytes, there: int, new_name: bytes, flags: int) -> None:
    """Call renameat2(2)."""
    arguments = (ctypes.c_int(here), name, ctypes.c_int(there), new_name, ctypes.c_uint(flags))
    _check(_libc.renameat2(*arguments), os.fsdecode(name))


def allocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2)."""
    numbers = (ctypes.c_int64(offset), ctypes.c_int64(length))
    _check(_libc.fallocate(ctypes.c_int(descriptor), ctypes.c_int(mode), *numbers), "fallocate")


def sync_file_system(descriptor: int) -> None:
    """Call syncfs(2): all that was written to the file system of an open file is then on its disk."""
    _check(_libc.syncfs(ctypes.c_int(descriptor)), "syncfs")


def start_writeback(descriptor: int) -> None:
    """Call sync_file_range(2) to begin the writing of an open file's data to its disk, without waiting."""
    whole = (ctypes.c_int64(0), ctypes.c_int64(0))
    _check(_libc.sync_file_range(ctypes.c_int(descriptor), *whole, ctypes.c_uint(2)), "sync_file_range")


def read_directory(descriptor: int, size: int = 1 << 15) -> list[tuple[bytes, int, int, int]]:
    """Call getdents64(2) on an open directory: ``size`` bytes of entries, none at its end. Returns name,
    inode, type bits as in a mode, and the file offset behind the entry, from which lseek(2) goes on.
    """
    buffer, found, at = ctypes.create_string_buffer(size), [], 0
    end = _libc.getdents64(ctypes.c_int(descriptor), buffer, ctypes.c_size_t(size))
    _check(end, "getdents64")
    data = buffer.raw[:end]
    while at < end:
        inode, offset, length, kind = _DIRENT.unpack_from(data, at)
        name = data[at + _DIRENT.size : data.index(b"\0", at + _DIRENT.size)]
        found.append((name, inode, kind << 12, offset))
        at += length
    return found


def file_system(descriptor: int) -> int:
    """Return the type of the file system of an open file, as its magic number. Raises OSError."""
    found = ctypes.create_string_buffer(256)  # struct statfs, which begins with it
    _check(_libc.fstatfs(ctypes.c_int(descriptor), found), "fstatfs")
    return int(struct.unpack_from("@l", found)[0]) & 0xFFFFFFFF


def mount_number(descriptor: int) -> int:
    """Return the number of the mount through which a file was opened, which no other one gets before the next
    boot; 0 before Linux 6.8. Raises OSError.
    """
    found = ctypes.create_string_buffer(256)
    numbers = (ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_MNT_ID_UNIQUE))
    _check(_libc.statx(ctypes.c_int(descriptor), b"", *numbers, found), "statx")
    mask, number = _MOUNT.unpack_from(found)
    return int(number) if mask & _STATX_MNT_ID_UNIQUE else 0
