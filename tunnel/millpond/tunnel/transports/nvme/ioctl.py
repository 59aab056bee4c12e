# SPDX-License-Identifier: Apache-2.0
"""Edge: submit commands to a controller by ioctl on its generic character device, ``/dev/ngXnY``.

Linux 5.13 and later. Vendor commands take CAP_SYS_ADMIN. An ioctl that waits for the controller cannot be
interrupted, not even by SIGKILL: a command that may wait must carry a time limit.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from millpond.base.errors import ConnectionLost

MODULUS = 1 << 32
"""Of generations and sequence numbers in vendor commands."""
_CLASS = Path("/sys/class/nvme-generic")
_MODEL = "millpond"
IO_REQUEST = 0xC0504E48
"""NVME_IOCTL_IO64_CMD, the one request that carries packets."""
_IDENTIFIER, _ADMIN64 = 0x4E40, 0xC0504E47
_ADMIN_TIMEOUT_MS = 10_000
_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIIIQ")
"""``struct nvme_passthru_cmd64`` of linux/nvme_ioctl.h, 80 bytes."""
_RESULT = struct.Struct("<72xQ")


class VendorCommand(NamedTuple):
    """A vendor command. The direction of ``data`` follows from the opcode; it should begin at a page."""

    opcode: int
    data: memoryview
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0


class CommandOutcome(NamedTuple):
    """Status type and code as 11 bits; DW0 and DW1 as one number."""

    status: int
    result: int


class NvmeDevice:
    """An open device. Raises ConnectionLost if there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._namespace = fcntl.ioctl(self._descriptor, _IDENTIFIER)
        except OSError as error:
            raise ConnectionLost(f"{path}: {error.strerror}") from None
        self.descriptors = frozenset((self._descriptor,))

    def buffer(self, size: int) -> memoryview:
        """Allocate zeroed memory for data, aligned to a page."""
        return memoryview(mmap.mmap(-1, size))

    def admin(self, command: VendorCommand, namespace: int = 0) -> CommandOutcome:
        """Submit to the admin queue and wait. Raises ConnectionLost."""
        return self._submit(_ADMIN64, namespace, command, _ADMIN_TIMEOUT_MS)

    def io(self, command: VendorCommand) -> CommandOutcome:
        """Submit to an I/O queue of the kernel's choice and wait. Raises ConnectionLost."""
        return self._submit(IO_REQUEST, self._namespace, command, 0)

    def _submit(
        self, request: int, namespace: int, command: VendorCommand, timeout_ms: int
    ) -> CommandOutcome:
        """Submit a command. A timeout of 0 is the driver's own, 30 s, after which it resets
        the controller.
        """
        opcode, data, cdw10, cdw11, cdw12, cdw13 = command
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        head = (opcode, 0, 0, namespace, 0, 0, 0, address, 0, len(data))
        block = bytearray(_COMMAND.pack(*head, cdw10, cdw11, cdw12, cdw13, 0, 0, timeout_ms, 0, 0))
        try:
            status = fcntl.ioctl(self._descriptor, request, block)
        except OSError as error:
            raise ConnectionLost(f"{self.path}: {error.strerror}") from None
        return CommandOutcome(status & 0x7FF, _RESULT.unpack(block)[0])

    def close(self) -> None:
        """Close the device."""
        os.close(self._descriptor)


def find_device() -> Path:
    """Find the first namespace whose controller is a millpond tunnel's. Raises ConnectionLost if there is
    none.
    """
    for entry in sorted(_CLASS.glob("ng*n*")):
        try:
            model = (entry / "device" / "model").read_text()
        except OSError:  # it has just gone
            continue
        if model.startswith(_MODEL):
            return Path("/dev") / entry.name
    raise ConnectionLost("no NVMe controller says that it is millpond's")
