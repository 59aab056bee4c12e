# SPDX-License-Identifier: Apache-2.0
"""Entry: a plain FUSE passthrough over TCP: ``passthrough.py serve|mount|mount-cached ADDRESS PORT FOLDER``.

Each request of the kernel is one request to the server, which performs it on the files in FOLDER; the mount's
process caches, gathers and reads ahead nothing, and waits for each reply. ``mount`` takes files around the
kernel's page cache (direct I/O), ``mount-cached`` reads them through it. Both say "ready" once they serve.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from millpond.fs.fuse import server
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import (
    UNLISTED,
    AddEntry,
    Buffer,
    CachedAttributes,
    CacheMode,
    FoundEntry,
    NegativeEntry,
    Node,
    SetAttr,
)
from millpond.fs.vfs.lock_types import Family, Lock
from millpond.fs.vfs.operation import about_to_wait
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry, Handle, Owner, Statistics, os_error

_SIZES = struct.Struct("=II")
_TYPES = (CachedAttributes, FoundEntry, SetAttr, Attributes, DirectoryEntry, Owner, Statistics)
_SECONDS = 300.0
_PAGE = 1000  # names in a reply to readdir


def _encode(value: object) -> msgpack.ExtType:
    fields = [getattr(value, name) for name in value.__match_args__]  # type: ignore[attr-defined]
    return msgpack.ExtType(_TYPES.index(type(value)), _packed(fields))


def _decode(code: int, data: bytes) -> object:
    return _TYPES[code](*_unpacked(data))


def _packed(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, default=_encode)
    return packed


def _unpacked(data: Buffer) -> Any:
    return msgpack.unpackb(data, ext_hook=_decode, use_list=False)


def _send(connection: socket.socket, head: object, body: Buffer = b"") -> None:
    packed = _packed(head)
    connection.sendmsg([_SIZES.pack(len(packed), len(body)), packed])
    if body:
        connection.sendall(body)


def _receive(connection: socket.socket) -> tuple[Any, memoryview]:
    """Raises EOFError at the end of the connection."""
    head, body = _SIZES.unpack(_exactly(connection, _SIZES.size))
    return _unpacked(_exactly(connection, head)), _exactly(connection, body)


def _exactly(connection: socket.socket, size: int) -> memoryview:
    place = memoryview(bytearray(size))
    if size and connection.recv_into(place, size, socket.MSG_WAITALL) < size:
        raise EOFError
    return place


class AnyLock:
    """Locking that has room for every lock: no program of a benchmark waits for another."""

    def first_conflict(self, _node: Node, _lock: Lock) -> Lock | None:
        """Return None."""

    def lock(self, _node: Node, _family: Family, _lock: Lock) -> int:
        """Grant it."""
        return 0

    def release(self, _node: Node, _family: Family, _owner: int) -> None:
        """Do nothing."""

    def require(self, _node: Node) -> None:
        """Do nothing."""


class Passthrough:
    """InodeFs whose every operation is a request over a connection of its own."""

    def __init__(self, address: tuple[str, int], mode: CacheMode) -> None:
        self._address, self._mode, self._idle = address, mode, list[socket.socket]()
        self.locks = AnyLock()
        self.extended = self

    def _ask(self, method: str, *arguments: object, body: Buffer = b"", **more: object) -> Any:
        """Return the reply to one request: bytes as they came. Raises OSError."""
        connection = self._sent(method, *arguments, body=body, **more)
        about_to_wait(connection.fileno(), _SECONDS)
        (code, value), data = _receive(connection)
        self._idle.append(connection)
        if code:
            raise os_error(code)
        return data if value is None and data else value

    def _sent(self, method: str, *arguments: object, body: Buffer = b"", **more: object) -> socket.socket:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _connected(self._address)
        _send(connection, (method, arguments, more), body)
        return connection

    def forget(self, node: Node, times: int) -> None:
        """Send what is not answered."""
        self._idle.append(self._sent("forget", node, times))

    def lookup(self, parent: Node, name: bytes) -> FoundEntry:
        try:
            found: FoundEntry = self._ask("lookup", parent, name)
        except FileNotFoundError:
            raise NegativeEntry(0.0) from None
        return found

    def readdir(self, handle: Handle, offset: int) -> Iterator[DirectoryEntry]:
        while page := self._ask("readdir", handle, offset):
            yield from page
            offset = page[-1].offset

    def readdirplus(self, handle: Handle, offset: int, add: AddEntry) -> None:
        directory = self._ask("node_of", handle)
        for entry in self.readdir(handle, offset):
            if entry.name in (".", ".."):
                known = (entry.inode, entry.mode, 1, *(0,) * 9)
                if not add(os.fsencode(entry.name), entry.offset, UNLISTED, known, 0.0, 0.0):
                    return
                continue
            with contextlib.suppress(FileNotFoundError):
                found = self.lookup(directory, os.fsencode(entry.name))
                fields = found.attributes.fields()
                if not add(os.fsencode(entry.name), entry.offset, found.node, fields, 0.0, 0.0):
                    self.forget(found.node, 1)
                    return

    def read(self, handle: Handle, size: int, offset: int) -> Buffer:
        return self._ask("read", handle, size, offset) or b""

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        written: int = self._ask("write", handle, offset, body=data, append=append)
        return written

    def cache_mode(self, _handle: Handle) -> CacheMode:
        return self._mode

    def get(self, *_: object) -> bytes:
        raise os_error(errno.EOPNOTSUPP)

    set = remove = get

    def names(self, _node: Node) -> tuple[bytes, ...]:
        return ()

    def __getattr__(self, method: str) -> Any:
        """Return what asks for any other operation."""
        return lambda *arguments: self._ask(method, *arguments)


def _connected(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _perform(tree: BackingFs, request: Sequence[Any], body: memoryview) -> tuple[int, object, Buffer]:
    """Return an errno, the result, and the bytes that were read."""
    method, arguments, more = request
    try:
        if method == "write":
            return 0, tree.write(arguments[0], body, arguments[1], **more), b""
        result = getattr(tree, method)(*arguments)
    except OSError as error:
        return error.errno or errno.EIO, None, b""
    if method == "read":
        return 0, None, result
    if method == "readdir":
        return 0, [entry for entry, _ in zip(result, range(_PAGE), strict=False)], b""
    return 0, result, b""


def _serve_one(connection: socket.socket, tree: BackingFs) -> None:
    try:
        while True:
            request, data = _receive(connection)
            code, value, body = _perform(tree, request, data)
            if request[0] != "forget":
                _send(connection, (code, value), body)
    except (EOFError, ConnectionError):
        connection.close()


def serve(address: tuple[str, int], folder: Path) -> None:
    """Serve a folder until the process is killed."""
    tree = BackingFs(os.open(folder, os.O_PATH | os.O_DIRECTORY))
    with socket.create_server(address) as listener:
        print("listening", flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve_one, args=(connection, tree), daemon=True).start()


def mount(mode: CacheMode, address: tuple[str, int], mountpoint: Path) -> None:
    """Mount what is served, until SIGTERM."""
    tree: Any = Passthrough(address, mode)
    server.mount_and_serve(
        tree, mountpoint, name="passthrough", on_ready=lambda _kernel: print("ready", flush=True)
    )


if __name__ == "__main__":
    does, host, port, folder = sys.argv[1:]
    modes: dict[str, Callable[[tuple[str, int], Path], None]] = {
        "serve": serve,
        "mount": functools.partial(mount, CacheMode.DIRECT),
        "mount-cached": functools.partial(mount, CacheMode.CACHED),
    }
    modes[does]((host, int(port)), Path(folder))
