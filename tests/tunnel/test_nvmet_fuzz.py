# SPDX-License-Identifier: Apache-2.0
"""Mutated and random streams: the target answers or ends the connection; it never fails, hangs or grows."""

from __future__ import annotations

import random
import struct
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.tunnel.ring.nvme_defs import Opcode
from nvmet import pdu
from nvmet.commands import ENTRY, Admin, Fabrics, Io
from nvmet.errors import FabricsViolation
from nvmet.pdu import MAX_TRANSFER, PduReader
from nvmet.queue import MAX_BACKLOG, Queue

from ..effort import scaled
from .nvme_initiator import ICREQ, capsule, connect_data
from .nvme_rig import OFFER, Rig, collect, feed

MOST_UNSENT = MAX_BACKLOG + MAX_TRANSFER + 100
OPCODES = [*Admin, *Io, *Opcode]


def conversation(tag: int) -> list[bytes]:
    """PDUs that are right, of every kind that a host sends on an I/O queue."""
    packet = bytes(12) + b"\x45" + bytes(51)
    return [
        capsule(Io.WRITE, 1, 0, 0, 7, data=bytes(4096), nsid=1),
        capsule(Io.READ, 2, 0, 0, 7, room=4096, nsid=1),
        capsule(Io.WRITE, 3, 0, 0, 255, data=bytes(MAX_TRANSFER), nsid=1, ask=True),
        struct.pack("<BBBBIHHIIxxxx", 6, 4, 24, 24, 24 + 1000, 3, 3, 0, 1000) + bytes(1000),
        capsule(Opcode.SEND, 4, len(packet), 0, tag, data=packet, nsid=1),
        capsule(Opcode.RECV, 5, 0, 0, tag, 50, room=69632, nsid=1),
        capsule(Io.DATASET_MANAGEMENT, 6, 0, 4, data=struct.pack("<IIQ", 0, 8, 0), nsid=1),
        capsule(Io.WRITE_ZEROES, 7, 8, 0, 7, nsid=1),
        capsule(Opcode.SEND, 8, len(packet), 1, tag, data=packet, nsid=1),
    ]


def check_bounds(queue: Queue) -> None:
    assert queue.backlog <= MOST_UNSENT
    held = sum(len(transfer.data) for transfer in queue._transfers.values())
    assert held <= 8 * MAX_TRANSFER


def feed_in_pieces(queue: Queue, data: bytes, chance: random.Random) -> None:
    """Until the connection is ended."""
    with suppress(FabricsViolation):
        while data:
            size = chance.choice([1, 7, 8, 71, 4096, 1 << 20])
            feed(queue, data[:size])
            data = data[size:]
            check_bounds(queue)
            collect(queue)


