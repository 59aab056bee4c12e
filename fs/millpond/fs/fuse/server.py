# SPDX-License-Identifier: Apache-2.0
"""Edge: serves an InodeFs through /dev/fuse, without libfuse.

The kernel caches the names, attributes and data that the InodeFs lets it cache. Where the InodeFs has local
files and the kernel supports passthrough (Linux 6.9), it reads and writes open files itself, as fast as the
file system below.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Header, Valid
from millpond.fs.fuse.backings import Backings
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.directories import list_attributes, list_names
from millpond.fs.fuse.extended import KernelExtended
from millpond.fs.fuse.file_locks import KernelLocks
from millpond.fs.fuse.mounts import require_mountable
from millpond.fs.fuse.operation_log import OperationLog
from millpond.fs.fuse.signals import signals_blocked, stopped_by_signals
from millpond.fs.fuse.threads import RequestThreads
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
    WriteGathering,
    page_writeback,
)
from millpond.fs.vfs.ownership import OwnerMap
from millpond.fs.vfs.path_api import Handle, Owner, os_error

Reply = Sequence[Buffer]
log = logging.getLogger(__name__)


def passthrough_refusal(directory: Path, backing: int) -> str:
    """Return the reason why the kernel cannot pass through the files of ``backing``, an open directory; empty
    if it can.

    Tried by a mount on an empty ``directory``. Raises LocalError if nothing can be mounted there.
    """
    require_mountable(directory, "millpond")
    with signals_blocked():
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
    operations: OperationLog | None = None,
    owners: OwnerMap | None = None,
    gathering: WriteGathering | None = None,
    on_ready: Callable[[FuseDevice], None],
) -> None:
    """Mount ``tree`` at ``mountpoint`` as ``name`` and serve it until it is unmounted.

    Its files may lie in ``backing``, an open directory. ``options`` are of mount(8). What programs do is
    recorded in ``operations``. ``owners`` says whose the files show as, ``gathering`` answers small writes
    before they are done. SIGTERM, SIGINT and SIGHUP unmount it. ``on_ready`` is called once it is mounted.
    The thread must be the main one. Raises LocalError if it cannot mount.
    """
    require_mountable(mountpoint, name)
    with signals_blocked():
        kernel = FuseDevice(mountpoint, name, backing, options)
        binding = FuseServer(kernel, tree, operations, owners, gathering)
        try:
            with stopped_by_signals() as woken:
                on_ready(kernel)
                binding.serve(woken)
        finally:
            if binding.close():
                kernel.close()
            else:  # a thread still uses the descriptor, which the end of the process closes
                kernel.unmount()


class FuseServer:
    """Performs the kernel's requests on an InodeFs, in several threads."""

    def __init__(
        self,
        kernel: FuseDevice,
        tree: InodeFs,
        operations: OperationLog | None = None,
        owners: OwnerMap | None = None,
        gathering: WriteGathering | None = None,
    ) -> None:
        self._owners, self._gathering = owners or OwnerMap(), gathering
        self._kernel, self._tree = kernel, tree
        self._operations = operations or OperationLog()
        self._backings, self._locks = Backings(kernel), KernelLocks(kernel, tree.locks)
        self._extended = KernelExtended(tree.extended, is_cheap=kernel.leaves_privileges)
        self._threads = RequestThreads(
            kernel,
            lambda header: header.code in _HANDLERS,
            self._perform_now,
            self._perform,
            kernel.fail,
            cancel_lock=self._locks.interrupt,
            answer_at_once=self._gather,
        )

    def serve(self, woken: int | None = None) -> None:
        """Answer requests until the mount has gone, or the descriptor ``woken`` is readable."""
        self._threads.run(woken)

    def close(self) -> bool:
        """Wait for requests under way, but not for file locks; interrupt those that take long. Returns
        whether all have ended.
        """
        self._locks.close()
        return self._threads.close()

    def _perform(self, header: Header, body: memoryview) -> None:
        assert header.code
        self._answer(_HANDLERS[header.code], header, body)

    def _perform_now(self, header: Header, body: memoryview) -> None:
        """Handle requests without a reply, and refuse unknown ones."""
        if header.code in abi.UNANSWERED:
            try:
                self._forget(header, body)
            except Exception:
                log.exception("a FORGET of the kernel failed")  # the mount goes on
        elif header.code is Code.INTERRUPT:
            self._threads.interrupts.request(*abi.INTERRUPT.unpack_from(body))
        else:
            self._kernel.fail(header, errno.ENOSYS)

    def _answer(
        self,
        handler: Callable[[FuseServer, Header, memoryview], Reply | None],
        header: Header,
        body: memoryview,
    ) -> None:
        began = time.monotonic()
        code, parts, cause = self._outcome(handler, header, body)
        if not code and parts is None:  # a file lock that is waited for
            return
        self._operations.answered(header, code, began, cause)  # before the program can look at the statistics
        if parts is None:
            self._kernel.fail(header, code)
        else:
            self._kernel.reply(header, parts)

    def _outcome(
        self,
        handler: Callable[[FuseServer, Header, memoryview], Reply | None],
        header: Header,
        body: memoryview,
    ) -> tuple[int, Reply | None, BaseException | None]:
        """Perform a request. Returns the errno, 0 for success, with the reply and the error."""
        try:
            return 0, handler(self, header, body), None
        except NegativeEntry as absent:
            if absent.seconds and header.code is Code.LOOKUP and self._kernel.caches_names:
                return 0, [abi.pack_absence(absent.seconds)], None
            return errno.ENOENT, None, absent
        except OSError as error:
            return error.errno or errno.EIO, None, error
        except (OverflowError, ValueError) as error:  # a number or a name that no system call takes
            return errno.EINVAL, None, error
        except Exception as error:
            log.exception("a request of the kernel (%s) failed", header.code)  # other requests go on
            return errno.EIO, None, error

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
        shown = self._owners.shown(found.attributes)
        return [abi.pack_entry(found.node, shown, found.seconds, name_seconds)]

    def _attributes(self, known: CachedAttributes) -> Reply:
        return [abi.pack_attributes(self._owners.shown(known.attributes), known.seconds)]

    def _getattr(self, header: Header, _body: memoryview) -> Reply:
        return self._attributes(self._tree.getattr(Node(header.node)))

    def _setattr(self, header: Header, body: memoryview) -> Reply:
        valid, _, handle, *rest = abi.SETATTR.unpack_from(body)
        opened, node = Handle(handle) if valid & Valid.HANDLE else None, Node(header.node)
        changes = self._owners.stored(_changes(Valid(valid), rest))
        changed = (
            self._tree.getattr(node) if changes == SetAttr() else self._tree.setattr(node, changes, opened)
        )
        if valid & Valid.KILL_SUIDGID:
            changed = self._drop_privileges(node, changed) or changed
        return self._attributes(replace(changed, seconds=0.0))  # Linux before 6.16 takes recalled ones

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
        layout = abi.RENAME2 if header.code is Code.RENAME2 else abi.RENAME
        directory, *flags = layout.unpack_from(body)
        old, new = abi.names(body[layout.size :], 2)
        self._tree.rename(Node(header.node), old, Node(directory), new, *flags[:1])
        return ()

    def _link(self, header: Header, body: memoryview) -> Reply:
        (node,) = abi.LINK.unpack_from(body)
        found = self._tree.link(Node(node), Node(header.node), *abi.names(body[abi.LINK.size :]))
        return self._entry(replace(found, seconds=0.0))  # the kernel would take them, recalled or not

    def _open(self, header: Header, body: memoryview) -> Reply:
        flags, _ = abi.OPEN.unpack_from(body)
        node = Node(header.node)
        handle = self._tree.open(node, flags)
        return [self._opened(node, handle)]

    def _create(self, header: Header, body: memoryview) -> Reply:
        flags, mode, _, _ = abi.CREATE.unpack_from(body)
        (name,) = abi.names(body[abi.CREATE.size :])
        found, handle = self._tree.create(Node(header.node), name, flags, mode, _owner(header))
        return [*self._entry(found), self._opened(found.node, handle)]

    def _opened(self, node: Node, handle: Handle) -> bytes:
        access = self._tree.cache_mode(handle)
        if access is CacheMode.CACHED:
            return abi.pack_opened(handle, abi.OPEN_KEEP_CACHE)
        if access is CacheMode.PASSTHROUGH:
            backing = self._backings.open(node, handle, self._tree.descriptor)
            if backing is not None:
                return abi.pack_opened(handle, abi.OPEN_PASSTHROUGH, backing)
        return abi.pack_opened(handle, abi.OPEN_DIRECT_IO)

    def _read(self, _header: Header, body: memoryview) -> Reply:
        handle, offset, size, *_ = abi.READ.unpack_from(body)
        return [self._tree.read(Handle(handle), size, offset)]

    def _gather(self, header: Header, body: memoryview) -> bool:
        """Gather a write and answer it, without waiting. Returns False if it is to be performed as others."""
        gathering = self._gathering
        _, offset, size, how, _, flags, _ = abi.WRITE.unpack_from(body)
        if gathering is None or how & abi.WRITE_CACHE:
            return False
        began, data = time.monotonic(), body[abi.WRITE.size :][:size]
        try:
            self._tree.locks.require(Node(header.node))
        except OSError:
            return False
        if not gathering.add(Node(header.node), flags, data, offset):
            return False
        self._kernel.reply(header, (abi.pack_written(size),))
        self._operations.answered(header, 0, began)
        return True

    def _write(self, header: Header, body: memoryview) -> Reply:
        handle, offset, size, how, _, flags, _ = abi.WRITE.unpack_from(body)
        node, data, append = Node(header.node), body[abi.WRITE.size :][:size], bool(flags & os.O_APPEND)
        self._tree.locks.require(node)
        page_writeback.set(bool(how & abi.WRITE_CACHE))
        gathering = None if how & abi.WRITE_CACHE else self._gathering
        if gathering and gathering.add_when_sent(node, flags, data, offset):
            return [abi.pack_written(len(data))]
        if how & abi.WRITE_KILL_SUIDGID:
            self._drop_privileges(node, self._tree.getattr(node))
        return [abi.pack_written(self._tree.write(Handle(handle), data, offset, append=append))]

    def _drop_privileges(self, node: Node, known: CachedAttributes) -> CachedAttributes | None:
        """Clear the set-id bits of a file that is written to: its writer must not decide as which user it
        runs. Returns the attributes after it; None if there were no such bits.
        """
        mode = known.attributes.mode
        dropped = stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0)
        if not mode & dropped:
            return None
        changed = self._tree.setattr(node, SetAttr(mode=stat.S_IMODE(mode) & ~dropped))
        self._kernel.drop(node, data=False)
        return changed

    def _statfs(self, _header: Header, _body: memoryview) -> Reply:
        return [abi.pack_statistics(self._tree.statfs())]

    def _release(self, header: Header, body: memoryview) -> Reply:
        handle, *_ = abi.RELEASE.unpack_from(body)
        self._locks.released(header, body)
        self._backings.close(Node(header.node), Handle(handle))
        self._tree.release(Handle(handle))
        return ()

    def _flush(self, header: Header, body: memoryview) -> Reply:
        handle, _ = abi.FLUSH.unpack_from(body)
        failure: OSError | None = None
        try:
            if self._gathering:
                self._gathering.close_descriptor(Handle(handle))
        except OSError as error:
            failure = error
        self._locks.closed(header, body)  # once others may see what was written under them
        if failure:
            raise failure
        return ()

    def _fsync(self, _header: Header, body: memoryview) -> Reply:
        handle, flags, _ = abi.FSYNC.unpack_from(body)
        self._tree.fsync(Handle(handle), bool(flags & abi.FSYNC_DATA_ONLY))
        return ()

    def _opendir(self, header: Header, _body: memoryview) -> Reply:
        return [abi.pack_opened(self._tree.opendir(Node(header.node)))]

    def _readdirplus(self, _header: Header, body: memoryview) -> Reply:
        return list_attributes(self._tree, body, self._owners.ids, caches_names=self._kernel.caches_names)

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

    def _ioctl(self, _header: Header, _body: memoryview) -> Reply:
        raise os_error(errno.ENOTTY)


