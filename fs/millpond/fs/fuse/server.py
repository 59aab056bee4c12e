# SPDX-License-Identifier: Apache-2.0
"""Edge: serves an InodeFs through /dev/fuse, without libfuse.

The kernel caches the names, attributes and data that the InodeFs lets it cache. Where the InodeFs has local
files and the kernel supports passthrough (Linux 6.9), it reads and writes open files itself, as fast as the
file system below.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from millpond.base.errors import LocalError
from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Header, Valid
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.file_locks import KernelLocks
from millpond.fs.fuse.mounts import require_mountable
from millpond.fs.vfs.inode_api import (
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    InodeFs,
    NegativeEntry,
    Node,
    Now,
    SetAttr,
    WouldBlock,
    may_block,
    may_map,
    page_writeback,
)
from millpond.fs.vfs.path_api import Handle, Owner, os_error

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Reply = Sequence[Buffer]
Prefetch = Callable[[Node, Sequence[bytes]], None]
log = logging.getLogger(__name__)

_THREADS = 4
_SLOW = frozenset({Code.FSYNC, Code.FSYNCDIR})
"""Operations that wait for the flash, and so run in the thread pool at once."""


class _Stop(BaseException):
    """Raised by a signal to end the mount. Not an Exception: the handling of one request's errors must not
    catch it.
    """


def passthrough_refusal(directory: Path, backing: int) -> str:
    """Return the reason why the kernel cannot pass through the files of ``backing``, an open directory; empty
    if it can.

    Tried by a mount on an empty ``directory``. Raises LocalError if nothing can be mounted there.
    """
    require_mountable(directory, "millpond")
    with _signals_blocked():
        try:
            kernel = FuseDevice(directory, "millpond", backing)
        except LocalError as error:
            return str(error)
        kernel.close()
        return kernel.passthrough_refusal


def mount_and_serve(
    tree: InodeFs,
    mountpoint: Path,
    *,
    name: str,
    backing: int | None = None,
    options: Sequence[str] = ("allow_other",),
    prefetch: Prefetch | None = None,
    on_ready: Callable[[FuseDevice], None],
) -> None:
    """Mount ``tree`` at ``mountpoint`` as ``name`` and serve it, in this thread, until it is unmounted.

    Its files may lie in ``backing``, an open directory. ``options`` are of mount(8). ``prefetch`` is called
    with a directory and the names in it that are about to be read, and returns at once. SIGTERM, SIGINT and
    SIGHUP unmount it. ``on_ready`` is called once it is mounted. The thread must be the main one. Raises
    LocalError if it cannot mount.
    """
    require_mountable(mountpoint, name)
    with _signals_blocked():
        kernel = FuseDevice(mountpoint, name, backing, options)
        binding = FuseServer(kernel, tree, prefetch)
        try:
            with _stopped_by_signals() as woken:
                kernel.wake_by(woken)
                on_ready(kernel)
                binding.serve()
        finally:
            binding.close()
            kernel.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals: a mount made meanwhile must not be left behind."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[int]:
    """End the context at the first signal; later ones do not disturb the end of the process.

    Yields a descriptor that is readable once a signal has come: it may come just before the thread begins to
    wait.
    """

    def stop(_number: int, _frame: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise _Stop

    before: dict[signal.Signals, Any] = {number: signal.signal(number, stop) for number in _SIGNALS}
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakened = signal.set_wakeup_fd(writing)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # the parent process may have blocked them
        yield reading
    except _Stop:
        before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        signal.set_wakeup_fd(wakened)
        os.close(reading)
        os.close(writing)
        for number, handler in before.items():
            signal.signal(number, handler)


class FuseServer:
    """Performs the kernel's requests on an InodeFs."""

    def __init__(self, kernel: FuseDevice, tree: InodeFs, prefetch: Prefetch | None = None) -> None:
        self._kernel, self._tree, self._prefetch = kernel, tree, prefetch
        self._backings, self._locks = _Backings(kernel), KernelLocks(kernel, tree.locks)
        self._waiting = ThreadPoolExecutor(_THREADS, "fsync")

    def serve(self) -> None:
        """Answer requests until the mount has gone. This thread never blocks on a recall."""
        may_block.set(False)
        try:
            while True:
                self._serve_one()
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def _serve_one(self) -> None:
        header, body = self._kernel.receive()
        handler = _HANDLERS.get(header.code)
        if handler is None:
            self._serve_unanswered(header, body)
        elif header.code in _SLOW:
            self._waiting.submit(self._answer, handler, header, memoryview(bytes(body)))
        else:
            try:
                self._answer(handler, header, body)
            except WouldBlock:
                self._waiting.submit(self._answer, handler, header, memoryview(bytes(body)))

    def _serve_unanswered(self, header: Header, body: memoryview) -> None:
        """Handle requests without a reply, and refuse unknown ones."""
        if header.code in abi.UNANSWERED:
            try:
                self._forget(header, body)
            except Exception:
                log.exception("a FORGET of the kernel failed")  # the mount goes on
        elif header.code is Code.INTERRUPT:
            self._locks.interrupt(body)
        else:
            self._kernel.fail(header, errno.ENOSYS)

    def _answer(
        self,
        handler: Callable[[FuseServer, Header, memoryview], Reply | None],
        header: Header,
        body: memoryview,
    ) -> None:
        try:
            parts = handler(self, header, body)
        except NegativeEntry as absent:
            if absent.seconds and header.code is Code.LOOKUP and self._kernel.caches_names:
                self._kernel.reply(header, [abi.pack_absence(absent.seconds)])
            else:
                self._kernel.fail(header, errno.ENOENT)
        except OSError as error:
            self._kernel.fail(header, error.errno or errno.EIO)
        except (OverflowError, ValueError):  # a number or a name that no system call takes
            self._kernel.fail(header, errno.EINVAL)
        except WouldBlock:
            if not may_block.get():
                raise
            self._kernel.fail(header, errno.EIO)  # the other side of a recall breaks the protocol
        except Exception:
            log.exception("a request of the kernel (%s) failed", header.code)  # other requests go on
            self._kernel.fail(header, errno.EIO)
        else:
            if parts is not None:
                self._kernel.reply(header, parts)

    def close(self) -> None:
        """Wait for requests under way, but not for file locks."""
        self._locks.close()
        self._waiting.shutdown()

    def _forget(self, header: Header, body: memoryview) -> None:
        if header.code is Code.FORGET:
            self._tree.forget(Node(header.node), abi.FORGET.unpack_from(body)[0])
            return
        count, _ = abi.BATCH_FORGET.unpack_from(body)
        for number in range(count):
            place = abi.BATCH_FORGET.size + number * abi.FORGOTTEN.size
            node, times = abi.FORGOTTEN.unpack_from(body, place)
            self._tree.forget(Node(node), times)

    def _lookup(self, header: Header, body: memoryview) -> Reply:
        (name,) = abi.names(body)
        return self._entry(self._tree.lookup(Node(header.node), name))

    def _entry(self, found: FoundEntry) -> Reply:
        name_seconds = found.name_seconds if self._kernel.caches_names else 0.0
        return [abi.pack_entry(found.node, found.attributes, found.seconds, name_seconds)]

    def _getattr(self, header: Header, _body: memoryview) -> Reply:
        return [_attributes(self._tree.getattr(Node(header.node)))]

    def _setattr(self, header: Header, body: memoryview) -> Reply:
        valid, _, handle, *rest = abi.SETATTR.unpack_from(body)
        opened = Handle(handle) if valid & Valid.HANDLE else None
        return [_attributes(self._tree.setattr(Node(header.node), _changes(Valid(valid), rest), opened))]

    def _readlink(self, header: Header, _body: memoryview) -> Reply:
        return [self._tree.readlink(Node(header.node))]

    def _symlink(self, header: Header, body: memoryview) -> Reply:
        name, target = abi.names(body, 2)
        return self._entry(self._tree.symlink(Node(header.node), name, target, _owner(header)))

    def _mknod(self, header: Header, body: memoryview) -> Reply:
        mode, rdev, _, _ = abi.MKNOD.unpack_from(body)
        (name,) = abi.names(body[abi.MKNOD.size :])
        return self._entry(self._tree.mknod(Node(header.node), name, mode, rdev, _owner(header)))

    def _mkdir(self, header: Header, body: memoryview) -> Reply:
        mode, _ = abi.MKDIR.unpack_from(body)
        (name,) = abi.names(body[abi.MKDIR.size :])
        return self._entry(self._tree.mkdir(Node(header.node), name, mode, _owner(header)))

    def _unlink(self, header: Header, body: memoryview) -> Reply:
        self._tree.unlink(Node(header.node), *abi.names(body))
        return ()

    def _rmdir(self, header: Header, body: memoryview) -> Reply:
        self._tree.rmdir(Node(header.node), *abi.names(body))
        return ()

    def _rename(self, header: Header, body: memoryview) -> Reply:
        (directory,) = abi.RENAME.unpack_from(body)
        old, new = abi.names(body[abi.RENAME.size :], 2)
        self._tree.rename(Node(header.node), old, Node(directory), new)
        return ()

    def _rename2(self, header: Header, body: memoryview) -> Reply:
        directory, flags, _ = abi.RENAME2.unpack_from(body)
        old, new = abi.names(body[abi.RENAME2.size :], 2)
        self._tree.rename(Node(header.node), old, Node(directory), new, flags)
        return ()

    def _link(self, header: Header, body: memoryview) -> Reply:
        (node,) = abi.LINK.unpack_from(body)
        return self._entry(self._tree.link(Node(node), Node(header.node), *abi.names(body[abi.LINK.size :])))

    def _open(self, header: Header, body: memoryview) -> Reply:
        flags, _ = abi.OPEN.unpack_from(body)
        node = Node(header.node)
        handle = self._tree.open(node, flags)
        return [self._opened(node, handle, flags)]

    def _create(self, header: Header, body: memoryview) -> Reply:
        flags, mode, _, _ = abi.CREATE.unpack_from(body)
        (name,) = abi.names(body[abi.CREATE.size :])
        found, handle = self._tree.create(Node(header.node), name, flags, mode, _owner(header))
        return [*self._entry(found), self._opened(found.node, handle, flags)]

    def _opened(self, node: Node, handle: Handle, flags: int) -> bytes:
        access = self._tree.cache_mode(handle)
        if access is CacheMode.CACHED:
            return abi.pack_opened(handle, abi.OPEN_KEEP_CACHE)
        if access is CacheMode.PASSTHROUGH:
            backing = self._backings.open(node, handle, self._tree.descriptor(handle))
            if backing is not None:
                if may_map(flags):
                    self._kernel.drop(node, data=False)
                return abi.pack_opened(handle, abi.OPEN_PASSTHROUGH, backing)
        return abi.pack_opened(handle, abi.OPEN_DIRECT_IO)

    def _read(self, _header: Header, body: memoryview) -> Reply:
        handle, offset, size, *_ = abi.READ.unpack_from(body)
        return [self._tree.read(Handle(handle), size, offset)]

    def _write(self, header: Header, body: memoryview) -> Reply:
        handle, offset, size, how, _, flags, _ = abi.WRITE.unpack_from(body)
        if how & abi.WRITE_KILL_SUIDGID:
            self._drop_privileges(Node(header.node))
        self._tree.locks.require(Node(header.node))
        page_writeback.set(bool(how & abi.WRITE_CACHE))
        data, append = body[abi.WRITE.size :][:size], bool(flags & os.O_APPEND)
        return [abi.pack_written(self._tree.write(Handle(handle), data, offset, append=append))]

    def _drop_privileges(self, node: Node) -> None:
        """Clear the set-id bits of a file that is written to: its writer must not decide as which user it
        runs.
        """
        mode = self._tree.getattr(node).attributes.mode
        dropped = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
        if mode & dropped:
            self._tree.setattr(node, SetAttr(mode=stat.S_IMODE(mode) & ~dropped))
            self._kernel.drop(node, data=False)

    def _statfs(self, _header: Header, _body: memoryview) -> Reply:
        return [abi.pack_statistics(self._tree.statfs())]

    def _release(self, header: Header, body: memoryview) -> Reply:
        handle, *_ = abi.RELEASE.unpack_from(body)
        self._locks.released(header, body)
        self._backings.close(Node(header.node), Handle(handle))
        self._tree.release(Handle(handle))
        return ()

    def _fsync(self, _header: Header, body: memoryview) -> Reply:
        handle, flags, _ = abi.FSYNC.unpack_from(body)
        self._tree.fsync(Handle(handle), bool(flags & abi.FSYNC_DATA_ONLY))
        return ()

    def _opendir(self, header: Header, _body: memoryview) -> Reply:
        return [abi.pack_opened(self._tree.opendir(Node(header.node)))]

    def _readdir(self, _header: Header, body: memoryview) -> Reply:
        handle, offset, size, *_ = abi.READ.unpack_from(body)
        return [abi.pack_directory(enumerate(self._tree.readdir(Handle(handle), offset), offset + 1), size)]

    def _releasedir(self, _header: Header, body: memoryview) -> Reply:
        handle, *_ = abi.RELEASE.unpack_from(body)
        self._tree.release(Handle(handle))
        return ()

    def _fallocate(self, _header: Header, body: memoryview) -> Reply:
        handle, offset, length, mode, _ = abi.FALLOCATE.unpack_from(body)
        self._tree.allocate(Handle(handle), mode, offset, length)
        return ()

    def _lseek(self, _header: Header, body: memoryview) -> Reply:
        handle, offset, whence, _ = abi.LSEEK.unpack_from(body)
        return [abi.pack_offset(self._tree.seek(Handle(handle), offset, whence))]

    def _ioctl(self, header: Header, body: memoryview) -> Reply:
        if self._prefetch is None:
            raise os_error(errno.ENOTTY)
        self._prefetch(Node(header.node), abi.names_to_prefetch(body))
        return [abi.pack_ioctl()]


