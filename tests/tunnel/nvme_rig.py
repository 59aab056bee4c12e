# SPDX-License-Identifier: Apache-2.0
"""The target's core without I/O, with a volume in memory and a clock that tests set."""

from __future__ import annotations

import struct
from typing import NamedTuple

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.link_params import LinkParameters, parse
from millpond.tunnel.ring.nvme_defs import CC, Opcode
from nvmet.commands import Admin, Fabrics
from nvmet.controller import Target
from nvmet.identify import TargetIdentity
from nvmet.namespace import Namespace
from nvmet.queue import Queue
from nvmet.stats import CommandStats
from nvmet.subsystem import Subsystem
from nvmet.vendor_commands import VendorCommands

from .nvme_initiator import ENABLE, HOST_ID, HOST_NQN, ICREQ, NQN, OTHER_HOST_NQN, capsule, connect_data

BLOCK, BLOCKS, ENTRIES, IDLE = 512, 1024, 128, 10.0
OFFER = LinkParameters(name="host")


class MemoryVolume:
    def __init__(self) -> None:
        self.data = bytearray(BLOCK * BLOCKS)
        self.flushes = 0
        self.broken = False

    def read(self, offset: int, size: int) -> bytes:
        if self.broken:
            raise OSError("broken")
        assert 0 <= offset <= offset + size <= len(self.data)
        return bytes(self.data[offset : offset + size])

    def write(self, offset: int, data: memoryview) -> None:
        if self.broken:
            raise OSError("broken")
        assert 0 <= offset <= offset + len(data) <= len(self.data)
        self.data[offset : offset + len(data)] = data

    def flush(self) -> None:
        self.flushes += 1

    def zero(self, offset: int, size: int) -> None:
        self.write(offset, memoryview(bytes(size)))

    discard = zero


class Reply(NamedTuple):
    """What came for one command."""

    status: int
    result: int
    data: bytes


class Side:
    """A ``port.LinkSide`` that remembers."""

    def __init__(self) -> None:
        self.links: list[tuple[LinkParameters, str]] = []
        self.ends: list[str] = []
        self.packets: list[bytes] = []
        self.violations: list[str] = []

    def opened(self, terms: LinkParameters, peer: str) -> None:
        self.links.append((terms, peer))

    def closed(self, reason: str) -> None:
        self.ends.append(reason)

    def packet(self, packet: bytes | memoryview) -> None:
        self.packets.append(bytes(packet))

    def violated(self, error: LinkViolation) -> None:
        self.violations.append(str(error))


HOSTS = frozenset((HOST_NQN, OTHER_HOST_NQN))


class Rig:
    """A target, and the queues that a test connects."""

    def __init__(self) -> None:
        self.now = 100.0
        self.volume, self.side, tally = MemoryVolume(), Side(), CommandStats()
        self.identity = TargetIdentity(NQN, BLOCKS, BLOCK, ENTRIES)
        self.port = VendorCommands(LinkParameters(name="csd0"), self.side, lambda: self.now, IDLE, tally)
        target = Target(self.identity, Namespace(self.identity, self.volume, tally), self.port, 4, HOSTS)
        self.subsystem = Subsystem(target, lambda: self.now)
        self.tally = tally

    def queue(self) -> Queue:
        queue = self.subsystem.new_queue()
        feed(queue, ICREQ)
        assert collect(queue)[0][0] == 1
        return queue

    def connect(
        self, qid: int, cntlid: int, *, entries: int = 32, kato: int = 0, host: bytes = HOST_ID
    ) -> Queue:
        queue = self.queue()
        reply = self.try_connect(queue, qid, cntlid, entries=entries, kato=kato, host=host)
        assert reply.status == 0
        self.cntlid = reply.result
        return queue

    def try_connect(
        self,
        queue: Queue,
        qid: int,
        cntlid: int,
        *,
        entries: int = 32,
        kato: int = 0,
        host: bytes = HOST_ID,
        nqn: str = NQN,
        host_nqn: str = HOST_NQN,
    ) -> Reply:
        data = connect_data(cntlid, nqn, host, host_nqn)
        return run(queue, Admin.FABRICS, qid << 16, entries - 1, kato, data=data, nsid=Fabrics.CONNECT)

    def up(self, kato: int = 0) -> tuple[Queue, Queue]:
        """Admin queue and one I/O queue of an enabled controller."""
        admin = self.connect(0, 0xFFFF, kato=kato)
        assert run(admin, Admin.FABRICS, 0, CC, ENABLE, nsid=Fabrics.PROPERTY_SET).status == 0
        return admin, self.connect(1, self.cntlid)

    def open(self, admin: Queue, offer: LinkParameters = OFFER) -> LinkParameters:
        """IDENTIFY and OPEN."""
        record = offer.pack().ljust(4096, b"\0")
        assert run(admin, Opcode.IDENTIFY, data=record).status == 0
        reply = run(admin, Opcode.OPEN, room=4096)
        assert reply.status == 0
        return parse(reply.data, "device", 1)


def feed(queue: Queue, data: bytes) -> None:
    """As a connection would: whatever fits, then processing."""
    while data:
        space = queue.reader.space()
        size = min(len(space), len(data))
        assert size, "no room, and nothing is unprocessed"
        space[:size] = data[:size]
        data = data[size:]
        queue.reader.filled(size)
        queue.process()


def collect(queue: Queue) -> list[tuple[int, bytes]]:
    """The PDUs that were put out: type and all bytes."""
    data = b"".join(queue.outgoing)
    assert len(data) == queue.backlog
    queue.sent(len(data))
    assert not queue.outgoing
    found = []
    while data:
        kind, length = data[0], struct.unpack_from("<I", data, 4)[0]
        assert 8 <= length <= len(data)
        found.append((kind, data[:length]))
        data = data[length:]
    return found


def replies(queue: Queue) -> dict[int, Reply]:
    """By CID, what commands ended with."""
    data: dict[int, bytes] = {}
    found = {}
    for kind, pdu in collect(queue):
        if kind == 7:
            cid, offset, size = struct.unpack_from("<H2xII", pdu, 8)
            assert offset == 0 and size == len(pdu) - 24
            data[cid] = pdu[24:]
        elif kind == 5:
            result, _, _, cid, status = struct.unpack_from("<QHHHH", pdu, 8)
            found[cid] = Reply(status >> 1 & 0x7FF, result, data.pop(cid, b""))
    assert not data
    return found


def run(queue: Queue, opcode: int, *words: int, data: bytes = b"", room: int = 0, nsid: int = 0) -> Reply:
    """One command to its end."""
    feed(queue, capsule(opcode, 7, *words, data=data, room=room, nsid=nsid))
    return replies(queue)[7]
