# SPDX-License-Identifier: Apache-2.0
"""The parsers of a peer's bytes, which do no I/O, given arbitrary input."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millpond.base.errors import ConnectionLost, VersionMismatch
from millpond.tunnel.addresses import Network, check_peers, peer_of
from millpond.tunnel.datapath.packet_filter import PacketFilter
from millpond.tunnel.datapath.stats_shm import FIELDS
from millpond.tunnel.datapath.vnet_header import is_allowed
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring import layout as at
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.handshake import open_as_device, open_as_host
from millpond.tunnel.ring.layout import ADMIN, ADMIN_ENTRIES, RECV, SEND, Layout
from millpond.tunnel.ring.link_params import (
    LinkParameters,
    check_negotiated,
    generation_after,
    negotiate,
    parse,
)
from millpond.tunnel.ring.nvme_defs import Opcode
from millpond.tunnel.ring.queue_pair import ControllerQueue, HostQueue
from millpond.tunnel.ring.region import QueueMemory, Region

from .robust_random_peer import REGISTERS

LAST_GENERATION = (1 << 62) - 1
LAYOUT = Layout(4)
_memory = memoryview(bytearray(LAYOUT.size))
any_word, any_quad = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def fresh_region() -> Region:
    """Everything but the packet buffers is zero."""
    end = LAYOUT.buffers(SEND).start
    _memory[:end] = bytes(end)
    return Region.create(_memory, LAYOUT)


# Packets

ADDRESSES = ["10.77.0.1/30", "10.77.0.2/30", "10.1.2.3/31", "fd00::/127", "fd00::1/127"]
addresses = st.sampled_from([*map(ipaddress.ip_interface, ADDRESSES)])
PEERS = {
    "10.77.0.1/30": ["10.77.0.0/16", "10.77.0.0/30"],
    "10.77.0.2/30": ["10.64.0.0/11", "10.77.0.0/29"],
}


@st.composite
def gates(draw: st.DrawFn, vnet_header: int) -> tuple[PacketFilter, Network, Network]:
    """A filter, where packets may come from, and where they may go."""
    address, role = draw(addresses), draw(st.sampled_from(["host", "device"]))
    peers = draw(st.sampled_from([None, *map(ipaddress.ip_network, PEERS.get(str(address), []))]))
    source: Network = ipaddress.ip_network(peer_of(address))
    destination: Network = ipaddress.ip_network(address.ip)
    if peers is not None:
        source, destination = (source, peers) if role == "host" else (peers, destination)
    return PacketFilter(address, vnet_header, role, peers, draw(st.integers(0, 7))), source, destination


@st.composite
def heads(draw: st.DrawFn) -> tuple[PacketFilter, Network, Network, bytes]:
    """A filter and the beginning of a packet that it would pass, changed somewhere, cut somewhere, or not."""
    vnet_header = draw(st.sampled_from([0, 10, 12]))
    gate, source, destination = draw(gates(vnet_header))
    start = gate.head - len(gate.expected)
    ends = b"".join(net[draw(st.integers(0, net.num_addresses - 1))].packed for net in (source, destination))
    head = bytearray(draw(st.binary(min_size=start, max_size=start)) + ends)
    if draw(st.booleans()):
        head[:vnet_header] = bytes(vnet_header)
    head[vnet_header] = gate.version << 4 | head[vnet_header] & 15
    for where in draw(st.lists(st.integers(0, len(head) - 1), max_size=3)):
        head[where] = draw(st.integers(0, 255))
    length = draw(st.one_of(st.just(len(head)), st.integers(vnet_header + 1, len(head))))
    return gate, source, destination, bytes(head[:length])


def expected_verdict(gate: PacketFilter, sources: Network, destinations: Network, head: bytes) -> str | None:
    """The same from another reading of the head."""
    packet = head[gate.vnet_header :]
    source_at, width = (12, 4) if gate.version == 4 else (8, 16)
    if len(packet) < source_at + 2 * width or packet[0] >> 4 != gate.version:
        return "malformed"
    source = ipaddress.ip_address(packet[source_at : source_at + width])
    destination = ipaddress.ip_address(packet[source_at + width : source_at + 2 * width])
    if source not in sources:
        return "foreign_source"
    if destination not in destinations:
        return "foreign_destination"
    return None if is_allowed(head, gate.vnet_header, len(head), gate.offloads) else "malformed"


@given(heads())
def test_only_packets_from_the_peer_to_this_end_pass(
    case: tuple[PacketFilter, Network, Network, bytes],
) -> None:
    gate, source, destination, head = case
    verdict = gate.verdict(head, len(head))
    assert verdict == expected_verdict(gate, source, destination, head)
    assert verdict is None or verdict in FIELDS


def test_peers_must_be_a_network_around_the_tunnel() -> None:
    address = ipaddress.ip_interface("10.77.0.1/30")
    check_peers(address, ipaddress.ip_network("10.77.0.0/16"))
    with pytest.raises(ValueError, match=r"do not include the tunnel's own network 10\.77\.0\.0/30"):
        check_peers(address, ipaddress.ip_network("10.78.0.0/16"))
    with pytest.raises(ValueError, match="IPv4"):
        check_peers(ipaddress.ip_interface("fd00::1/127"), ipaddress.ip_network("fd00::/16"))


def test_a_device_of_a_tunnel_with_peers_speaks_for_itself_alone() -> None:
    peers, own, other, outside = ipaddress.ip_network("10.77.0.0/16"), "10.77.0.2", "10.77.0.6", "10.78.0.6"
    host = PacketFilter(ipaddress.ip_interface("10.77.0.1/30"), 0, "host", peers)
    device = PacketFilter(ipaddress.ip_interface("10.77.0.2/30"), 0, "device", peers)

    def head(source: str, destination: str) -> bytes:
        ends = (ipaddress.ip_address(end).packed for end in (source, destination))
        return bytes([0x45, *bytes(11)]) + b"".join(ends)

    assert host.verdict(head(own, other), 20) is None
    assert host.verdict(head(other, own), 20) == "foreign_source"
    assert host.verdict(head(other, "10.77.0.1"), 20) == "foreign_source"
    assert host.verdict(head(own, outside), 20) == "foreign_destination"
    assert device.verdict(head(other, own), 20) is None
    assert device.verdict(head(outside, own), 20) == "foreign_source"
    assert device.verdict(head(own, other), 20) == "foreign_destination"


# Parameters

offers = st.builds(
    LinkParameters,
    generation=st.integers(1, LAST_GENERATION),
    mtu=st.integers(1280, 65535),
    depth=st.integers(2, 1024),
    offloads=st.sampled_from([0, 1, 3, 5, 7]),
    name=st.sampled_from(["", "host", "csd0", "größe"]),
)


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: b"\1\0" + tail)))
def test_any_record_is_read_or_refused(data: bytes) -> None:
    try:
        found = parse(data, "device", 1)
    except (LinkViolation, VersionMismatch):
        return
    assert parse(found.pack(), "device", 1) == found
    assert replace(found, generation=generation_after(found.generation)).generation > 0


@given(offers, offers)
def test_what_a_device_settles_is_never_beyond_the_offer(offer: LinkParameters, own: LinkParameters) -> None:
    settled = negotiate(parse(offer.pack(), "host", 1), own)
    check_negotiated(parse(settled.pack(), "device", 1), offer)
    assert settled.mtu == min(offer.mtu, own.mtu) and settled.depth == min(offer.depth, own.depth)


@given(st.integers(0, LAST_GENERATION))
@example(0)
@example(LAST_GENERATION)
def test_there_is_a_generation_after_any(generation: int) -> None:
    following = LinkParameters(generation=generation_after(generation)).generation
    assert following == (generation + 1 if generation < LAST_GENERATION else 1)


# Registers

writes = st.lists(st.tuples(st.sampled_from(REGISTERS), any_quad), max_size=4)


def write(region: Region, offset: int, value: int) -> None:
    struct.pack_into("<Q", region.memory, offset, value)


@given(writes)
def test_any_registers_tell_a_layout_that_fits_or_are_refused(changes: list[tuple[int, int]]) -> None:
    region = fresh_region()
    for offset, value in changes:
        write(region, offset, value)
    try:
        found = Region.attach(region.memory)
    except LinkViolation:
        return
    assert found.layout == LAYOUT


@given(writes)
def test_a_controller_is_enabled_with_its_own_queues_or_not_at_all(changes: list[tuple[int, int]]) -> None:
    region = fresh_region()
    region.registers.enable(LAYOUT)
    written = bytes(region.memory[: at.PAGE])
    for offset, value in changes:
        write(region, offset, value)
    watched = [(nvme_defs.CC, 4), (nvme_defs.AQA, 4), (nvme_defs.ASQ, 8), (nvme_defs.ACQ, 8)]
    if any(region.memory[start : start + n] != written[start : start + n] for start, n in watched):
        with pytest.raises(LinkViolation):
            region.registers.check_enabled(LAYOUT)
    else:
        region.registers.check_enabled(LAYOUT)
    assert region.registers.ready in (True, False)


# Opening

admin_places = st.one_of(
    st.sampled_from(REGISTERS),
    st.sampled_from([nvme_defs.DOORBELLS, nvme_defs.DOORBELLS + nvme_defs.doorbell_offset(1, at.STRIDE)]),
    *(
        st.integers(span.start // 8, min(span.end, span.start + 320) // 8 - 1).map(lambda quad: 8 * quad)
        for span in (LAYOUT.submission_ring(ADMIN), LAYOUT.completion_ring(ADMIN), LAYOUT.buffers(ADMIN))
    ),
)
admin_values = st.one_of(st.integers(0, 8), any_quad, st.integers(0, 63).map(lambda bit: 1 << bit))
Mischief = list[list[tuple[int, int]]]
mischief = st.lists(st.lists(st.tuples(admin_places, admin_values), max_size=3), min_size=3, max_size=3)


class Peer:
    """Answers each wait of the end under test with the next honest step, then with mischief."""

    def __init__(self, region: Region, steps: list[Callable[[], None]], plan: Mischief) -> None:
        self._region, self._steps, self._plan = region, steps, plan

    def wait(self, ready: Callable[[], bool]) -> None:
        for step in (self._honest, self._hostile):
            if not ready() or step == self._hostile:
                step()
        if not ready():
            raise ConnectionLost("it never comes")

    def _honest(self) -> None:
        if self._steps:
            self._steps.pop(0)()

    def _hostile(self) -> None:
        for offset, value in self._plan.pop(0) if self._plan else ():
            write(self._region, offset, value)


def device_steps(region: Region, own: LinkParameters) -> list[Callable[[], None]]:
    """What an honest device does when the host waits. It trips over what it wrote itself, as it may."""
    admin = ControllerQueue(region.queue(ADMIN, ADMIN_ENTRIES), (Opcode.IDENTIFY, Opcode.OPEN))

    def answer() -> None:
        try:
            if (command := admin.fetch()) is not None:
                record = own.pack()
                admin.buffers[command[2]][: len(record)] = record
                admin.complete(command[1])
        except LinkViolation:
            pass

    return [region.registers.set_ready, answer, answer]


def host_steps(region: Region, own: LinkParameters) -> list[Callable[[], None]]:
    """What an honest host does when the device waits."""
    admin = HostQueue(region.queue(ADMIN, ADMIN_ENTRIES))

    def submit(opcode: Opcode) -> None:
        cid, record = admin.acquire(), own.pack()
        assert cid is not None
        admin.buffers[cid][: len(record)] = record
        admin.submit(opcode, cid, 4096)

    return [
        lambda: region.registers.enable(LAYOUT),
        lambda: submit(Opcode.IDENTIFY),
        lambda: submit(Opcode.OPEN),
    ]


@given(mischief, offers)
@example([[], [], []], LinkParameters())
def test_a_host_opens_a_sane_link_or_none(plan: Mischief, own: LinkParameters) -> None:
    region, offer = fresh_region(), LinkParameters(depth=4)
    peer = Peer(region, device_steps(region, replace(own, depth=min(own.depth, 4))), plan)
    try:
        settled, name = open_as_host(region, offer, peer.wait)
    except (LinkViolation, VersionMismatch, ConnectionLost):
        return
    check_negotiated(settled, offer)
    assert settled.depth <= LAYOUT.entries and name.isprintable() | (name == "")


@given(mischief, offers)
@example([[], [], []], LinkParameters())
def test_a_device_opens_a_sane_link_or_none(plan: Mischief, offer: LinkParameters) -> None:
    region, own = fresh_region(), LinkParameters(depth=4)
    peer = Peer(region, host_steps(region, offer), plan)
    try:
        settled, name = open_as_device(region, own, peer.wait)
    except (LinkViolation, VersionMismatch, ConnectionLost):
        return
    assert 2 <= settled.depth <= 4 and 1280 <= settled.mtu <= own.mtu and settled.generation > 0
    assert settled.offloads & ~own.offloads == 0 and name.isprintable() | (name == "")


def test_an_honest_peer_opens_the_link() -> None:
    region, own = fresh_region(), LinkParameters(name="csd0", depth=4)
    peer = Peer(region, device_steps(region, own), [])
    assert open_as_host(region, LinkParameters(), peer.wait) == (own, "csd0")
    region = fresh_region()
    peer = Peer(region, host_steps(region, LinkParameters(name="host")), [])
    settled, name = open_as_device(region, own, peer.wait)
    assert (settled, name) == (own, "host")


# Queue pairs

near = st.integers(0, 5)
ring_writes = st.lists(st.tuples(st.integers(0, 63), st.one_of(near, any_quad)), max_size=6)
completions = st.builds(
    lambda sq_head, queue, cid, status: sq_head | queue << 16 | cid << 32 | status << 48,
    *(near, st.sampled_from([SEND, SEND, SEND, RECV]), near, st.sampled_from([0, 1, 1, 1, 3, 0xFFFF])),
)


@given(st.lists(st.tuples(st.integers(0, 3), completions), max_size=40))
def test_no_completion_frees_a_command_twice(script: list[tuple[int, int]]) -> None:
    memory = fresh_region().queue(SEND, 4)
    queue, ring, in_flight = HostQueue(memory), memory.completions.cast("Q"), set[int]()
    for slot, completion in script:
        while (cid := queue.acquire()) is not None:
            assert cid not in in_flight, "a buffer is given away that the controller may still read"
            in_flight.add(cid)
            queue.submit(Opcode.SEND, cid, 60)
        ring[2 * slot + 1] = completion
        try:
            while (done := queue.reap()) is not None:
                in_flight.remove(done[0])
        except LinkViolation:
            return
        assert len(in_flight) + len(queue.free) == 3


@given(st.lists(st.tuples(st.one_of(near, any_word), st.one_of(near, any_word), ring_writes), max_size=10))
def test_a_controller_takes_only_commands_in_range(
    script: list[tuple[int, int, list[tuple[int, int]]]],
) -> None:
    memory = fresh_region().queue(SEND, 4)
    honest, queue = HostQueue(memory), ControllerQueue(memory, (Opcode.SEND,))
    for _ in range(3):
        cid = honest.acquire()
        assert cid is not None
        honest.submit(Opcode.SEND, cid, 60)
    for tail, head, changes in script:
        memory.tail_doorbell[0], memory.head_doorbell[0] = tail, head
        for quad, value in changes:
            memory.submissions.cast("Q")[quad % (len(memory.submissions) // 8)] = value
        if not _take_all(queue, memory):
            return


def _take_all(queue: ControllerQueue, memory: QueueMemory) -> bool:
    """Fetch and complete what is there; False after a violation."""
    for _ in range(memory.entries):
        try:
            command = queue.fetch()
            if command is None:
                return True
            opcode, cid, index, length = command
            assert opcode == Opcode.SEND and cid < memory.entries and 0 < length <= len(memory.buffers[index])
            queue.complete(cid)
        except LinkViolation:
            return False
    raise AssertionError("a ring gave more than it holds")
