"""Edge (/dev/fuse): a mount, its requests and replies, and files that the kernel reads and writes itself."""

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
_KEEPING = Feature.ASYNC_READ | Feature.AUTO_INVAL_DATA | Feature.IOCTL_DIR
_BUFFER = MAX_TRANSFER + (1 << 16)  # a request has its head before the data
_STACKED = 2  # file systems upon each other, at most: the flash may be an overlay itself
_BACKING = struct.Struct("=iIQ")
_BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
_BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, uint32_t)


class FuseDevice:
    """The kernel's end of a mount of type ``fuse.millpond`` at ``mountpoint``, called ``name``, with these
    further ``options``. Raises LocalError if it cannot be mounted, or the kernel's protocol is too old.

    ``complaint`` says why files of ``backing``, an open directory, cannot be handed to the kernel; nothing,
    if they can. ``keeps_names``: it may be told that it may keep names, for ``drop_names`` works, or nobody
    takes back those in ``backing``.
    ``asked`` counts its requests.
    """

    def __init__(
        self,
        mountpoint: Path,
        name: str,
        backing: int | None = None,
        options: Sequence[str] = ("allow_other",),
    ) -> None:
        self.mountpoint, self._backing, self._options = mountpoint, backing, options
        self.complaint, self.keeps_names = "", False
        self.asked = dict.fromkeys(Code, 0)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        with contextlib.ExitStack() as failed:
            failed.callback(os.close, self._descriptor)
            self._mount(name)
            failed.callback(self._unmount)
            self._greet()
            failed.pop_all()

    def _mount(self, name: str) -> None:
        options = f"fd={self._descriptor},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | (syscalls.MS_RDONLY if "ro" in self._options else 0)
        more = ["default_permissions", *(option for option in self._options if option != "ro")]
        try:
            syscalls.mount(name, self.mountpoint, "fuse.millpond", flags, ",".join([options, *more]))
        except OSError as error:
            raise LocalError(f"{self.mountpoint}: cannot mount: {error.strerror}") from None

    def _greet(self) -> None:
        """The first request, which tells what the kernel can do."""
        header, body = self.receive()
        if header.code is not Code.INIT:
            raise LocalError(f"{self.mountpoint}: the kernel's first request is no INIT")
        major, minor, _, low, high = abi.INIT.unpack_from(bytes(body).ljust(abi.INIT.size, b"\0"))
        if (major, minor) < (abi.MAJOR, 31):
            raise LocalError(f"{self.mountpoint}: the kernel speaks FUSE {major}.{minor}; 7.31 is needed")
        offered = Feature(low | high << 32 if low & Feature.INIT_EXT else low)
        self.keeps_names = minor >= abi.DROPS_NAMES_SINCE or self._backing is not None
        agreed = offered & (_WANTED | _LOCKING | (_KEEPING if self._backing is None else Feature.PASSTHROUGH))
        depth = _STACKED if agreed & Feature.PASSTHROUGH else 0
        self.reply(header, [abi.pack_init(agreed, MAX_TRANSFER, depth)])
        if self._backing is None:
            read_ahead(self.mountpoint, MAX_TRANSFER)
        self.complaint = self._try() if agreed & Feature.PASSTHROUGH else "the kernel cannot (Linux 6.9 can)"

    def _try(self) -> str:
        """Why files cannot be handed over: tried with one without a name."""
        try:
            here = f"/proc/self/fd/{self._backing}"
            trial = os.open(here, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return f"no file can be made below it to try with: {error.strerror}"
        try:
            self.take_back(self.hand_over(trial))
        except OSError as error:
            return f"the kernel refuses: {error.strerror}"
        finally:
            os.close(trial)
        return ""

    def receive(self) -> tuple[Header, memoryview]:
        """The next request and its body, which is good until the next is received. Raises OSError: ENODEV
        when the mount has gone.
        """
        while True:
            try:
                size = os.readv(self._descriptor, [self._buffer])
            except BlockingIOError:
                self._poll.poll()
                continue
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):  # it was withdrawn while it was read
                    continue
                raise
            data = self._buffer[:size]
            header = abi.parse_header(data)
            if header.code:
                self.asked[header.code] += 1
            return header, data[abi.HEADER.size :]

    def wake_by(self, descriptor: int) -> None:
        """Who waits for a request looks around, too, when this one can be read."""
        self._poll.register(descriptor, select.POLLIN)

    def reply(self, header: Header, parts: Sequence[Buffer]) -> None:
        """The operation was done."""
        self._send(header, 0, parts)

    def fail(self, header: Header, code: int) -> None:
        """It failed, with this errno."""
        self._send(header, -code, ())

    def _send(self, header: Header, error: int, parts: Sequence[Buffer]) -> None:
        head = abi.REPLY.pack(abi.REPLY.size + sum(map(len, parts)), error, header.unique)
        try:  # noqa: SIM105 - each request comes here, and a context costs as much as all the rest
            os.writev(self._descriptor, (head, *parts))
        except FileNotFoundError:  # who asked is gone
            pass

    def drop_names(self) -> None:
        """Ask for every name again when it is next used. Never waits."""
        self._tell(abi.Notice.DROP_NAMES, b"")

    def drop(self, node: int, *, data: bool) -> bool:
        """Ask for a node's attributes again, and with ``data`` for what was read of it. Waits for reads under
        way. False if the kernel does not know the node (any more, or yet).
        """
        try:
            self._tell(abi.Notice.DROP_INODE, abi.pack_drop(node, 0 if data else -1, 0))
        except FileNotFoundError:
            return False
        return True

    def _tell(self, notice: abi.Notice, body: bytes) -> None:
        head = abi.REPLY.pack(abi.REPLY.size + len(body), notice, 0)
        os.writev(self._descriptor, [head, body])

    def hand_over(self, descriptor: int) -> int:
        """Have the kernel read and write an open file itself; the number by which to tell it so."""
        try:  # not with the descriptor itself: it might count as a writer for as long as others read
            return self._hand_over(descriptor, os.O_PATH)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
        return self._hand_over(descriptor, os.O_RDONLY)  # Linux before 6.12 takes no place

    def _hand_over(self, descriptor: int, how: int) -> int:
        file = os.open(f"/proc/self/fd/{descriptor}", how | os.O_CLOEXEC)
        try:
            wanted = bytearray(_BACKING.pack(file, 0, 0))
            backing: int = fcntl.ioctl(self._descriptor, _BACKING_OPEN, wanted)
            return backing
        finally:
            os.close(file)

    def take_back(self, backing: int) -> None:
        """The file is open no more."""
        fcntl.ioctl(self._descriptor, _BACKING_CLOSE, struct.pack("=I", backing))

    def close(self) -> None:
        """Unmount, without waiting for anybody, and end what is still open."""
        self._unmount()
        os.close(self._descriptor)

    def _unmount(self) -> None:
        """If it is still mounted: what is there else is another's."""
        state = select.poll()
        state.register(self._descriptor, 0)
        if any(event & select.POLLERR for _, event in state.poll(0)):
            return
        with contextlib.suppress(OSError):
            syscalls.unmount(self.mountpoint)
