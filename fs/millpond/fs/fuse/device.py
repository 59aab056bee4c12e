# SPDX-License-Identifier: Apache-2.0
"""Edge (/dev/fuse): mounts, receives requests, sends replies and notifications, and registers backing files
for passthrough.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
from collections.abc import Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.fs.fuse import abi
from millpond.fs.fuse.abi import Code, Feature, Header
from millpond.fs.fuse.mounts import read_ahead
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.path_api import MAX_TRANSFER
from millpond.linux import syscalls

_WANTED = Feature.BIG_WRITES | Feature.PARALLEL_DIROPS | Feature.MAX_PAGES | Feature.INIT_EXT
_LOCKING = Feature.POSIX_LOCKS | Feature.FLOCK_LOCKS
_CACHING = Feature.ASYNC_READ | Feature.AUTO_INVAL_DATA | Feature.IOCTL_DIR
_BUFFER = MAX_TRANSFER + (1 << 16)  # the header comes before the data
_STACKED = 2  # stacked file systems, at most: the flash may be an overlay itself
_BACKING = struct.Struct("=iIQ")
_BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
_BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, uint32_t)


class FuseDevice:
    """A mount of type ``fuse.millpond`` at ``mountpoint``, called ``name``, with these further ``options``.

    ``passthrough_refusal`` is the reason why files of ``backing``, an open directory, cannot be passed
    through; empty if they can. ``caches_names``: the kernel may cache names, because ``drop_names`` works or
    only the mount itself changes ``backing``. ``asked`` counts requests by operation. Raises LocalError if it
    cannot be mounted, or the kernel's protocol is too old.
    """

    def __init__(
        self,
        mountpoint: Path,
        name: str,
        backing: int | None = None,
        options: Sequence[str] = ("allow_other",),
    ) -> None:
        self.mountpoint, self._backing, self._options = mountpoint, backing, options
        self.passthrough_refusal, self.caches_names = "", False
        self.asked = dict.fromkeys(Code, 0)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, self._descriptor)
            self._mount(name)
            failed.callback(self._unmount)
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
        header, body = self.receive()
        if header.code is not Code.INIT:
            raise LocalError(f"{self.mountpoint}: the kernel's first request is no INIT")
        major, minor, _, low, high = abi.INIT.unpack_from(bytes(body).ljust(abi.INIT.size, b"\0"))
        if (major, minor) < (abi.MAJOR, 31):
            raise LocalError(f"{self.mountpoint}: the kernel speaks FUSE {major}.{minor}; 7.31 is needed")
        offered = Feature(low | high << 32 if low & Feature.INIT_EXT else low)
        self.caches_names = minor >= abi.INC_EPOCH_SINCE or self._backing is not None
        agreed = offered & (_WANTED | _LOCKING | (_CACHING if self._backing is None else Feature.PASSTHROUGH))
        depth = _STACKED if agreed & Feature.PASSTHROUGH else 0
        self.reply(header, [abi.pack_init(agreed, MAX_TRANSFER, depth)])
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

    def receive(self) -> tuple[Header, memoryview]:
        """Return the next request and its body, which is valid until the next call. Raises OSError: ENODEV
        when the mount has gone.
        """
        while True:
            try:
                size = os.readv(self._descriptor, [self._buffer])
            except BlockingIOError:
                self._poll.poll()
                continue
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn while it was read
                    continue
                raise
            data = self._buffer[:size]
            header = abi.parse_header(data)
            if header.code:
                self.asked[header.code] += 1
            return header, data[abi.HEADER.size :]

    def wake_by(self, descriptor: int) -> None:
        """Make ``receive`` also wake up when this descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)

    def reply(self, header: Header, parts: Sequence[Buffer]) -> None:
        """Reply to a request that succeeded."""
        self._send(header, 0, parts)

    def fail(self, header: Header, code: int) -> None:
        """Reply to a request that failed, with this errno."""
        self._send(header, -code, ())

    def _send(self, header: Header, error: int, parts: Sequence[Buffer]) -> None:
        head = abi.REPLY.pack(abi.REPLY.size + sum(map(len, parts)), error, header.unique)
        try:  # noqa: SIM105 - each request comes here, and a context costs as much as all the rest
            os.writev(self._descriptor, (head, *parts))
        except FileNotFoundError:  # the calling process is gone
            pass

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

    def _notify(self, notice: abi.Notice, body: bytes) -> None:
        head = abi.REPLY.pack(abi.REPLY.size + len(body), notice, 0)
        os.writev(self._descriptor, [head, body])

    def open_backing(self, descriptor: int) -> int:
        """Register an open file as a backing file for passthrough (FUSE_DEV_IOC_BACKING_OPEN); return its
        number.
        """
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
        self._unmount()
        os.close(self._descriptor)

    def _unmount(self) -> None:
        """Unmount if this mount is still there: another one may be at its place."""
        state = select.poll()
        state.register(self._descriptor, 0)
        if any(event & select.POLLERR for _, event in state.poll(0)):
            return
        with contextlib.suppress(OSError):
            syscalls.unmount(self.mountpoint)
