# SPDX-License-Identifier: Apache-2.0
"""RECV packets in any order: the host's endpoint sorts them, and ends a link with wrong or lost numbers."""

from __future__ import annotations

import ipaddress
import os
import queue
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest

from millpond.tunnel.datapath.context import DatapathContext
from millpond.tunnel.datapath.packet_filter import PacketFilter
from millpond.tunnel.datapath.stats_shm import make_stats, map_stats
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.transports.nvme import transport
from millpond.tunnel.transports.nvme.ioctl import CommandOutcome, VendorCommand
from millpond.tunnel.transports.nvme.transport import RECEIVERS, NvmeConnection

ADDRESS = ipaddress.ip_interface("10.77.0.1/30")
HEAD = bytes(12) + b"\x45" + bytes(11) + ipaddress.ip_address("10.77.0.2").packed + ADDRESS.ip.packed
LAST = 39


class Numbers:
    """A device that completes RECVs with packets of these numbers, the later the earlier; then none."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            self._numbers.put(number)

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def admin(self, command: VendorCommand) -> CommandOutcome:
        raise NotImplementedError

    def io(self, command: VendorCommand) -> CommandOutcome:
        try:
            number = self._numbers.get(timeout=0.02)
        except queue.Empty:
            return CommandOutcome(0, 0)
        time.sleep((-number - 1) % RECEIVERS / 500)
        packet = HEAD + struct.pack("<I", number)
        command.data[: len(packet)] = packet
        return CommandOutcome(0, len(packet) | number << 32)

    def close(self) -> None:
        pass


@dataclass
class Packets:
    """A ``transport.PacketInterface`` that keeps what it gets; after the last packet the process ends."""

    name: str = "none"
    descriptor: int = -1
    numbers: list[int] = field(default_factory=list)

    def read_into(self, buffer: memoryview) -> int:
        raise NotImplementedError

    def write(self, head: bytes, rest: memoryview) -> bool:
        number = struct.unpack("<I", rest)[0]
        self.numbers.append(number)
        if number == LAST:
            say(f"in order {self.numbers == list(range(LAST + 1))}")
        return True

    def check_gone(self, error: OSError) -> None:
        pass

    def errors(self) -> nullcontext[None]:
        return nullcontext()


def say(text: str) -> None:
    """The result; the threads that still wait end with the process."""
    print(text, flush=True)
    os._exit(0)


def receive(numbers: Iterable[int]) -> None:
    transport.GAP_SECONDS = 0.5
    outward, inward = map_stats(make_stats())
    context = DatapathContext(LinkParameters(), Packets(), PacketFilter(ADDRESS, 12), outward, inward)
    try:
        NvmeConnection(Numbers(numbers)).loops(context)[1]()
    except LinkViolation as error:
        say(str(error))


def outcome(numbers: Iterable[int]) -> str:
    """What a process says that receives packets of these numbers."""
    argv = [sys.executable, "-W", "error", __file__, *map(str, numbers)]
    result = subprocess.run(argv, capture_output=True, timeout=20, text=True, check=True)
    return result.stdout.strip()


def test_packets_that_overtook_each_other_are_put_in_order() -> None:
    assert outcome(range(LAST + 1)) == "in order True"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (range(1, 9), "the device sent packet 8 when 0 was due"),
        ([1, 2, 2], "the device sent packet 2 when 0 was due"),
        ([0, 0], "the device sent packet 0 when 1 was due"),
        ([1 << 31], f"the device sent packet {1 << 31} when 0 was due"),
        ([0, 2], "packet 1 has not come 0.5 s after packet 2"),
    ],
    ids=["left out", "twice at once", "once more", "far ahead", "lost"],
)
def test_a_number_out_of_place_or_lost_ends_the_link(numbers: Iterable[int], text: str) -> None:
    assert outcome(numbers) == text


if __name__ == "__main__":
    receive(map(int, sys.argv[1:]))