def mutate(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = (
            chance.randrange(min(len(found), 80)) if chance.random() < 0.8 else chance.randrange(len(found))
        )
        change = chance.random()
        if change < 0.5:
            found[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif change < 0.7:
            found[place : place + 4] = struct.pack("<I", chance.choice([0, 8, 24, 1 << 17, (1 << 32) - 1]))
        elif change < 0.8:
            del found[place : place + chance.randint(1, 8)]
        else:
            found[place:place] = chance.randbytes(chance.randint(1, 8))
        if not found:
            break
    return bytes(found)


@settings(max_examples=scaled(100, 300))
@given(seed=st.integers(0, 1 << 64))
def test_mutated_conversations_on_an_io_queue(seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig()
    admin, io = rig.up()
    stream = conversation(rig.open(admin).generation)
    chance.shuffle(stream)
    for number in range(len(stream)):
        if chance.random() < 0.4:
            stream[number] = mutate(stream[number], chance)
    feed_in_pieces(io, b"".join(stream), chance)
    while rig.port.can_deliver:
        rig.port.deliver(memoryview(bytes(60)))
    rig.now += 60
    rig.subsystem.expire()
    rig.subsystem.lost(io)
    rig.subsystem.lost(admin)
    again, _ = rig.up()
    assert rig.open(again)


@settings(max_examples=scaled(70, 200))
@given(seed=st.integers(0, 1 << 64))
def test_mutated_conversations_from_the_first_byte(seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig()
    queue = rig.subsystem.new_queue()
    stream = [
        ICREQ,
        capsule(Admin.FABRICS, 1, 0, 31, 5000, data=connect_data(0xFFFF), nsid=Fabrics.CONNECT),
        capsule(Admin.FABRICS, 2, 0, 0x14, 1, nsid=Fabrics.PROPERTY_SET),
        capsule(Admin.IDENTIFY, 3, 1, room=4096),
        capsule(Opcode.IDENTIFY, 4, data=OFFER.pack().ljust(4096, b"\0")),
        capsule(Opcode.OPEN, 5, room=4096),
        capsule(Admin.GET_LOG_PAGE, 6, 2 | 127 << 16, room=512),
        capsule(Admin.ABORT, 7, 1),
    ]
    number = chance.randrange(len(stream))
    stream[number] = mutate(stream[number], chance)
    feed_in_pieces(queue, b"".join(stream), chance)
    rig.subsystem.lost(queue)
    rig.up()


@settings(max_examples=scaled(100, 300))
@given(
    entries=st.lists(
        st.tuples(
            st.sampled_from(OPCODES),
            st.sampled_from([0, 1, 2, 0xFFFFFFFF]),
            st.sampled_from([0x01, 0x5A, 0x00]),
            st.integers(0, 200_000),
            st.lists(st.sampled_from([0, 1, 7, 31, 1 << 16, (1 << 32) - 1]), min_size=6, max_size=6),
        ),
        max_size=30,
    ),
    to_admin=st.booleans(),
)
def test_well_formed_commands_with_any_fields(
    entries: list[tuple[int, int, int, int, list[int]]], to_admin: bool
) -> None:
    rig = Rig()
    admin, io = rig.up()
    rig.open(admin)
    queue = admin if to_admin else io
    with suppress(FabricsViolation):
        for cid, (opcode, nsid, sgl, length, words) in enumerate(entries):
            entry = ENTRY.pack(opcode, 0x40, cid, nsid, 0, 0, 0, length, sgl, *words)
            feed(queue, struct.pack("<BBBBI", 4, 0, 72, 0, 72) + entry)
            check_bounds(queue)
            collect(queue)


@given(data=st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    feed_in_pieces(Rig().subsystem.new_queue(), data, random.Random(0))


@given(kind=st.integers(0, 255), header=st.integers(0, 255), length=st.integers(0, (1 << 32) - 1))
def test_a_length_is_judged_by_the_first_eight_bytes(kind: int, header: int, length: int) -> None:
    reader = PduReader()
    reader.space()[:8] = struct.pack("<BBBBI", kind, 0, header, 0, length)
    reader.filled(8)
    lengths = {0: (128, 128), 2: (24, 152), 4: (72, 72 + 8192), 6: (24, 24 + MAX_TRANSFER)}.get(kind)
    right = lengths is not None and header == lengths[0] and header <= length <= lengths[1]
    try:
        assert reader.next() is None and right
    except FabricsViolation:
        assert not right


@given(cut=st.lists(st.integers(1, 300), min_size=1, max_size=50))
def test_pdus_come_out_whole_however_they_are_cut(cut: list[int]) -> None:
    capsules = [capsule(Io.WRITE, cid, data=bytes([cid]) * (4 * cid), nsid=1) for cid in range(1, 60)]
    stream, found, reader = b"".join(capsules), [], PduReader()
    sizes = iter(cut * len(stream))
    while stream:
        piece, stream = stream[: (size := next(sizes))], stream[size:]
        reader.space()[: len(piece)] = piece
        reader.filled(len(piece))
        while (one := reader.next()) is not None:
            found.append(bytes(one.header) + bytes(one.data))
    assert found == capsules


def test_reads_stop_being_taken_while_their_answers_are_unsent() -> None:
    rig = Rig()
    _, io = rig.up()
    feed(io, b"".join(capsule(Io.READ, cid, 0, 0, 255, room=MAX_TRANSFER, nsid=1) for cid in range(31)))
    assert MAX_BACKLOG <= io.backlog <= MOST_UNSENT
    answered = 0
    while io.outgoing:
        answered += sum(kind == 5 for kind, _ in collect(io))
        io.process()
    assert answered == 31


def test_a_data_offset_inside_the_header_is_refused() -> None:
    for offset, right in ((0, False), (71, False), (73, False), (72, True), (76, True), (84, False)):
        reader = PduReader()
        reader.space()[:80] = struct.pack("<BBBBI", 4, 0, 72, offset, 80) + bytes(72)
        reader.filled(80)
        try:
            found = reader.next()
            assert right and found is not None and len(found.data) == 80 - offset
        except FabricsViolation:
            assert not right


def test_digests_and_alignments_are_not_agreed_to() -> None:
    rig = Rig()
    queue = rig.subsystem.new_queue()
    asks_for_digests = bytearray(ICREQ)
    asks_for_digests[11] = 3
    feed(queue, bytes(asks_for_digests))
    ((kind, answer),) = collect(queue)
    assert kind == pdu.PduType.INITIALIZE_RESPONSE and answer[11] == 0
    for place in (8, 10):
        wrong = bytearray(ICREQ)
        wrong[place] = 1
        with suppress(FabricsViolation):
            feed(rig.subsystem.new_queue(), bytes(wrong))
            raise AssertionError("taken")
