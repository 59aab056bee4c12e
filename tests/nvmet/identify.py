# SPDX-License-Identifier: Apache-2.0
"""Pure: build the 4 KiB data structures of Identify, and the log pages (NVMe base specification 1.4)."""

from __future__ import annotations

import hashlib
import struct
import uuid
from dataclasses import dataclass

from millpond.tunnel.ring.nvme_defs import VERSION_1_4
from nvmet.pdu import IO_CAPSULE_DATA

MODEL = "millpond computational storage"
NAMESPACE = 1
SIZE = 4096
MDTS = 5
ASYNC_EVENTS = 4
_ENTRY = 64
_IO_CONTROLLER = 1
_KEEP_ALIVE_GRANULARITY = 1  # of 100 ms
_WRITE_ZEROES, _DATASET_MANAGEMENT = 8, 4
_SGL_SUPPORTED = 1
_ROOM_CELSIUS = 300  # kelvin


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Identity of the target; all that must outlast a restart follows from ``nqn``."""

    nqn: str
    blocks: int
    block_size: int
    max_entries: int

    @property
    def namespace_uuid(self) -> uuid.UUID:
        """UUID of the namespace, derived from the NQN, so that a host finds its namespace again."""
        return uuid.uuid5(uuid.NAMESPACE_OID, self.nqn + " namespace 1")

    @property
    def serial(self) -> str:
        """Serial number, 20 characters derived from the NQN."""
        return hashlib.sha256(self.nqn.encode()).hexdigest()[:20]


def default_nqn(name: str) -> str:
    """Return the NQN of the device called ``name``, in the form that needs no domain."""
    return f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, 'millpond ' + name)}"


def controller(identity: TargetIdentity, cntlid: int) -> bytes:
    """Build Identify Controller, CNS 01h."""
    data = bytearray(SIZE)
    _text(data, 4, 20, identity.serial)
    _text(data, 24, 40, MODEL)
    _text(data, 64, 8, "1")
    struct.pack_into("<BHI", data, 77, MDTS, cntlid, VERSION_1_4)
    data[111] = _IO_CONTROLLER
    data[258] = data[259] = ASYNC_EVENTS - 1  # ACL, AERL
    struct.pack_into("<HH", data, 266, 350, 360)  # WCTEMP, CCTEMP
    struct.pack_into("<H", data, 320, _KEEP_ALIVE_GRANULARITY)
    data[512], data[513] = 0x66, 0x44  # entries of 64 and 16 bytes
    struct.pack_into("<HI", data, 514, identity.max_entries, NAMESPACE)  # MAXCMD, NN
    struct.pack_into("<H", data, 520, _WRITE_ZEROES | _DATASET_MANAGEMENT)
    data[525] = 1  # a volatile write cache: flush is honoured
    struct.pack_into("<I", data, 536, _SGL_SUPPORTED)
    data[768 : 768 + len(identity.nqn)] = identity.nqn.encode()
    struct.pack_into("<II", data, 1792, (_ENTRY + IO_CAPSULE_DATA) // 16, 1)  # IOCCSZ, IORCSZ
    data[1803] = 1  # MSDBD
    return bytes(data)


def _text(data: bytearray, offset: int, size: int, text: str) -> None:
    data[offset : offset + size] = text.encode().ljust(size)[:size]


def namespace(identity: TargetIdentity) -> bytes:
    """Build Identify Namespace, CNS 00h."""
    data = bytearray(SIZE)
    struct.pack_into("<QQQ", data, 0, identity.blocks, identity.blocks, identity.blocks)
    data[33] = 1  # DLFEAT: deallocated blocks read as zeros
    data[104:120] = identity.namespace_uuid.bytes  # NGUID
    data[130] = identity.block_size.bit_length() - 1  # LBADS of format 0
    return bytes(data)


def active_list(after: int) -> bytes:
    """Build the list of active namespaces beyond ``after``, CNS 02h."""
    return struct.pack("<I", NAMESPACE if after < NAMESPACE else 0).ljust(SIZE, b"\0")


def descriptors(identity: TargetIdentity) -> bytes:
    """Build the namespace identification descriptors, NGUID and UUID, CNS 03h."""
    number = identity.namespace_uuid.bytes
    return (bytes((2, 16, 0, 0)) + number + bytes((3, 16, 0, 0)) + number).ljust(SIZE, b"\0")


def log_page(page: int) -> bytes | None:
    """Build a whole log page; None for a page that is not supported."""
    if page == 0x01:  # errors: none
        return bytes(_ENTRY)
    if page == 0x02:
        return _health()
    if page == 0x03:  # firmware slot 1 runs revision 1
        return (bytes((1,)) + bytes(7) + b"1".ljust(8)).ljust(512, b"\0")
    return None


def _health() -> bytes:
    """Build the health log page: all is well, for a target has no flash of its own to report on."""
    return struct.pack("<BHBB", 0, _ROOM_CELSIUS, 100, 10).ljust(512, b"\0")
