# SPDX-License-Identifier: Apache-2.0
"""The vnet header of a hostile peer reaches the kernel only where Linux itself could have made it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from millpond.base.deadline import Deadline
from millpond.tunnel.datapath import native
from millpond.tunnel.datapath.vnet_header import is_allowed
from millpond.tunnel.ring.layout import RECV, SEND
from millpond.tunnel.ring.link_params import ALL_OFFLOADS, CSUM, TSO6, LinkParameters
from millpond.tunnel.ring.nvme_defs import Opcode
from millpond.tunnel.ring.queue_pair import ControllerQueue, HostQueue
from millpond.tunnel.transports.ring_connection import RingConnection

from ..effort import scaled
from . import vnet_packets
from .conftest import DEVICE_ADDRESS, HOST_ADDRESS, INTERFACE, Pair
from .robust_engine import RunningLoop, why_not_observable
from .robust_honest_peer import HonestPeer
from .robust_loop_context import Setting
from .robust_random_peer import Mallory
from .vnet_packets import BAD, GOOD, packet

CATCHER = Path(__file__).with_name("vnet_catcher.py")
BOTH_ENGINES = pytest.mark.parametrize("engines", ["python-python", "c-c"], indirect=True)
SECONDS = scaled(3.0, 10.0)
OUT_ADDRESS, OUT_PEER = "10.77.9.1/30", "10.77.9.2"
ROLES = {"device": (HOST_ADDRESS, DEVICE_ADDRESS), "host": (DEVICE_ADDRESS, HOST_ADDRESS)}
"""Per victim: the address of the peer, and its own."""


def meet(ready: Callable[[], bool]) -> None:
    deadline = Deadline.after(30)
    while not ready():
        assert not deadline.passed
        time.sleep(0.0002)


class Sender:
    """The peer's half of the queue that carries packets to the victim."""

    def __init__(self, link: RingConnection, role: str, depth: int) -> None:
        self._number = SEND if role == "host" else RECV
        self._notify = link.notifiers[self._number].notify
        memory = link.region.queue(self._number, depth)
        self._host = HostQueue(memory) if role == "host" else None
        self._device = None if role == "host" else ControllerQueue(memory, (Opcode.RECV,))
        self._depth, self._under_way = depth, 0

    def send(self, data: bytes) -> None:
        """Give the victim a packet once there is room for one."""
        if self._host is not None:
            cids: list[int] = []
            meet(lambda: self._reaped(cids))
            self._host.buffers[cids[0]][: len(data)] = data
            self._host.submit(Opcode.SEND, cids[0], len(data))
            self._under_way += 1
        elif self._device is not None:
            device = self._device
            meet(device.ready)
            command = device.fetch()
            assert command is not None
            device.buffers[command[2]][: len(data)] = data
            device.complete(command[1], len(data))
        self._notify()

    def drain(self) -> None:
        """Wait until the victim has taken all packets: it has given back their buffers."""
        for _ in range(self._depth - 1 if self._device else 0):
            assert self._device is not None
            meet(self._device.ready)
            assert self._device.fetch() is not None

        if self._host is not None:
            meet(lambda: self._left() == 0)

    def _left(self) -> int:
        """How many packets the victim, a device, has not taken yet."""
        assert self._host is not None
        while self._host.reap() is not None:
            self._under_way -= 1
        return self._under_way

    def _reaped(self, cids: list[int]) -> bool:
        assert self._host is not None
        self._left()
        cid = self._host.acquire()
        cids.extend([] if cid is None else [cid])
        return cid is not None


def send_to(victim: str, pair: Pair, packets: list[bytes], *options: str) -> dict[str, Any]:
    """Send these from its peer; returns what the victim has counted of packets to its interface."""
    side, role = (pair.device_side, "host") if victim == "device" else (pair.host_side, "device")
    end = side.end(victim, pair.socket, *options)
    mallory = Mallory(role, pair.socket, random.Random(0), *ROLES[victim])
    with mallory.join() as link:
        sender = Sender(link, role, mallory.open(link, LinkParameters()).depth)
        end.wait_up()
        for data in packets:
            sender.send(data)
        sender.drain()
    mallory.close()
    figures: dict[str, Any] = end.wait_down("the peer is gone")
    assert figures["resets"] == 0
    return dict(figures["in"])


def behind(headers: dict[str, tuple[bytes, int]], victim: str) -> list[bytes]:
    return [header + packet(*ROLES[victim], payload) for header, payload in headers.values()]


@BOTH_ENGINES
@pytest.mark.parametrize("victim", ["device", "host"])
def test_headers_that_linux_never_makes_do_not_reach_the_kernel(pair: Pair, victim: str) -> None:
    found = send_to(victim, pair, [*behind(BAD, victim), *behind(GOOD, victim)])
    assert (found["packets"], found["dropped"]) == (len(GOOD), len(BAD))


@BOTH_ENGINES
def test_offloads_that_were_not_negotiated_do_not_reach_the_kernel(pair: Pair) -> None:
    found = send_to("host", pair, behind(GOOD, "host"), "--offload", "none")
    assert (found["packets"], found["dropped"]) == (3, len(GOOD) - 3)