_HANDLERS: Mapping[Code | None, Callable[[FuseServer, Header, memoryview], Reply | None]] = {
    Code.LOOKUP: FuseServer._lookup,
    Code.IOCTL: FuseServer._ioctl,
    Code.GETATTR: FuseServer._getattr,
    Code.SETATTR: FuseServer._setattr,
    Code.READLINK: FuseServer._readlink,
    Code.SYMLINK: FuseServer._symlink,
    Code.MKNOD: FuseServer._mknod,
    Code.MKDIR: FuseServer._mkdir,
    Code.UNLINK: FuseServer._unlink,
    Code.RMDIR: FuseServer._rmdir,
    Code.RENAME: FuseServer._rename,
    Code.RENAME2: FuseServer._rename,
    Code.LINK: FuseServer._link,
    Code.OPEN: FuseServer._open,
    Code.CREATE: FuseServer._create,
    Code.READ: FuseServer._read,
    Code.WRITE: FuseServer._write,
    Code.STATFS: FuseServer._statfs,
    Code.RELEASE: FuseServer._release,
    Code.FSYNC: FuseServer._fsync,
    Code.OPENDIR: FuseServer._opendir,
    Code.READDIR: lambda binding, _header, body: list_names(binding._tree, body),
    Code.READDIRPLUS: FuseServer._readdirplus,
    Code.RELEASEDIR: FuseServer._releasedir,
    Code.FSYNCDIR: FuseServer._fsync,
    Code.FALLOCATE: FuseServer._fallocate,
    Code.LSEEK: FuseServer._lseek,
    Code.GETLK: lambda binding, header, body: binding._locks.get(header, body),
    Code.SETLK: lambda binding, header, body: binding._locks.set(header, body),
    Code.SETLKW: lambda binding, header, body: binding._locks.set(header, body),
    Code.FLUSH: FuseServer._flush,
    **dict.fromkeys(
        (Code.GETXATTR, Code.SETXATTR, Code.LISTXATTR, Code.REMOVEXATTR),
        lambda binding, header, body: binding._extended.perform(header, body),
    ),
    Code.DESTROY: lambda _binding, _header, _body: (),
}


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
        return "now"
    signed = seconds - (1 << 64) if seconds >> 63 else seconds
    return signed * 10**9 + nanoseconds
