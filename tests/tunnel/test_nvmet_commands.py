# SPDX-License-Identifier: Apache-2.0
"""The target's replies, without sockets: Connect, properties, Identify, blocks, the tunnel's commands."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring.nvme_defs import CAP, CC, CSTS, VS, Opcode
from millpond.tunnel.transports.nvme.ioctl import MODULUS
from nvmet.commands import Admin, Fabrics, Io
from nvmet.errors import FabricsViolation
from nvmet.pdu import MAX_TRANSFER
from nvmet.resequencer import Resequencer
from nvmet.vendor_commands import WINDOW

from .nvme_initiator import HOST_NQN, OTHER_HOST_NQN, capsule
from .nvme_rig import BLOCK, BLOCKS, IDLE, OFFER, Rig, collect, feed, replies, run

SUCCESS, FIELD, NAMESPACE, SEQUENCE, RANGE = 0, 0x002, 0x00B, 0x00C, 0x080
BUSY, PARAMETERS, UNLISTED, VERSION, NOT_OPEN = 0x181, 0x182, 0x184, 0x701, 0x702
PACKET = bytes(12) + b"\x45" + bytes(39)


def host_data(cid: int, offset: int, data: bytes, tag: int | None = None) -> bytes:
    tag = cid if tag is None else tag
    return struct.pack("<BBBBIHHIIxxxx", 6, 4, 24, 24, 24 + len(data), cid, tag, offset, len(data)) + data


class TestConnect:
    def test_a_host_connects_its_queues(self) -> None:
        rig = Rig()
        _, io = rig.up()
        assert run(io, Io.FLUSH, nsid=1).status == SUCCESS

    @pytest.mark.parametrize(
        ("wrong", "status"),
        [
            ({"cntlid": 1}, PARAMETERS),
            ({"nqn": "nqn.other"}, PARAMETERS),
            ({"host_nqn": "nqn.2014-08.test:stranger"}, UNLISTED),
            ({"host_nqn": HOST_NQN.upper()}, UNLISTED),
            ({"host_nqn": ""}, PARAMETERS),
            ({"entries": 1}, PARAMETERS),
            ({"entries": 129}, PARAMETERS),
            ({"qid": 1}, PARAMETERS),
        ],
    )
    def test_a_wrong_connect_is_refused(self, wrong: dict[str, object], status: int) -> None:
        rig = Rig()
        wish = {"qid": 0, "cntlid": 0xFFFF} | wrong
        assert rig.try_connect(rig.queue(), **wish).status == status  # type: ignore[arg-type]

    def test_each_listed_host_may_connect_and_no_other_takes_over(self) -> None:
        rig = Rig()
        rig.up()
        assert rig.try_connect(rig.queue(), 0, 0xFFFF, host_nqn="nqn.stranger").status == UNLISTED
        assert rig.try_connect(rig.queue(), 1, rig.cntlid, host_nqn="nqn.stranger").status == UNLISTED
        assert rig.try_connect(rig.queue(), 0, 0xFFFF, host_nqn=OTHER_HOST_NQN).status == BUSY
        assert Rig().try_connect(Rig().queue(), 0, 0xFFFF, host_nqn=OTHER_HOST_NQN).status == SUCCESS

    def test_another_host_finds_it_busy_until_the_first_is_gone(self) -> None:
        rig = Rig()
        admin, _ = rig.up()
        assert rig.try_connect(rig.queue(), 0, 0xFFFF, host=bytes(16)).status == BUSY
        rig.subsystem.lost(admin)
        assert rig.try_connect(rig.queue(), 0, 0xFFFF, host=bytes(16)).status == SUCCESS

    def test_a_host_that_connects_anew_replaces_itself(self) -> None:
        rig = Rig()
        admin, io = rig.up()
        rig.open(admin)
        first = rig.cntlid
        rig.connect(0, 0xFFFF)
        assert set(rig.subsystem.doomed) == {admin, io} and rig.cntlid != first
        assert rig.side.ends == ["the host connected anew"]
        assert rig.try_connect(rig.queue(), 2, first).status == PARAMETERS

    def test_an_io_queue_needs_an_enabled_controller_and_a_free_number(self) -> None:
        rig = Rig()
        rig.connect(0, 0xFFFF)
        assert rig.try_connect(rig.queue(), 1, rig.cntlid).status == SEQUENCE
        rig = Rig()
        rig.up()
        for qid, status in ((1, PARAMETERS), (5, PARAMETERS), (4, SUCCESS)):
            assert rig.try_connect(rig.queue(), qid, rig.cntlid).status == status

    def test_nothing_goes_before_connect(self) -> None:
        rig = Rig()
        for opcode in (Admin.IDENTIFY, Opcode.IDENTIFY, Opcode.SEND, Io.READ):
            assert run(rig.queue(), opcode, room=4096 * (opcode & 2)).status == SEQUENCE

    def test_a_silent_host_is_given_up(self) -> None:
        rig = Rig()
        admin, io = rig.up(kato=1000)
        rig.open(admin)
        assert rig.subsystem.next_expiry() == rig.now + 3
        rig.now += 2.9
        rig.subsystem.note_traffic(admin)
        rig.now += 2.9
        rig.subsystem.expire()
        assert not rig.subsystem.doomed
        rig.now += 0.2
        rig.subsystem.expire()
        assert set(rig.subsystem.doomed) == {admin, io} and rig.side.ends == ["the host is silent"]


class TestAdmin:
    def test_properties(self) -> None:
        rig = Rig()
        admin = rig.connect(0, 0xFFFF)
        get = lambda register, size=0: run(admin, Admin.FABRICS, size, register, nsid=Fabrics.PROPERTY_GET)  # noqa: E731
        assert get(CAP, 1).result & 0xFFFF == 127 and get(VS).result == 0x10400 and get(CSTS).result == 0
        assert get(CAP, 0).status == get(0x20).status == get(CSTS, 1).status == FIELD
        put = lambda value: run(admin, Admin.FABRICS, 0, CC, value, nsid=Fabrics.PROPERTY_SET)  # noqa: E731
        assert put(1).status == SUCCESS and get(CSTS).result == 1 and get(CC).result == 1
        assert put(1 | 1 << 14).status == SUCCESS and get(CSTS).result == 2 << 2
        assert put(0).status == SUCCESS and get(CSTS).result == 0
        assert run(admin, Admin.IDENTIFY, 1, room=4096).status == SEQUENCE

    def test_identify(self) -> None:
        rig = Rig()
        admin, _ = rig.up()
        controller = run(admin, Admin.IDENTIFY, 1, room=4096).data
        assert controller[24:33] == b"millpond " and len(controller) == 4096
        assert struct.unpack_from("<H", controller, 78)[0] == rig.cntlid
        namespace = run(admin, Admin.IDENTIFY, 0, room=4096, nsid=1).data
        assert struct.unpack_from("<Q", namespace)[0] == BLOCKS and 1 << namespace[130] == BLOCK
        assert run(admin, Admin.IDENTIFY, 2, room=4096).data[:8] == struct.pack("<II", 1, 0)
        assert run(admin, Admin.IDENTIFY, 2, room=4096, nsid=1).data == bytes(4096)
        assert run(admin, Admin.IDENTIFY, 3, room=4096, nsid=1).data[4:20] == namespace[104:120]
        assert run(admin, Admin.IDENTIFY, 0, room=4096, nsid=2).status == NAMESPACE
        assert run(admin, Admin.IDENTIFY, 0x1C, room=4096).status == FIELD

    def test_events_are_held_up_to_their_limit(self) -> None:
        admin, _ = Rig().up()
        for cid in range(5):
            feed(admin, capsule(Admin.ASYNC_EVENT, cid))
        assert {cid: reply.status for cid, reply in replies(admin).items()} == {4: 0x105}

    def test_log_pages_and_features(self) -> None:
        admin, _ = Rig().up()
        page = run(admin, Admin.GET_LOG_PAGE, 2 | 127 << 16, room=512)
        assert page.status == SUCCESS and len(page.data) == 512
        assert run(admin, Admin.GET_LOG_PAGE, 2 | 7 << 16, 0, 508, room=32).data == bytes(32)
        assert run(admin, Admin.GET_LOG_PAGE, 2, 0, 1024, room=4).status == 0x109
        assert run(admin, Admin.GET_LOG_PAGE, 0x70, room=4).status == 0x109
        assert run(admin, Admin.SET_FEATURES, 7, 7 | 7 << 16).result == 3 | 3 << 16
        assert run(admin, Admin.SET_FEATURES, 0x55).status == FIELD
        assert run(admin, Admin.KEEP_ALIVE).status == SUCCESS
        assert run(admin, 0x55).status == 0x001


class TestBlocks:
    def test_what_is_written_is_read(self) -> None:
        rig = Rig()
        _, io = rig.up()
        data = bytes(range(256)) * 8
        assert run(io, Io.WRITE, 5, 0, 3, data=data, nsid=1).status == SUCCESS
        assert run(io, Io.READ, 5, 0, 3, room=2048, nsid=1).data == data
        assert run(io, Io.WRITE_ZEROES, 6, 0, 0, nsid=1).status == SUCCESS
        assert run(io, Io.READ, 6, 0, 1, room=1024, nsid=1).data == bytes(512) + data[1024:1536]
        given_up = struct.pack("<IIQ", 0, 1, 5)
        assert run(io, Io.DATASET_MANAGEMENT, 0, 4, data=given_up, nsid=1).status == SUCCESS
        assert rig.volume.data[5 * BLOCK : 8 * BLOCK] == bytes(1024) + data[1024:1536]
        assert run(io, Io.FLUSH, nsid=0xFFFFFFFF).status == SUCCESS and rig.volume.flushes == 1
        assert run(io, Io.WRITE, 0, 0, 1 << 30, data=bytes(512), nsid=1).status == SUCCESS
        assert rig.volume.flushes == 2

    @given(
        start=st.integers(0, (1 << 64) - 1), count=st.integers(1, 1 << 16), opcode=st.sampled_from([1, 2, 8])
    )
    def test_nothing_reaches_beyond_the_volume(self, start: int, count: int, opcode: int) -> None:
        rig = Rig()
        _, io = rig.up()
        size = min(count * BLOCK, 8192)
        extra = {1: {"data": bytes(size)}, 2: {"room": size}, 8: {}}[opcode]
        status = run(io, opcode, start & 0xFFFFFFFF, start >> 32, count - 1, nsid=1, **extra).status  # type: ignore[arg-type]
        inside = start + count <= BLOCKS
        fits = opcode == 8 or size == count * BLOCK
        assert status == (RANGE if not inside else SUCCESS if fits else FIELD)

    def test_ranges_beyond_the_volume_are_refused_before_any_is_given_up(self) -> None:
        rig = Rig()
        _, io = rig.up()
        rig.volume.data[:BLOCK] = b"x" * BLOCK
        ranges = struct.pack("<IIQIIQ", 0, 1, 0, 0, 2, BLOCKS - 1)
        assert run(io, Io.DATASET_MANAGEMENT, 1, 4, data=ranges, nsid=1).status == RANGE
        assert run(io, Io.DATASET_MANAGEMENT, 255, 4, data=ranges, nsid=1).status == FIELD
        assert rig.volume.data[:BLOCK] == b"x" * BLOCK

    def test_a_broken_volume_fails_the_command_alone(self) -> None:
        rig = Rig()
        _, io = rig.up()
        rig.volume.broken = True
        assert run(io, Io.READ, room=512, nsid=1).status == 0x281
        assert run(io, Io.WRITE, data=bytes(512), nsid=1).status == 0x280

    def test_data_is_asked_for_and_comes_in_parts(self) -> None:
        rig = Rig()
        _, io = rig.up()
        data = bytes(range(256)) * 512
        assert len(data) == MAX_TRANSFER
        feed(io, capsule(Io.WRITE, 3, 0, 0, 255, data=data, nsid=1, ask=True))
        ((kind, pdu),) = collect(io)
        assert kind == 9 and struct.unpack_from("<HHII", pdu, 8) == (3, 3, 0, len(data))
        for offset in range(0, len(data), 50_000):
            feed(io, host_data(3, offset, data[offset : offset + 50_000]))
        assert replies(io)[3].status == SUCCESS and rig.volume.data[: len(data)] == data

    def test_data_is_asked_for_little_at_a_time(self) -> None:
        _, io = Rig().up()
        for cid in range(20):
            feed(io, capsule(Io.WRITE, cid, 0, 0, 0, data=bytes(512), nsid=1, ask=True))
        assert [kind for kind, _ in collect(io)] == [9] * 8
        feed(io, host_data(4, 0, bytes(512)))
        assert [kind for kind, _ in collect(io)] == [5, 9]

    @pytest.mark.parametrize(
        "wrong", [host_data(3, 4, b"1234"), host_data(3, 0, bytes(516)), host_data(3, 0, b"1234", tag=9)]
    )
    def test_data_out_of_place_ends_the_connection(self, wrong: bytes) -> None:
        _, io = Rig().up()
        feed(io, capsule(Io.WRITE, 3, 0, 0, 0, data=bytes(512), nsid=1, ask=True))
        with pytest.raises(FabricsViolation):
            feed(io, wrong)

    def test_more_commands_than_the_queue_holds_end_the_connection(self) -> None:
        rig = Rig()
        admin, io = rig.up()
        tag = rig.open(admin).generation
        for cid in range(32):
            feed(io, capsule(Opcode.RECV, cid, 0, 0, tag, room=69632))
        with pytest.raises(FabricsViolation, match="more than 32"):
            feed(io, capsule(Opcode.RECV, 33, 0, 0, tag, room=69632))
        with pytest.raises(FabricsViolation, match="in flight already"):
            feed(io, capsule(Opcode.RECV, 3, 0, 0, tag, room=69632))


def send(queue: object, number: int, packet: bytes, tag: int, size: int | None = None) -> int:
    size = len(packet) if size is None else size
    return run(queue, Opcode.SEND, size, number, tag, data=packet, nsid=1).status  # type: ignore[arg-type]


class TestTunnel:
    def test_terms_are_settled(self) -> None:
        rig = Rig()
        admin, _ = rig.up()
        terms = rig.open(admin, replace(OFFER, mtu=1500, generation=7))
        assert (terms.mtu, terms.generation, terms.name) == (1500, 7, "csd0")
        assert rig.side.links == [(terms, "host")]
        assert rig.open(admin).generation == 8
        assert rig.side.ends == ["the host opens the link anew"]

    def test_another_version_is_told_ours(self) -> None:
        admin, _ = Rig().up()
        record = replace(OFFER, version=2).pack().ljust(4096, b"\0")
        assert run(admin, Opcode.IDENTIFY, data=record)[:2] == (VERSION, 1)
        assert run(admin, Opcode.OPEN, room=4096).status == SEQUENCE

    def test_nonsense_is_refused_and_counted(self) -> None:
        rig = Rig()
        admin, _ = rig.up()
        record = bytearray(OFFER.pack().ljust(4096, b"\0"))
        record[16:20] = bytes(4)
        assert run(admin, Opcode.IDENTIFY, data=bytes(record)).status == FIELD
        assert run(admin, Opcode.IDENTIFY, data=bytes(record[:100])).status == FIELD
        assert len(rig.side.violations) == 1

    @given(order=st.permutations(range(12)))
    def test_sends_that_overtook_each_other_are_put_in_order(self, order: list[int]) -> None:
        rig = Rig()
        admin, io = rig.up()
        tag = rig.open(admin).generation
        packets = [PACKET + bytes([number]) for number in range(12)]
        for number in order:
            assert send(io, number, packets[number], tag) == SUCCESS
        assert rig.side.packets == packets

    @pytest.mark.parametrize("number", [WINDOW, MODULUS - 1])
    def test_a_send_far_from_its_turn_ends_the_link(self, number: int) -> None:
        rig = Rig()
        admin, io = rig.up()
        tag = rig.open(admin).generation
        assert send(io, number, PACKET, tag) == FIELD
        assert len(rig.side.violations) == len(rig.side.ends) == 1
        assert send(io, 0, PACKET, tag) == NOT_OPEN

    @pytest.mark.parametrize(
        ("size", "data"), [(12, PACKET), (0, PACKET), (len(PACKET) + 1, PACKET), (60, b"")]
    )
    def test_a_send_of_a_wrong_size_ends_the_link(self, size: int, data: bytes) -> None:
        rig = Rig()
        admin, io = rig.up()
        assert send(io, 0, data, rig.open(admin).generation, size) == FIELD and not rig.side.packets

    def test_a_send_of_another_generation_is_refused(self) -> None:
        rig = Rig()
        admin, io = rig.up()
        assert send(io, 0, PACKET, 1) == NOT_OPEN
        old = rig.open(admin).generation
        new = rig.open(admin).generation
        assert send(io, 0, PACKET, old) == NOT_OPEN and send(io, 0, PACKET, new) == SUCCESS

    def test_receives_wait_for_packets_and_get_numbers(self) -> None:
        rig = Rig()
        admin, io = rig.up()
        tag = rig.open(admin).generation
        for cid in (4, 9):
            feed(io, capsule(Opcode.RECV, cid, 0, 0, tag, room=69632))
        assert rig.port.can_deliver and not replies(io)
        rig.port.deliver(memoryview(PACKET))
        rig.port.deliver(memoryview(PACKET + b"x"))
        found = replies(io)
        assert found[4] == (SUCCESS, len(PACKET), PACKET)
        assert found[9] == (SUCCESS, len(PACKET) + 1 | 1 << 32, PACKET + b"x")
        assert not rig.port.can_deliver and rig.tally.figures()["82h"] == {"commands": 2, "bytes": 105}

    def test_idle_receives_end_empty(self) -> None:
        rig = Rig()
        admin, io = rig.up()
        tag = rig.open(admin).generation
        feed(io, capsule(Opcode.RECV, 1, 0, 0, tag, 500, room=69632))
        feed(io, capsule(Opcode.RECV, 2, 0, 0, tag, room=69632))
        assert rig.subsystem.next_expiry() == rig.now + 0.5
        rig.now += 0.5
        rig.subsystem.expire()
        assert replies(io) == {1: (SUCCESS, 0, b"")}
        rig.now += IDLE
        rig.subsystem.expire()
        assert replies(io) == {2: (SUCCESS, 0, b"")}

    @pytest.mark.parametrize("mtu", [1500, 65520])
    def test_a_receive_without_room_for_the_largest_packet_is_refused(self, mtu: int) -> None:
        rig = Rig()
        admin, io = rig.up()
        tag = rig.open(admin, replace(OFFER, mtu=mtu)).generation
        assert run(io, Opcode.RECV, 0, 0, tag, room=12 + 65532).status == FIELD
        feed(io, capsule(Opcode.RECV, 9, 0, 0, tag, room=12 + 65536))
        packet = bytes(12 + 65535)
        rig.port.deliver(memoryview(packet))
        assert replies(io)[9] == (SUCCESS, len(packet), packet)

    @pytest.mark.parametrize("end", ["reset", "queue", "open", "abort"])
    def test_waiting_receives_fail_when_their_link_ends(self, end: str) -> None:
        rig = Rig()
        admin, io = rig.up()
        other = rig.connect(2, rig.cntlid)
        feed(io, capsule(Opcode.RECV, 1, 0, 0, rig.open(admin).generation, room=69632))
        if end == "reset":
            run(admin, Admin.FABRICS, 0, CC, 0, nsid=Fabrics.PROPERTY_SET)
        elif end == "queue":
            rig.subsystem.lost(other)
        elif end == "open":
            rig.open(admin)
        else:
            assert run(admin, Admin.ABORT, 1 | 1 << 16).result == 0
            assert run(admin, Admin.ABORT, 1 | 1 << 16).result == 1
        assert replies(io)[1].status == (0x007 if end == "abort" else NOT_OPEN)
        assert not rig.port.can_deliver

    def test_a_lost_queue_takes_its_receives_along(self) -> None:
        rig = Rig()
        admin, io = rig.up()
        feed(io, capsule(Opcode.RECV, 1, 0, 0, rig.open(admin).generation, room=69632))
        rig.subsystem.lost(io)
        assert not rig.port.can_deliver and not replies(io) and rig.side.ends == ["the host disconnected"]
        rig.connect(1, rig.cntlid)


class TestSequence:
    @given(data=st.data(), start=st.integers(0, MODULUS - 1))
    def test_any_order_within_the_window(self, data: st.DataObject, start: int) -> None:
        window = 8
        order = Resequencer(window)
        order._next = start  # to begin anywhere in the circle
        numbers, seen = list(range(40)), []
        while numbers:
            number = data.draw(st.sampled_from([one for one in numbers if one < numbers[0] + window]))
            numbers.remove(number)
            seen += [
                bytes(due) for due in order.accept((start + number) % MODULUS, memoryview(b"%d" % number))
            ]
        assert seen == [b"%d" % number for number in range(40)]

    def test_a_number_twice(self) -> None:
        order = Resequencer(8)
        list(order.accept(3, memoryview(b"x")))
        with pytest.raises(LinkViolation, match="twice"):
            order.accept(3, memoryview(b"x"))