@BOTH_ENGINES
def test_the_kernel_takes_exactly_the_random_headers_that_pass(pair: Pair) -> None:
    """A kernel that forwards a packet to an interface without offloads completes its checksum and cuts it
    into segments itself, where the header says.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    before, chance = kernel_complaints(), random.Random(seed)
    host = pair.host_side.end("host", pair.socket, "--peers", "10.77.0.0/16")
    host.wait_begun()
    argv = [str(CATCHER), INTERFACE, DEVICE_ADDRESS, OUT_ADDRESS, OUT_PEER]
    catcher = pair.host_side.program(sys.executable, *argv)
    catcher.says("listening")
    mallory, deadline = Mallory("device", pair.socket, chance, *ROLES["host"]), Deadline.after(SECONDS)
    with mallory.join() as link:
        sender = Sender(link, "device", mallory.open(link, LinkParameters()).depth)
        sent = allowed = 0
        while not deadline.passed:
            data = vnet_packets.random_packet(DEVICE_ADDRESS, OUT_PEER, chance)
            sender.send(data)
            sent, allowed = sent + 1, allowed + is_allowed(data[:32], 12, len(data), ALL_OFFLOADS)
        sender.drain()
    mallory.close()
    figures = host.wait_down("the peer is gone")
    catcher.process.send_signal(signal.SIGTERM)
    found = json.loads(catcher.result())
    print(sent, allowed, figures["in"], found["seen"])
    assert found["changed"] == [] and found["seen"] > 100 and figures["resets"] == 0
    assert (figures["in"]["packets"], figures["in"]["dropped"]) == (allowed, sent - allowed)
    assert 100 < allowed < sent - 100
    assert kernel_complaints() == before


@pytest.mark.skipif(bool(why_not_observable()), reason=why_not_observable())
@pytest.mark.parametrize("engine", ["python", "c"])
@pytest.mark.parametrize("offloads", [0, CSUM, CSUM | TSO6, ALL_OFFLOADS])
def test_each_engine_passes_the_headers_of_ipv6_that_are_allowed(
    undo: ExitStack, engine: str, offloads: int
) -> None:
    if native.resolve("auto") != "c" == engine:
        pytest.skip("the C engine was not built: there was no C compiler")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    loop = RunningLoop(undo, engine, Setting("execute_sends", address="fd00::1/127", offloads=offloads))
    packets = [vnet_packets.random_packet_6("fd00::", "fd00::1", chance) for _ in range(scaled(400, 5000))]
    peer, queue, got = HonestPeer(loop), deque(packets), list[bytes]()
    while queue:
        peer.give(queue)
        got += loop.delivered()
    loop.rest()
    got += loop.delivered()
    assert got == [data for data in packets if is_allowed(data[:52], 12, len(data), offloads)]
    assert len(packets) // 50 < len(got) < len(packets)


def kernel_complaints() -> list[str]:
    """Return what the kernel has said of faults and bad offloads; nothing where its log cannot be read."""
    found: list[str] = []
    with suppress(OSError):
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                found.append(os.read(log, 8192).decode(errors="replace"))
        finally:
            os.close(log)
    return [
        line for line in found if any(word in line for word in ("WARNING:", "BUG:", "bad_offload", "caps="))
    ]


@BOTH_ENGINES
@pytest.mark.parametrize("options", [(), ("--mtu", "1500"), ("--offload", "none", "--mtu", "9000")])
def test_nothing_that_linux_sends_is_dropped(pair: Pair, options: tuple[str, ...]) -> None:
    device = pair.device_side.end("device", pair.socket)
    host = pair.host_side.end("host", pair.socket, *options)
    host.wait_up()
    device.wait_up()
    server = pair.device_side.traffic("serve", DEVICE_ADDRESS, 1 << 22)
    server.says("listening")
    assert pair.host_side.traffic("exchange", DEVICE_ADDRESS, 1 << 22).result() == f"{1 << 22} intact"
    host.kill()
    figures = device.wait_down("the peer is gone")["in"]
    assert figures["dropped"] == 0 < figures["packets"]


def test_only_whole_packets_of_tcp_are_cut_into_segments() -> None:
    header = vnet_packets.vnet(**vnet_packets.SEGMENTS)
    for protocol, fragment in ((vnet_packets.UDP, 0), (vnet_packets.TCP, 0x2000), (vnet_packets.TCP, 1)):
        data = header + packet(*ROLES["host"], vnet_packets.LARGE, protocol, fragment)
        assert not is_allowed(data[:32], 12, len(data), ALL_OFFLOADS)
    options = bytearray(header + packet(*ROLES["host"], vnet_packets.LARGE))
    options[12] = 0x46  # an IP header of 24 bytes
    assert not is_allowed(bytes(options[:32]), 12, len(options), ALL_OFFLOADS)
    options[12] = 0x44  # of 16
    assert not is_allowed(bytes(options[:32]), 12, len(options), ALL_OFFLOADS)