_HANDLERS: Mapping[Code | None, Callable[[FuseServer, Header, memoryview], Reply | None]] = {
    Code.LOOKUP: FuseServer._lookup,
    Code.GETATTR: FuseServer._getattr,
    Code.SETATTR: FuseServer._setattr,
    Code.READLINK: FuseServer._readlink,
    Code.SYMLINK: FuseServer._symlink,
    Code.MKNOD: FuseServer._mknod,
    Code.MKDIR: FuseServer._mkdir,
    Code.UNLINK: FuseServer._unlink,
    Code.RMDIR: FuseServer._rmdir,
    Code.RENAME: FuseServer._rename,
    Code.RENAME2: FuseServer._rename2,
    Code.LINK: FuseServer._link,
    Code.OPEN: FuseServer._open,
    Code.CREATE: FuseServer._create,
    Code.READ: FuseServer._read,
    Code.WRITE: FuseServer._write,
    Code.STATFS: FuseServer._statfs,
    Code.RELEASE: FuseServer._release,
    Code.FSYNC: FuseServer._fsync,
    Code.OPENDIR: FuseServer._opendir,
    Code.READDIR: FuseServer._readdir,
    Code.RELEASEDIR: FuseServer._releasedir,
    Code.FSYNCDIR: FuseServer._fsync,
    Code.FALLOCATE: FuseServer._fallocate,
    Code.LSEEK: FuseServer._lseek,
    Code.IOCTL: FuseServer._ioctl,
    Code.GETLK: lambda binding, header, body: binding._locks.get(header, body),
    Code.SETLK: lambda binding, header, body: binding._locks.set(header, body),
    Code.SETLKW: lambda binding, header, body: binding._locks.set(header, body),
    Code.FLUSH: lambda binding, header, body: binding._locks.closed(header, body),
    Code.DESTROY: lambda _binding, _header, _body: (),
}


