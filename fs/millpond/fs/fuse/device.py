# SPDX-License-Identifier: Apache-2.0
"""Edge (/dev/fuse): mounts, receives requests, sends replies and notifications, and registers backing files
for passthrough.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Feature, Header
from millpond.fs.fuse.mounts import read_ahead
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.path_api import MAX_TRANSFER, os_error
from millpond.linux import syscalls

_WANTED = Feature.BIG_WRITES | Feature.PARALLEL_DIROPS | Feature.MAX_PAGES | Feature.INIT_EXT
_WANTED |= Feature.HANDLE_KILLPRIV_V2  # else the kernel asks for security.capability before each write
_LOCKING = Feature.POSIX_LOCKS | Feature.FLOCK_LOCKS
_LISTING = Feature.DO_READDIRPLUS | Feature.READDIRPLUS_AUTO
_CACHING = Feature.ASYNC_READ | Feature.AUTO_INVAL_DATA | _LISTING
_BUFFER = MAX_TRANSFER + (1 << 16)  # the header comes before the data
_MAX_BACKGROUND, _CONGESTED = 64, 48  # asynchronous requests (readahead, writeback, release) at once
_STACKED = 2  # stacked file systems, at most: the flash may be an overlay itself
_BACKING = struct.Struct("=iIQ")
_BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
_BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, uint32_t)
_LONGEST_POLL = 1 << 30  # milliseconds that fit a C int
_GONE = (errno.ENOENT, errno.ENODEV)  # the calling process, or the mount
log = logging.getLogger(__name__)


class FuseDevice:
    """A mount of type ``fuse.millpond`` at ``mountpoint``, called ``name``, with these further ``options``.

    ``passthrough_refusal`` is the reason why files of ``backing``, an open directory, cannot be passed
    through; empty if they can. ``caches_names``: the kernel may cache names, because ``drop_names`` works.
    ``leaves_privileges``: it leaves the set-id bits of files that are written to for the server to clear.
    ``prunes``: the kernel finds the files that it is to forget by their nodes.
    ``asked`` counts requests by operation. One thread may receive at once; all may reply. Raises LocalError
    if it cannot be mounted, or the kernel's protocol is too old.
    """

    def __init__(
        self,
        mountpoint: Path,
        name: str,
        backing: int | None = None,
        options: Sequence[str] = ("allow_other",),
    ) -> None:
        self.mountpoint, self._backing, self._options = mountpoint, backing, options
        self.passthrough_refusal, self.caches_names, self._is_stopped = "", False, False
        self.leaves_privileges = self.prunes = False
        self.asked = dict.fromkeys(Code, 0)
        self._descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._woken, self._stopping = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), threading.Lock()
        self._receiving = select.poll()  # by the one thread that receives
        self._receiving.register(self._descriptor, select.POLLIN)
        self._receiving.register(self._woken, select.POLLIN)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, self._descriptor)
            failed.callback(os.close, self._woken)
            self._mount(name)
            failed.callback(self.unmount)
            self._negotiate()
            failed.pop_all()

    def _mount(self, name: str) -> None:
        options = f"fd={self._descriptor},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (syscalls.MS_RDONLY if "ro" in self._options else 0)
        more = ["default_permissions", *(option for option in self._options if option != "ro")]
        try:
            syscalls.mount(name, self.mountpoint, "fuse.millpond", flags, ",".join([options, *more]))
        except OSError as error:
            raise LocalError(f"{self.mountpoint}: cannot mount: {error.strerror}") from None

    def _negotiate(self) -> None:
        """Answer INIT, the kernel's first request, which tells its protocol version and features."""
        header, body = self.receive(self.new_buffer())
        if header.code is not Code.INIT:
            raise LocalError(f"{self.mountpoint}: the kernel's first request is no INIT")
        major, minor, _, low, high = abi.INIT.unpack_from(bytes(body).ljust(abi.INIT.size, b"\0"))
        if (major, minor) < (abi.MAJOR, 31):
            raise LocalError(f"{self.mountpoint}: the kernel speaks FUSE {major}.{minor}; 7.31 is needed")
        offered = Feature(low | high << 32 if low & Feature.INIT_EXT else low)
        self.caches_names, self.prunes = minor >= abi.INC_EPOCH_SINCE, minor >= abi.PRUNE_SINCE
        agreed = offered & (_WANTED | _LOCKING | (_CACHING if self._backing is None else Feature.PASSTHROUGH))
        self.leaves_privileges = Feature.HANDLE_KILLPRIV_V2 in agreed
        depth = _STACKED if agreed & Feature.PASSTHROUGH else 0
        self.reply(header, [abi.pack_init(agreed, MAX_TRANSFER, depth, (_MAX_BACKGROUND, _CONGESTED))])
        if self._backing is None:
            read_ahead(self.mountpoint, MAX_TRANSFER)
        self.passthrough_refusal = (
            self._probe_passthrough() if agreed & Feature.PASSTHROUGH else "the kernel cannot (Linux 6.9 can)"
        )

    def _probe_passthrough(self) -> str:
        """Return the reason why files cannot be passed through, found by trying with a nameless one."""
        try:
            here = f"/proc/self/fd/{self._backing}"
            trial = os.open(here, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return f"no file can be made below it to try with: {error.strerror}"
        try:
            self.close_backing(self.open_backing(trial))
        except OSError as error:
            return f"the kernel refuses: {error.strerror}"
        finally:
            os.close(trial)
        return ""

    def new_buffer(self) -> memoryview:
        """Return a buffer for ``receive``."""
        return memoryview(bytearray(_BUFFER))

    def receive(self, buffer: memoryview) -> tuple[Header, memoryview]:
        """Receive the next request into ``buffer``; return its header and its body, which is part of it.
        Raises OSError: ENODEV when the mount has gone, ECANCELED after ``stop``.
        """
        while True:
            if self._is_stopped:
                raise os_error(errno.ECANCELED)
            try:
                size = os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                self._await_request()
                continue
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn while it was read
                    continue
                raise
            data = buffer[:size]
            header = abi.parse_header(data)
            if header.code:
                self.asked[header.code] += 1
            return header, data[abi.HEADER.size :]

    def _await_request(self) -> None:
        if any(descriptor == self._woken for descriptor, _ in self._receiving.poll()):
            raise os_error(errno.ECANCELED)

    def has_request(self, descriptor: int, seconds: float) -> bool:
        """Wait until a request has come or ``descriptor`` is readable, ``seconds`` at most. Returns whether a
        request has come and ``descriptor`` is not readable.
        """
        state = select.poll()
        state.register(self._descriptor, select.POLLIN)
        state.register(descriptor, select.POLLIN)
        ready = state.poll(min(1000 * seconds, _LONGEST_POLL))
        return bool(ready) and all(found == self._descriptor for found, _ in ready)

    def stop(self) -> None:
        """Have ``receive`` fail from now on, also where it waits. Any thread may call, at any time."""
        with self._stopping:
            self._is_stopped = True
            if self._woken >= 0:
                os.eventfd_write(self._woken, 1)

    def reply(self, header: Header, parts: Sequence[Buffer]) -> None:
        """Reply to a request that succeeded."""
        self._send(header, 0, parts)

    def fail(self, header: Header, code: int) -> None:
        """Reply to a request that failed, with this errno."""
        self._send(header, -code, ())

    def _send(self, header: Header, error: int, parts: Sequence[Buffer]) -> None:
        head = abi.REPLY.pack(abi.REPLY.size + sum(map(len, parts)), error, header.unique)
        try:
            os.writev(self._descriptor, (head, *parts))
        except OSError as error:  # one refused reply must not end the mount
            if error.errno not in _GONE:
                self._replace_refused(header, error)

    def _replace_refused(self, header: Header, refusal: OSError) -> None:
        """Log that the kernel refuses a reply, and have the request fail: else its program waits forever."""
        log.error("the kernel refuses a reply to %s of node %d: %s", header.code, header.node, refusal)
        with contextlib.suppress(OSError):  # it may have taken the request for answered
            os.writev(self._descriptor, [abi.REPLY.pack(abi.REPLY.size, -errno.EIO, header.unique)])

    def drop_names(self) -> None:
        """Invalidate all cached names (FUSE_NOTIFY_INC_EPOCH). Never waits."""
        self._notify(abi.Notice.INC_EPOCH, b"")

    def drop(self, node: int, *, data: bool) -> bool:
        """Invalidate a node's attributes, and with ``data`` its pages (FUSE_NOTIFY_INVAL_INODE).

        Waits for reads under way. Returns False if the kernel does not know the node (any more, or yet).
        """
        try:
            self._notify(abi.Notice.INVAL_INODE, abi.pack_inval_inode(node, 0 if data else -1, 0))
        except FileNotFoundError:
            return False
        return True

    def await_listings(self, directory: int) -> None:
        """Return when the kernel has taken over the names from all replies to READDIRPLUS of a directory. It
        may wait for any operation in that directory that is under way.

        The kernel counts a name as of the last INC_EPOCH when it takes it over, not when it asked. Until then
        it holds the directory's lock, for which FUSE_NOTIFY_INVAL_ENTRY waits, of a name that cannot be.
        """
        with contextlib.suppress(OSError):  # the kernel does not know the directory, or the mount has gone
            self._notify(abi.Notice.INVAL_ENTRY, abi.pack_inval_entry(directory, b"/"))

    def prune(self, files: Sequence[tuple[int, int, bytes]]) -> None:
        """Have the kernel forget these files, unless it uses them: each by its node, its directory's and its
        name there. It may wait for operations in these directories.
        """
        with contextlib.suppress(OSError):
            if self.prunes:
                self._notify(abi.Notice.PRUNE, abi.pack_prune([node for node, _, _ in files]))
                return
        for _, directory, name in files if not self.prunes else ():
            with contextlib.suppress(OSError):  # not known
                self._notify(abi.Notice.INVAL_ENTRY, abi.pack_inval_entry(directory, name))

    def _notify(self, notice: abi.Notice, body: bytes) -> None:
        head = abi.REPLY.pack(abi.REPLY.size + len(body), notice, 0)
        os.writev(self._descriptor, [head, body])

    def open_backing(self, descriptor: int) -> int:
        """Register an open file as a backing file for passthrough (FUSE_DEV_IOC_BACKING_OPEN); return its
        number. The kernel writes to it with the capabilities of this moment: without CAP_FSETID it clears the
        set-id bits, as ``leaves_privileges`` asks. Raises OSError.
        """
        with syscalls.without_capability(syscalls.CAP_FSETID):
            return self._open_place(descriptor)

    def _open_place(self, descriptor: int) -> int:
        try:  # not the descriptor itself: it would count as a writer for as long as it is registered
            return self._open_backing(descriptor, os.O_PATH)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
        return self._open_backing(descriptor, os.O_RDONLY)  # Linux before 6.12 refuses O_PATH

    def _open_backing(self, descriptor: int, how: int) -> int:
        file = os.open(f"/proc/self/fd/{descriptor}", how | os.O_CLOEXEC)
        try:
            wanted = bytearray(_BACKING.pack(file, 0, 0))
            backing: int = fcntl.ioctl(self._descriptor, _BACKING_OPEN, wanted)
            return backing
        finally:
            os.close(file)

    def close_backing(self, backing: int) -> None:
        """Unregister a backing file (FUSE_DEV_IOC_BACKING_CLOSE)."""
        fcntl.ioctl(self._descriptor, _BACKING_CLOSE, struct.pack("=I", backing))

    def close(self) -> None:
        """Unmount lazily, and end the requests still open."""
        self.unmount()
        descriptor, self._descriptor = self._descriptor, -1  # a late notification reaches no other file
        os.close(descriptor)
        with self._stopping:
            os.close(self._woken)
            self._woken = -1

    def unmount(self) -> None:
        """Unmount lazily if this mount is still there: another one may be at its place."""
        state = select.poll()
        state.register(self._descriptor, 0)
        if any(event & select.POLLERR for _, event in state.poll(0)):
            return
        with contextlib.suppress(OSError):
            syscalls.unmount(self.mountpoint)
