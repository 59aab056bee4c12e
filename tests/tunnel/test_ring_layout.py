# SPDX-License-Identifier: Apache-2.0
"""The NVMe structures and the layout match the specification, and nonsense is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.errors import VersionMismatch
from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring import layout as at
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.layout import ADMIN, RECV, SEND, Layout, layout_of
from millpond.tunnel.ring.link_params import CSUM, TSO4, LinkParameters, check_negotiated, parse
from millpond.tunnel.ring.region import Region


def test_opcodes_tell_the_direction() -> None:
    assert [op & 3 for op in (nvme_defs.Opcode.SEND, nvme_defs.Opcode.IDENTIFY)] == [1, 1]
    assert [op & 3 for op in (nvme_defs.Opcode.RECV, nvme_defs.Opcode.OPEN)] == [2, 2]


def test_doorbells_are_where_the_stride_puts_them() -> None:
    assert [nvme_defs.doorbell_offset(index, 0) for index in range(4)] == [0, 4, 8, 12]
    assert nvme_defs.doorbell_offset(3, 4) == 3 * 64


def test_a_prepared_region_reads_as_nvme_registers() -> None:
    layout = Layout(32)
    memory = memoryview(bytearray(layout.size))
    region = Region.create(memory, layout)
    region.registers.enable(layout)
    region.registers.set_ready()
    cap, version = struct.unpack_from("<QI", memory, 0)
    assert cap & 0xFFFF == 31 and cap >> 32 & 15 == at.STRIDE and cap >> 52 & 15 == at.PAGE_SHIFT
    assert version == 0x10400
    cc, _, csts = struct.unpack_from("<III", memory, 0x14)
    assert cc & 1 and cc >> 16 & 15 == 6 and cc >> 20 & 15 == 4 and csts == 1
    aqa, asq, acq = struct.unpack_from("<IQQ", memory, 0x24)
    assert aqa == 3 << 16 | 3 and (asq, acq) == (at.PAGE, 2 * at.PAGE)


@given(st.integers(2, 1024))
def test_nothing_in_the_region_overlaps_and_no_buffer_crosses_a_page(entries: int) -> None:
    layout = Layout(entries)
    spans = [
        f(queue) for queue in (ADMIN, SEND, RECV) for f in (layout.submission_ring, layout.completion_ring)
    ]
    spans += [layout.buffers(queue) for queue in (ADMIN, SEND, RECV)]
    spans.sort(key=lambda span: span.start)
    assert spans[0].start >= at.PAGE and spans[-1].end == layout.size
    assert all(before.end <= after.start for before, after in pairwise(spans))
    assert all(span.start % at.PAGE == 0 for span in spans)
    assert layout.buffers(SEND).size >= 65535 + 12 and layout.buffers(SEND).size == 4096 << at.MDTS
    assert layout_of(layout.capabilities.pack(), layout.size) == layout


def test_a_region_of_something_else_is_refused() -> None:
    with pytest.raises(LinkViolation, match="not a millpond tunnel"):
        Region.attach(memoryview(bytearray(Layout(2).size)))


def test_later_fields_are_ignored_and_shorter_records_read_as_zeros() -> None:
    data = LinkParameters(name="x").pack()
    longer = data[:2] + struct.pack("<H", len(data) + 8) + data[4:] + b"\xff" * 8
    assert parse(longer, "host", 1).name == "x"
    shorter = data[:2] + struct.pack("<H", 24) + data[4:]
    assert parse(shorter, "host", 1).name == ""


def test_another_version_is_named() -> None:
    with pytest.raises(VersionMismatch, match="speaks protocol 2, this side 1"):
        parse(replace(LinkParameters(), version=2).pack(), "host", 1)


@pytest.mark.parametrize(
    "change", [{"mtu": 9001}, {"depth": 17}, {"generation": 6}, {"offloads": CSUM | TSO4}]
)
def test_terms_beyond_the_offer_are_refused(change: dict[str, int]) -> None:
    offer = LinkParameters(generation=7, mtu=9000, depth=16, offloads=CSUM)
    with pytest.raises(LinkViolation):
        check_negotiated(replace(offer, **change), offer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"mtu": 100}, {"mtu": 70000}, {"depth": 1}, {"offloads": TSO4}, {"name": "é" * 40}]
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        LinkParameters(**wrong)  # type: ignore[arg-type]
