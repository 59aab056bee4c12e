# SPDX-License-Identifier: Apache-2.0
"""An honest peer's half of one queue, as the protocol has it."""

from __future__ import annotations

from collections import deque

from millpond.tunnel.ring.nvme_defs import Opcode
from millpond.tunnel.ring.queue_pair import ControllerQueue, HostQueue

from .robust_engine import RunningLoop


class HonestPeer:
    """Of a loop of the host or the device."""

    def __init__(self, loop: RunningLoop) -> None:
        self._loop = loop
        self._controls = loop.role == "host"
        if self._controls:
            self._controller = ControllerQueue(loop.memory, (Opcode.SEND, Opcode.RECV))
        else:
            self._host = HostQueue(loop.memory)

    def give(self, packets: deque[bytes]) -> None:
        """As many as the ring takes now, to the interface."""
        if self._controls:
            while packets and (command := self._controller.fetch()) is not None:
                self._complete(command, packets.popleft())
        else:
            while self._host.reap() is not None:
                pass
            while packets and (cid := self._host.acquire()) is not None:
                self._submit(cid, packets.popleft())
        self._loop.ring()

    def _complete(self, command: tuple[int, int, int, int], packet: bytes) -> None:
        self._loop.memory.buffers[command[2]][: len(packet)] = packet
        self._controller.complete(command[1], len(packet))

    def _submit(self, cid: int, packet: bytes) -> None:
        self._loop.memory.buffers[cid][: len(packet)] = packet
        self._host.submit(Opcode.SEND, cid, len(packet))

    def take(self) -> list[bytes]:
        """What has come from the interface; room for more."""
        packets: list[bytes] = []
        if self._controls:
            while (command := self._controller.fetch()) is not None:
                packets.append(bytes(self._loop.memory.buffers[command[2]][: command[3]]))
                self._controller.complete(command[1])
        else:
            while (done := self._host.reap()) is not None:
                packets.append(bytes(self._loop.memory.buffers[done[0]][: done[1]]))
            while (cid := self._host.acquire()) is not None:
                self._host.submit(Opcode.RECV, cid, self._loop.memory.span.size)
        self._loop.ring()
        return packets
