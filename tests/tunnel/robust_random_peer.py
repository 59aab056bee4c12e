# SPDX-License-Identifier: Apache-2.0
"""A peer on shared memory that opens the link correctly and then violates the protocol at random."""

from __future__ import annotations

import fcntl
import ipaddress
import mmap
import os
import random
import select
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring import layout as at
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.handshake import open_as_device, open_as_host
from millpond.tunnel.ring.layout import ADMIN, RECV, SEND
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.nvme_defs import Opcode
from millpond.tunnel.ring.queue_pair import ControllerQueue, HostQueue
from millpond.tunnel.transports.memfd import MemfdConnector, MemfdListener
from millpond.tunnel.transports.ring_connection import RingConnection

from .conftest import End

VNET_HEADER = 12
PATIENCE = 30.0
REGISTERS = (
    nvme_defs.CAP,
    nvme_defs.VS,
    nvme_defs.CC,
    nvme_defs.CSTS,
    nvme_defs.AQA,
    nvme_defs.ASQ,
    nvme_defs.ACQ,
    at.MAGIC_REGISTER,
    at.SIZE_REGISTER,
    at.GENERATION_REGISTER,
)
EDGES = (0, 1, 2, 31, 32, 33, 0xFFFF, 0x10000, 2**31, 2**32 - 1)


def udp(source: str, destination: str, payload: bytes = b"mallory") -> bytes:
    """A packet that the kernel takes, of either IP version, behind an empty vnet header."""
    there, here = ipaddress.ip_address(source), ipaddress.ip_address(destination)
    body = struct.pack(">HHHH", 9, 9, 8 + len(payload), 0) + payload
    if there.version == 6:
        head = struct.pack(">IHBB", 6 << 28, len(body), 17, 64)
    else:
        head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, 17, 0)
    packet = head + there.packed + here.packed
    if there.version == 4:
        total = sum(struct.unpack(">10H", packet))
        total = (total & 0xFFFF) + (total >> 16)
        packet = packet[:10] + struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF) + packet[12:]
    return bytes(VNET_HEADER) + packet + body


def cpu_seconds(end: End) -> float:
    """Used by an end, the pumps that it has and those that it had."""
    total = 0
    for pid in (end.process.pid, *end.pumps()):
        with suppress(FileNotFoundError):  # a pump that has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def sealed_region(undo: ExitStack, size: int) -> tuple[int, memoryview]:
    """A memory file as a device must pass it, and its memory."""
    descriptor = os.memfd_create("mallory", os.MFD_ALLOW_SEALING)
    undo.callback(os.close, descriptor)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor, memoryview(mmap.mmap(descriptor, size))


def lost(link: RingConnection) -> bool:
    """Whether the end has given this link up."""
    return bool(select.select([link.gone], [], [], 0)[0])


class Mallory:
    """One link with the end at ``path`` after another. ``own`` is its own address, ``victim`` the end's."""

    def __init__(self, role: str, path: Path, source: random.Random, own: str, victim: str) -> None:
        self.role, self._path, self._random = role, path, source
        self._own, self._victim = own, victim
        self._listener = MemfdListener(path, 32) if role == "device" else None
        self.links = self.acts = 0

    def close(self) -> None:
        """Leave the place to another."""
        if self._listener is not None:
            self._listener.close()

    def join(self) -> RingConnection:
        """A new link, not open yet."""
        deadline = Deadline.after(PATIENCE)
        while True:
            try:
                return self._connect(deadline)
            except (MillpondError, OSError):
                assert not deadline.passed, "the end does not come back"
                time.sleep(0.01)

    def _connect(self, deadline: Deadline) -> RingConnection:
        if self._listener is None:
            return MemfdConnector(self._path).join()
        readable = self._listener.readiness()
        assert readable is not None
        if not select.select([readable], [], [], deadline.remaining())[0]:
            raise ConnectionLost("no host connects")
        return self._listener.join()

    def open(self, link: RingConnection, own: LinkParameters) -> LinkParameters:
        """Open it as the protocol has it."""
        opener = open_as_host if self.role == "host" else open_as_device
        deadline = Deadline.after(PATIENCE)

        def wait(ready: Callable[[], bool]) -> None:
            while not ready():
                if deadline.passed or lost(link):
                    raise ConnectionLost("the end does not open")
                time.sleep(0.0005)

        terms, _ = opener(link.region, own, wait)
        return terms

    def session(self, seconds: float) -> None:
        """One link: honest for a moment, then not; ends with the link or after some time."""
        source = self._random
        with self.join() as link:
            self.links += 1
            own = LinkParameters(depth=source.choice((2, 3, 8, 32)), mtu=source.choice((1280, 1500, 65520)))
            with suppress(MillpondError):
                mischief = Mischief(link, self.role, self.open(link, own).depth, source)
                mischief.packets = [udp(self._own, self._victim), *self._bad_packets()]
                for _ in range(source.randrange(40)):
                    mischief.honest()
                deadline = Deadline.after(seconds)
                while not deadline.passed and not lost(link):
                    mischief.act()
                    self.acts += 1

    def _bad_packets(self) -> list[bytes]:
        """Packets that must not get through, or that the kernel may refuse."""
        good = udp(self._own, self._victim)
        foreign = [("10.77.0.9", self._victim), (self._own, "10.88.0.1"), (self._victim, self._own)]
        bad = [udp(*pair) for pair in foreign] + [udp("fd00::1", "fd00::2"), good[:-20], good[:20], good[:13]]
        bad.append(self._random.randbytes(VNET_HEADER) + good[VNET_HEADER:])
        changed = bytearray(good)
        changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return [*bad, bytes(changed), self._random.randbytes(60)]


