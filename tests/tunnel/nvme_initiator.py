# SPDX-License-Identifier: Apache-2.0
"""A small NVMe/TCP initiator in user space, and programs that use it.

``dial PATH PORT``: connects to the target for whoever asks at the Unix socket PATH; passes the connection.
``host PATH INTERFACE ADDRESS MTU STATUS-FD``: the host end by passthrough, with this as its NVMe driver.
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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from millpond.base.errors import ConnectionLost
from millpond.linux import sockets
from millpond.tunnel.datapath.stats_shm import make_stats
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.endpoint.supervisor import Endpoint, EndpointConfig
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.nvme_defs import CAP, CC, CSTS
from millpond.tunnel.transports.nvme.ioctl import CommandOutcome, VendorCommand
from millpond.tunnel.transports.nvme.transport import NvmeTransport
from nvmet.commands import ENTRY, SGL_IN_CAPSULE, SGL_TRANSPORT, Admin, Fabrics
from nvmet.subsystem import CONNECT_DATA

NQN, HOST_NQN, HOST_ID = "nqn.2014-08.test:csd0", "nqn.2014-08.test:host", bytes(range(16))
IO_QUEUES = 2
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
) -> bytes:
    """A command capsule with its data inside."""
    inside = len(data) > 0
    sgl = (0, len(data) or room, SGL_IN_CAPSULE if inside else SGL_TRANSPORT)
    entry = ENTRY.pack(opcode, 0x40, cid, nsid, 0, 0, *sgl, *(*words, 0, 0, 0, 0, 0, 0)[:6])
    length = 72 + (len(data) if inside else 0)
    return struct.pack("<BBBBI", 4, 0, 72, 72 * inside, length) + entry + (bytes(data) if inside else b"")


def connect_data(cntlid: int, nqn: str = NQN, host: bytes = HOST_ID, host_nqn: str = HOST_NQN) -> bytes:
    return CONNECT_DATA.pack(host, cntlid, nqn.encode(), host_nqn.encode())


@dataclass
class Pending:
    """A command in flight."""

    room: memoryview
    done: queue.SimpleQueue[CommandOutcome | None] = field(default_factory=queue.SimpleQueue)


class TargetQueue:
    """One connection, and a thread that reads it in the process that uses it.

    Reads and writes are plain system calls: a pump may do no others.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.cycle(range(1, 60000))
        self._process = 0
        self._write(ICREQ)
        answer = self._exactly(128)
        assert answer[0] == 1, answer

    def connect(self, qid: int, keep_alive_ms: int, data: bytes) -> CommandOutcome:
        """Tell which queue this is; before any other command."""
        room = memoryview(b"")
        self._pending[0] = pending = Pending(room)
        self._write(capsule(Admin.FABRICS, 0, qid << 16, 31, keep_alive_ms, data=data, nsid=Fabrics.CONNECT))
        self._take()
        outcome = pending.done.get()
        assert outcome is not None
        return outcome

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.sock.fileno(), view) :]

    def submit(
        self,
        opcode: int,
        *words: int,
        data: bytes | memoryview = b"",
        room: memoryview = memoryview(b""),  # noqa: B008
        nsid: int = 0,
    ) -> CommandOutcome:
        pending = Pending(room)
        with self._lock:
            cid = next(self._numbers)
            self._pending[cid] = pending
            self._start_reader()
            head = capsule(opcode, cid, *words, data=data, room=len(room), nsid=nsid)
            try:
                self._write(head)
            except OSError:
                raise ConnectionLost("the target hung up") from None
        outcome = pending.done.get()
        if outcome is None:
            raise ConnectionLost("the target hung up")
        return outcome

    def _start_reader(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=self._read, daemon=True).start()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(self.sock.fileno(), count - len(data))
            if not more:
                raise ConnectionLost("the target hung up")
            data += more
        return data

    def _read(self) -> None:
        try:
            while True:
                self._take()
        except (ConnectionLost, OSError):
            with self._lock:
                for pending in self._pending.values():
                    pending.done.put(None)

    def _take(self) -> None:
        kind, _, header, _, length = struct.unpack("<BBBBI", head := self._exactly(8))
        head += self._exactly(header - 8)
        if kind == 5:
            result, _, _, cid, status = struct.unpack_from("<QHHHH", head, 8)
            self._pending.pop(cid).done.put(CommandOutcome(status >> 1 & 0x7FF, result))
            return
        if kind != 7:
            raise ConnectionLost(f"PDU type {kind}")
        cid, _, offset, size = struct.unpack_from("<HHII", head, 8)
        self._pending[cid].room[offset : offset + size] = self._exactly(length - header)

    def close(self) -> None:
        with suppress(OSError):  # the target was first
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Initiator:
    """A connected controller, enabled, with I/O queues; a ``passthrough.CommandDevice``.

    SENDs and RECVs have queues of their own, for the processes that submit them share nothing else.
    """

    def __init__(self, dial: Dial, nqn: str = NQN, host: bytes = HOST_ID, keep_alive_ms: int = 0) -> None:
        self.queues: list[TargetQueue] = []
        try:
            self.cntlid = self._connect(dial, 0, connect_data(0xFFFF, nqn, host), keep_alive_ms)
            self._property_set(CC, ENABLE)
            for qid in range(1, 2 * IO_QUEUES + 1):
                self._connect(dial, qid, connect_data(self.cntlid, nqn, host), 0)
        except BaseException:
            self.close()
            raise
        self.descriptors = frozenset(target.sock.fileno() for target in self.queues)
        senders, receivers = self.queues[1 : IO_QUEUES + 1], self.queues[IO_QUEUES + 1 :]
        self._turns = {1: itertools.cycle(senders), 2: itertools.cycle(receivers)}

    def _connect(self, dial: Dial, qid: int, data: bytes, keep_alive_ms: int) -> int:
        with ExitStack() as undo:
            target = TargetQueue(undo.enter_context(dial()))
            undo.pop_all()
        self.queues.append(target)
        outcome = target.connect(qid, keep_alive_ms, data)
        if outcome.status:
            raise ConnectionLost(f"Connect failed with {outcome.status:#x}")
        return outcome.result & 0xFFFF

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

    def admin(self, command: VendorCommand) -> CommandOutcome:
        return _vendor(self.queues[0], command)

    def io(self, command: VendorCommand) -> CommandOutcome:
        return _vendor(next(self._turns[command.opcode & 3]), command)

    def close(self) -> None:
        for target in self.queues:
            target.close()


def _vendor(target: TargetQueue, command: VendorCommand) -> CommandOutcome:
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


def run_host(path: Path, interface: str, address: str, mtu: int, status: int) -> None:
    stop, _writer = os.pipe()
    config = EndpointConfig(
        role="host",
        interface=interface,
        address=ipaddress.ip_interface(address),
        peers=None,
        offer=LinkParameters(name="host", mtu=mtu),
        engine="python",
        stop=stop,
        counters=make_stats(),
    )
    dial = dial_through(path)
    Endpoint(config, NvmeTransport(lambda: Initiator(dial), "a target"), StatusWriter(status)).run()


if __name__ == "__main__":
    if sys.argv[1] == "dial":
        serve_dialling(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        run_host(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
