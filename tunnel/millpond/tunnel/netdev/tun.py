# SPDX-License-Identifier: Apache-2.0
"""Edge: make and use a TUN interface for packets of up to 64 KiB; it is deleted with its descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.tunnel.addresses import Address, Network
from millpond.tunnel.errors import InterfaceGone
from millpond.tunnel.netdev import configure

CLONE_DEVICE = Path("/dev/net/tun")

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_IFF_TUN_EXCL = 0x8000
_GONE = (errno.EBADFD, errno.EFAULT)


class Tun:
    """A TUN interface of this network namespace. Raises LocalError if it cannot be made."""

    def __init__(self, name: str, vnet_header: int, deadline: Deadline) -> None:
        self.name = name
        try:
            self.descriptor = os.open(CLONE_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise LocalError(f"{CLONE_DEVICE}: {error.strerror}: the tunnel needs the TUN driver") from None
        try:
            _attach(self.descriptor, name, deadline)
            fcntl.ioctl(self.descriptor, _TUNSETVNETHDRSZ, struct.pack("i", vnet_header))
        except BaseException:
            os.close(self.descriptor)
            raise
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def set_offloads(self, offloads: int) -> None:
        """Accept partial checksums and super-packets from the kernel (TUN_F_* bits). Raises LocalError."""
        try:
            fcntl.ioctl(self.descriptor, _TUNSETOFFLOAD, offloads)
        except OSError as error:
            self.check_gone(error)
            raise LocalError(
                f"interface {self.name} takes no offloads {offloads}: {error.strerror}"
            ) from None

    def configure(
        self, address: Address, mtu: int, peers: Network | None = None, *, routed: bool = False
    ) -> None:
        """Set address and MTU and bring the interface up. With ``peers``, packets that come in by it are not
        forwarded by default, and if ``routed`` it is the route to the peers. Raises LocalError.
        """
        configure.configure(self.name, address, mtu, peers, routed=routed)

    def set_mtu(self, mtu: int) -> None:
        """Change the MTU, bytes. Raises InterfaceGone."""
        configure.set_mtu(self.name, mtu)

    def set_blocking(self) -> None:
        """Let reads block; for this interface in all processes that share it."""
        os.set_blocking(self.descriptor, True)

    def read_into(self, buffer: memoryview) -> int:
        """Wait for a packet and read it; returns its size in bytes. Raises InterfaceGone."""
        while True:
            try:
                return os.readv(self.descriptor, [buffer])
            except BlockingIOError:
                self._poll.poll()
            except OSError as error:
                self.check_gone(error)
                raise

    def write(self, head: bytes, rest: memoryview) -> bool:
        """Give the kernel a packet in two parts; False if the kernel refuses it. Raises InterfaceGone."""
        try:
            os.writev(self.descriptor, (head, rest))
        except OSError as error:
            self.check_gone(error)
            return False
        return True

    def check_gone(self, error: OSError) -> None:
        """Raise InterfaceGone if the error of a read or write means that."""
        if error.errno in _GONE:
            raise InterfaceGone(f"interface {self.name} was deleted") from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Map errors of the block to InterfaceGone where they mean that."""
        try:
            yield
        except OSError as error:
            self.check_gone(error)
            raise

    def close(self) -> None:
        """Delete the interface."""
        os.close(self.descriptor)


def _attach(descriptor: int, name: str, deadline: Deadline) -> None:
    """Make the interface. Wait while one of that name exists, as that of a killed endpoint
    does for some ms.
    """
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR | _IFF_TUN_EXCL
    request = struct.pack("16sH22x", name.encode(), flags)
    while True:
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, request)
            return
        except OSError as error:
            if error.errno == errno.EBUSY and not deadline.passed:
                time.sleep(0.01)
                continue
            why = "another program has one of this name" if error.errno == errno.EBUSY else error.strerror
            raise LocalError(f"interface {name} cannot be made: {why}") from None
