"""A small NVMe/TCP initiator in user space, and programs that use it.

``dial PATH PORT``: connects to the target for whoever asks at the Unix socket PATH, and passes that connection.
``host PATH INTERFACE ADDRESS STATUS-FD``: the host end by passthrough, with this as its NVMe driver.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from millpond.linux import sockets
from millpond.tunnel.counters import make_counters
from millpond.tunnel.end import End, EndConfig
from millpond.tunnel.fabrics.commands import ENTRY, SGL_IN_CAPSULE, SGL_TRANSPORT, Admin, Fabrics
from millpond.tunnel.fabrics.subsystem import CONNECT_DATA
from millpond.tunnel.nvme import CAP, CC, CSTS
from millpond.tunnel.nvme_device import Outcome, VendorCommand
from millpond.tunnel.parameters import Parameters
from millpond.tunnel.passthrough import PassthroughTransport
from millpond.tunnel.status import StatusWriter
from millpond.wire.errors import ConnectionLost

NQN, HOST_NQN, HOST_ID = "nqn.2014-08.test:csd0", "nqn.2014-08.test:host", bytes(range(16))
IO_QUEUES = 2
PIECE = 30_000
ICREQ = struct.pack("<BBBBIHBBI112x", 0, 0, 128, 0, 128, 0, 0, 0, 0)
ENABLE = 1 | 6 << 16 | 4 << 20

Dial = Callable[[], socket.socket]


def capsule(
    opcode: int,
    cid: int,
    *words: int,
    data: bytes | memoryview = b"",
    room: int = 0,
    nsid: int = 0,
    ask: bool = False,
) -> bytes:
    """A command capsule; its data inside, or for later if ``ask``."""
    inside = len(data) > 0 and not ask
    sgl = (0, len(data) or room, SGL_IN_CAPSULE if inside else SGL_TRANSPORT)
    entry = ENTRY.pack(opcode, 0x40, cid, nsid, 0, 0, *sgl, *(*words, 0, 0, 0, 0, 0, 0)[:6])
    length = 72 + (len(data) if inside else 0)
    return struct.pack("<BBBBI", 4, 0, 72, 72 * inside, length) + entry + (bytes(data) if inside else b"")


def connect_data(cntlid: int, nqn: str = NQN, host: bytes = HOST_ID) -> bytes:
    return CONNECT_DATA.pack(host, cntlid, nqn.encode(), HOST_NQN.encode())


@dataclass
class Pending:
    """A command in flight."""

    outgoing: bytes | memoryview
    room: memoryview
    done: queue.SimpleQueue[Outcome | None] = field(default_factory=queue.SimpleQueue)


class TargetQueue:
    """One connection, and a thread that reads it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.cycle(range(1, 60000))
        sock.sendall(ICREQ)
        answer = self._exactly(128)
        assert answer[0] == 1, answer
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(
        self,
        opcode: int,
        *words: int,
        data: bytes | memoryview = b"",
        room: memoryview = memoryview(b""),  # noqa: B008
        nsid: int = 0,
        ask: bool = False,
    ) -> Outcome:
        pending = Pending(data, room)
        with self._lock:
            cid = next(self._numbers)
            self._pending[cid] = pending
            head = capsule(opcode, cid, *words, data=data, room=len(room), nsid=nsid, ask=ask)
            try:
                self.sock.sendall(head)
            except OSError:
                raise ConnectionLost("the target hung up") from None
        outcome = pending.done.get()
        if outcome is None:
            raise ConnectionLost("the target hung up")
        return outcome

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise ConnectionLost("the target hung up")
            data += more
        return data

    def _read(self) -> None:
        try:
            while True:
                self._take()
        except (ConnectionLost, OSError):
            self.sock.close()
            with self._lock:
                for pending in self._pending.values():
                    pending.done.put(None)

    def _take(self) -> None:
        kind, _, header, _, length = struct.unpack("<BBBBI", head := self._exactly(8))
        head += self._exactly(header - 8)
        if kind == 5:
            result, _, _, cid, status = struct.unpack_from("<QHHHH", head, 8)
            self._pending.pop(cid).done.put(Outcome(status >> 1 & 0x7FF, result))
            return
        cid, tag, offset, size = struct.unpack_from("<HHII", head, 8)
        if kind == 7:
            self._pending[cid].room[offset : offset + size] = self._exactly(length - header)
        elif kind == 9:
            self._send_data(cid, tag, self._pending[cid].outgoing[offset : offset + size])
        else:
            raise ConnectionLost(f"PDU type {kind}")

    def _send_data(self, cid: int, tag: int, data: bytes | memoryview) -> None:
        for start in range(0, len(data), PIECE):
            piece = bytes(data[start : start + PIECE])
            last = 4 if start + PIECE >= len(data) else 0
            head = struct.pack("<BBBBI", 6, last, 24, 24, 24 + len(piece))
            with self._lock:
                self.sock.sendall(head + struct.pack("<HHIIxxxx", cid, tag, start, len(piece)) + piece)

    def close(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        self._reader.join()


class Initiator:
    """A connected controller, enabled; a ``passthrough.CommandDevice``.

    I/O queues are connected by the process that first uses one: unlike the kernel's, none outlasts a fork.
    """

    def __init__(self, dial: Dial, nqn: str = NQN, host: bytes = HOST_ID, keep_alive_ms: int = 0) -> None:
        self._dial, self._nqn, self._host = dial, nqn, host
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._turns: Iterator[TargetQueue] | None = None
        self.queues = [TargetQueue(dial())]
        outcome = self._connect(self.queues[0], 0, 0xFFFF, keep_alive_ms)
        if outcome.status:
            self.close()
            raise ConnectionLost(f"Connect failed with {outcome.status:#x}")
        self.cntlid = outcome.result & 0xFFFF
        self._property_set(CC, ENABLE)

    def _connect(self, target: TargetQueue, qid: int, cntlid: int, keep_alive_ms: int = 0) -> Outcome:
        data = connect_data(cntlid, self._nqn, self._host)
        return target.submit(Admin.FABRICS, qid << 16, 31, keep_alive_ms, data=data, nsid=Fabrics.CONNECT)

    def connect_io(self) -> TargetQueue:
        """One more I/O queue, with the first identifier that is free."""
        for qid in range(1, 9):
            target = TargetQueue(self._dial())
            if not self._connect(target, qid, self.cntlid).status:
                self.queues.append(target)
                return target
            target.close()
        raise ConnectionLost("the target grants no more I/O queues")

    def _io_queue(self) -> TargetQueue:
        with self._lock:
            if self._turns is None or self._process != os.getpid():
                self._process = os.getpid()
                self._turns = itertools.cycle([self.connect_io() for _ in range(IO_QUEUES)])
            return next(self._turns)

    def _property_set(self, register: int, value: int) -> None:
        self.queues[0].submit(Admin.FABRICS, 0, register, value, nsid=Fabrics.PROPERTY_SET)

    def property(self, register: int) -> int:
        size = 1 if register == CAP else 0
        return self.queues[0].submit(Admin.FABRICS, size, register, nsid=Fabrics.PROPERTY_GET).result

    def disable(self) -> None:
        self._property_set(CC, 0)
        assert self.property(CSTS) == 0

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def admin(self, command: VendorCommand) -> Outcome:
        return _vendor(self.queues[0], command)

    def io(self, command: VendorCommand) -> Outcome:
        return _vendor(self._io_queue(), command)

    def close(self) -> None:
        for target in self.queues:
            target.close()


def _vendor(target: TargetQueue, command: VendorCommand) -> Outcome:
    opcode, data, *words = command
    if opcode & 3 == 1:
        return target.submit(opcode, *words, data=data)
    return target.submit(opcode, *words, room=data)


def dial_through(path: Path) -> Dial:
    """Connections that a dialler in the target's namespace makes."""

    def dial() -> socket.socket:
        with sockets.connect(path, 5) as client:
            try:
                (descriptor,) = sockets.receive_descriptors(client, 1)
            except OSError as error:
                raise ConnectionLost(str(error)) from None
        return socket.socket(fileno=descriptor)

    return dial


def serve_dialling(path: Path, port: int) -> None:
    with sockets.listen(path) as server:
        print("listening", flush=True)
        while True:
            client, _ = server.accept()
            with client:
                try:
                    target = socket.create_connection(("127.0.0.1", port), 5)
                except OSError:
                    continue
                with target:
                    sockets.send_descriptors(client, [target.fileno()])


def run_host(path: Path, interface: str, address: str, status: int) -> None:
    stop, _writer = os.pipe()
    config = EndConfig(
        interface=interface,
        address=ipaddress.ip_interface(address),
        offer=Parameters(name="host"),
        engine="python",
        stop=stop,
        counters=make_counters(),
    )
    dial = dial_through(path)
    End(config, PassthroughTransport(lambda: Initiator(dial), "a target"), StatusWriter(status)).run()


if __name__ == "__main__":
    if sys.argv[1] == "dial":
        serve_dialling(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        run_host(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
