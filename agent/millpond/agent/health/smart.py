# SPDX-License-Identifier: Apache-2.0
"""Pure: the SMART log of an NVMe drive (NVM Express Base Specification 2.0, figure 207), as bytes."""

from __future__ import annotations

from millpond.wire.control_messages import DriveHealth

SIZE = 512
"""Bytes of the log."""
GET_LOG_PAGE = 0x02
"""The opcode of the administrator's command that reads a log."""
SELECTOR = (SIZE // 4 - 1) << 16 | 0x02
"""Dword 10 of the command: the number of dwords less 1, and the log's identifier."""
WHOLE_DRIVE = 0xFFFFFFFF
"""The namespace of a log that is about the controller."""
_WARNINGS = (
    "its spare blocks run out",
    "its temperature is out of bounds",
    "it is no longer reliable",
    "it can only be read",
    "its backup of volatile memory has failed",
    "its persistent memory can only be read",
)
"""What bits 0 to 5 of the critical warning say."""


def parsed(log: bytes) -> DriveHealth:
    """Return what a log of at least 6 bytes says: bits of warning in byte 0, percentage used in byte 5. A
    drive that was used beyond its life tells up to 255.
    """
    warned = [text for bit, text in enumerate(_WARNINGS) if log[0] >> bit & 1]
    return DriveHealth("nvme", log[5] / 100, "; ".join(warned))