class _Backings:
    """The backing files for passthrough: one for all open files of a node."""

    def __init__(self, kernel: FuseDevice) -> None:
        self._kernel = kernel
        self._numbers: dict[Node, int] = {}
        self._users: dict[Node, set[Handle]] = {}
        self._lock = threading.Lock()

    def open(self, node: Node, handle: Handle, descriptor: int) -> int | None:
        """Return the number of a node's backing file; None if the kernel refuses it."""
        if self._kernel.passthrough_refusal:
            return None
        with self._lock:
            if node not in self._numbers:
                try:
                    self._numbers[node] = self._kernel.open_backing(descriptor)
                except OSError:
                    return None
            self._users.setdefault(node, set()).add(handle)
            return self._numbers[node]

    def close(self, node: Node, handle: Handle) -> None:
        """Drop a handle, and with the last one the backing file."""
        if node not in self._users:
            return
        with self._lock:
            users = self._users.get(node, set())
            users.discard(handle)
            if node in self._numbers and not users:
                self._kernel.close_backing(self._numbers.pop(node))
                del self._users[node]


def _attributes(known: CachedAttributes) -> bytes:
    return abi.pack_attributes(known.attributes, known.seconds)


def _owner(header: Header) -> Owner:
    return Owner(header.uid, header.gid)


def _changes(valid: Valid, fields: Sequence[int]) -> SetAttr:
    """Return the attributes that a SETATTR sets; ``fields`` are those behind the handle."""
    size, _lock, atime, mtime, _ctime, atime_ns, mtime_ns, _ctime_ns, mode, _, uid, gid, _ = fields
    return SetAttr(
        mode & 0o7777 if valid & Valid.MODE else None,
        uid if valid & Valid.UID else None,
        gid if valid & Valid.GID else None,
        size if valid & Valid.SIZE else None,
        _time(valid, Valid.ATIME, Valid.ATIME_NOW, atime, atime_ns),
        _time(valid, Valid.MTIME, Valid.MTIME_NOW, mtime, mtime_ns),
    )


def _time(valid: Valid, given: Valid, now: Valid, seconds: int, nanoseconds: int) -> int | Now | None:
    if not valid & given:
        return None
    if valid & now:
        return Now.NOW
    signed = seconds - (1 << 64) if seconds >> 63 else seconds
    return signed * 10**9 + nanoseconds
