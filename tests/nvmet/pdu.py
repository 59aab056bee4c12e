# SPDX-License-Identifier: Apache-2.0
"""Pure: parse and build the PDUs of NVMe/TCP, without digests.

The format is that of the NVM Express TCP transport specification 1.0, section 3.6.

Every PDU begins with eight bytes: type, flags, header length, data offset (a byte each), whole length (four,
little endian). A whole length is checked as soon as these eight bytes are there; the buffer never grows.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from nvmet.errors import FabricsViolation, FatalError

COMMON = struct.Struct("<BBBBI")
DATA = struct.Struct("<BBBBIHHIIxxxx")
"""Common header, CID, transfer tag, offset, length: H2CData, C2HData and R2T are alike."""
RESPONSE = struct.Struct("<BBBBIQHHHH")
"""Common header, result, SQHD, SQID, CID, status << 1."""
_INITIALIZE = struct.Struct("<BBBBIHBBI112x")
_TERMINATE = struct.Struct("<BBBBIHHH10x")

COMMAND_HEADER = 72
DATA_HEADER = 24
ADMIN_CAPSULE_DATA = 8192
"""Bytes of data that any admin command may carry; fixed by the specification."""
IO_CAPSULE_DATA = 17 * 4096
"""Bytes of data in an I/O capsule: a packet of 64 KiB and its header need no R2T."""
MAX_TRANSFER = 128 * 1024
"""Most bytes of data of one command (MDTS = 5) and of one H2CData."""
_LAST = 4
_MAX_TERMINATE = 152
_MAX_PDU = COMMAND_HEADER + MAX_TRANSFER


class PduType(IntEnum):
    """Types of PDUs; odd ones are sent by the controller, as is R2T."""

    INITIALIZE_REQUEST = 0
    INITIALIZE_RESPONSE = 1
    HOST_TERMINATE = 2
    CONTROLLER_TERMINATE = 3
    COMMAND = 4
    RESPONSE = 5
    HOST_DATA = 6
    CONTROLLER_DATA = 7
    READY_TO_TRANSFER = 9


_LENGTHS: dict[int, tuple[int, int]] = {
    PduType.INITIALIZE_REQUEST: (_INITIALIZE.size, _INITIALIZE.size),
    PduType.HOST_TERMINATE: (_TERMINATE.size, _MAX_TERMINATE),
    PduType.COMMAND: (COMMAND_HEADER, COMMAND_HEADER + IO_CAPSULE_DATA),
    PduType.HOST_DATA: (DATA_HEADER, DATA_HEADER + MAX_TRANSFER),
}
"""Per type that a host sends: bytes of its header, and the most of the whole."""


class Pdu(NamedTuple):
    """A whole PDU; both parts are views that are valid until more is received."""

    type: int
    header: memoryview
    data: memoryview


class HostData(NamedTuple):
    """The fields of an H2CData."""

    cid: int
    tag: int
    offset: int
    length: int


class PduReader:
    """Splits a host's bytes into PDUs. The caller fills ``space``, reports the number to ``filled``, then
    takes PDUs by ``next``.
    """

    def __init__(self) -> None:
        self.capsule_data = ADMIN_CAPSULE_DATA
        self._buffer = memoryview(bytearray(2 * _MAX_PDU))
        self._start = self._end = 0

    def space(self) -> memoryview:
        """Return the buffer to receive into; never empty once ``next`` has returned None. Earlier PDUs become
        invalid.
        """
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _MAX_PDU:
            rest = self._buffer[self._start : self._end]
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._buffer[self._end :]

    def filled(self, count: int) -> None:
        """Accept ``count`` bytes that were received into ``space``."""
        self._end += count

    def next(self) -> Pdu | None:
        """Return the next PDU, None until it is complete. Raises FabricsViolation as soon as its head is
        wrong.
        """
        have = self._end - self._start
        if have < COMMON.size:
            return None
        kind, flags, header, offset, length = COMMON.unpack_from(self._buffer, self._start)
        self._check(kind, flags, header, length)
        if have < length:
            return None
        whole = self._buffer[self._start : self._start + length]
        self._start += length
        return Pdu(kind, whole[:header], whole[_data_offset(header, offset, length) :])

    def _check(self, kind: int, flags: int, header: int, length: int) -> None:
        expected, longest = _LENGTHS.get(kind, (-1, -1))
        if kind == PduType.COMMAND:
            longest = COMMAND_HEADER + self.capsule_data
        if expected < 0:
            raise FabricsViolation(FatalError.HEADER_FIELD, f"a host sends no PDU of type {kind:#x}")
        if header != expected:
            raise FabricsViolation(
                FatalError.HEADER_FIELD, f"PDU type {kind} with a header of {header} bytes"
            )
        if not header <= length <= longest:
            raise FabricsViolation(FatalError.LIMIT_EXCEEDED, f"PDU type {kind} of {length} bytes")
        if flags & 3:
            raise FabricsViolation(FatalError.HEADER_FIELD, "a digest, though none was agreed on")


def _data_offset(header: int, offset: int, length: int) -> int:
    """Return the offset of the data; ``length`` if there is none."""
    if length == header:
        return length
    if offset < header or offset % 4 or offset > length:
        raise FabricsViolation(FatalError.HEADER_FIELD, f"data at offset {offset} of a PDU of {length} bytes")
    return offset


def initialize_request(pdu: Pdu) -> None:
    """Check an ICReq. Raises FabricsViolation for a version or data alignment that is not offered."""
    *_, version, alignment, _digests, _ready = _INITIALIZE.unpack(pdu.header)
    if version:
        raise FabricsViolation(FatalError.UNSUPPORTED, f"PDU format version {version}")
    if alignment:
        raise FabricsViolation(FatalError.UNSUPPORTED, f"data alignment of {4 * (alignment + 1)} bytes")


def initialize_response() -> bytes:
    """Build ICResp: version 0, no padding, no digests, H2CData of up to 128 KiB."""
    size = _INITIALIZE.size
    return _INITIALIZE.pack(PduType.INITIALIZE_RESPONSE, 0, size, 0, size, 0, 0, 0, MAX_TRANSFER)


def host_data(pdu: Pdu) -> HostData:
    """Parse an H2CData. Raises FabricsViolation if its data has another length than it declares."""
    *_, cid, tag, offset, length = DATA.unpack(pdu.header)
    if length != len(pdu.data):
        raise FabricsViolation(FatalError.HEADER_FIELD, f"H2CData of {length} bytes has {len(pdu.data)}")
    return HostData(cid, tag, offset, length)


def ready_to_transfer(cid: int, tag: int, length: int) -> bytes:
    """Build R2T for the whole data of a command."""
    return DATA.pack(PduType.READY_TO_TRANSFER, 0, DATA_HEADER, 0, DATA_HEADER, cid, tag, 0, length)


def data_header(cid: int, length: int) -> bytes:
    """Build the header of the only C2HData of a command; its data follows."""
    whole = DATA_HEADER + length
    return DATA.pack(PduType.CONTROLLER_DATA, _LAST, DATA_HEADER, DATA_HEADER, whole, cid, 0, 0, length)


def response(cid: int, status: int, result: int, sq_head: int, sq_id: int) -> bytes:
    """Build CapsuleResp, the completion of a command."""
    size = RESPONSE.size
    return RESPONSE.pack(PduType.RESPONSE, 0, size, 0, size, result, sq_head, sq_id, cid, status << 1)


def terminate(fatal: FatalError) -> bytes:
    """Build C2HTermReq: the connection ends, with its reason."""
    size = _TERMINATE.size
    return _TERMINATE.pack(PduType.CONTROLLER_TERMINATE, 0, size, 0, size, fatal, 0, 0)