class Mischief:
    """What may be done to an open link."""

    def __init__(self, link: RingConnection, role: str, depth: int, source: random.Random) -> None:
        self._link, self._random, self.packets = link, source, [b""]
        self._memory = {number: link.region.queue(number, depth) for number in (SEND, RECV)}
        self._host = role == "host"
        self._outward, self._inward = (SEND, RECV) if self._host else (RECV, SEND)
        self._host_queues = {number: HostQueue(m) for number, m in self._memory.items()} if self._host else {}
        self._controllers = {
            number: ControllerQueue(m, (Opcode.SEND, Opcode.RECV)) for number, m in self._memory.items()
        }
        self._acts = [self.honest] * 6 + [self._packet] * 6
        self._acts += [
            self._word,
            self._entry,
            self._completion,
            self._ring,
            self._registers,
            self._notifiers,
        ]
        self._acts += [self._storm, self._silence, self._twice, self._leave]

    def act(self) -> None:
        """One of them."""
        with suppress(LinkViolation):  # it trips over its own garbage
            self._random.choice(self._acts)()

    def honest(self) -> None:
        """A packet from its own address to the end's, and what the end sent taken."""
        self._deliver(self.packets[0])

    def _packet(self) -> None:
        self._deliver(self._random.choice(self.packets))

    def _deliver(self, packet: bytes) -> None:
        if self._host:
            self._as_host(packet)
        else:
            self._as_device(packet)
        self._link.notifiers[self._outward].notify()
        self._link.notifiers[self._inward].notify()
        time.sleep(0.0005)

    def _as_host(self, packet: bytes) -> None:
        send, receive = self._host_queues[SEND], self._host_queues[RECV]
        while send.reap() or receive.reap():
            pass
        while (cid := receive.acquire()) is not None:
            receive.submit(Opcode.RECV, cid, self._memory[RECV].span.size)
        if (cid := send.acquire()) is not None:
            send.buffers[cid][: len(packet)] = packet
            send.submit(Opcode.SEND, cid, len(packet))

    def _as_device(self, packet: bytes) -> None:
        send, receive = self._controllers[SEND], self._controllers[RECV]
        while (command := send.fetch()) is not None:
            send.complete(command[1])
        if (command := receive.fetch()) is not None:
            receive.buffers[command[2]][: len(packet)] = packet
            receive.complete(command[1], len(packet))

    def _number(self, bits: int) -> int:
        edge = self._random.choice(EDGES) if self._random.random() < 0.6 else self._random.getrandbits(bits)
        return edge & ((1 << bits) - 1)

    def _word(self) -> None:
        memory = self._memory[self._random.choice((SEND, RECV))]
        words = (
            memory.tail_doorbell,
            memory.head_doorbell,
            memory.controller_sleep_word,
            memory.host_sleep_word,
        )
        self._random.choice(words)[0] = self._number(32)

    def _entry(self) -> None:
        memory = self._memory[self._random.choice((SEND, RECV))]
        offset = 64 * self._random.randrange(memory.entries)
        field, kind, bits = self._random.choice([(0, "B", 8), (2, "H", 16), (24, "Q", 64), (40, "I", 32)])
        struct.pack_into("<" + kind, memory.submissions, offset + field, self._number(bits))
        self._link.notifiers[self._outward].notify()

    def _completion(self) -> None:
        memory = self._memory[self._random.choice((SEND, RECV))]
        offset = 16 * self._random.randrange(memory.entries)
        field = self._random.choice((0, 8, 10, 12, 14, 14))
        struct.pack_into("<H", memory.completions, offset + field, self._number(16))
        self._link.notifiers[self._outward].notify()

    def _ring(self) -> None:
        memory = self._memory[self._random.choice((SEND, RECV))]
        ring = self._random.choice((memory.submissions, memory.completions))
        ring[:] = self._random.randbytes(len(ring))
        for notifier in self._link.notifiers:
            notifier.notify()

    def _registers(self) -> None:
        offset = self._random.choice(REGISTERS)
        struct.pack_into("<I", self._link.region.memory, offset, self._number(32))
        self._link.notifiers[ADMIN].notify()

    def _notifiers(self) -> None:
        for notifier in self._link.notifiers:
            with suppress(BlockingIOError):
                os.eventfd_write(notifier.descriptor, self._random.choice((1, 1000, 2**64 - 2)))

    def _storm(self) -> None:
        for _ in range(self._random.randrange(3000)):
            self._link.notifiers[self._outward].notify()
            self._link.notifiers[self._inward].notify()

    def _silence(self) -> None:
        time.sleep(self._random.uniform(0, 0.05))

    def _twice(self) -> None:
        memory = self._memory[self._outward]
        if self._host:
            memory.tail_doorbell[0] = self._random.randrange(memory.entries)
            return
        slot = self._random.randrange(memory.entries) * 16
        following = (slot + 16) % len(memory.completions)
        memory.completions[following : following + 16] = bytes(memory.completions[slot : slot + 16])

    def _leave(self) -> None:
        if self._random.random() < 0.1:
            raise ConnectionLost("it hangs up")
