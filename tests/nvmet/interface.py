# SPDX-License-Identifier: Apache-2.0
"""Edge: connect the target to its TUN interface: set it up for a link, carry packets, report the status."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from millpond.base.deadline import Deadline
from millpond.tunnel.addresses import Address
from millpond.tunnel.datapath.packet_filter import PacketFilter
from millpond.tunnel.datapath.stats_shm import map_stats
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.errors import InterfaceGone, LinkViolation
from millpond.tunnel.netdev.tun import Tun
from millpond.tunnel.ring.link_params import MAX_MTU, LinkParameters

log = logging.getLogger(__name__)

_INTERFACE_SECONDS = 1.0


class Interface:
    """A ``vendor_commands.LinkSide`` over a TUN interface. Raises LocalError if the interface
    cannot be made.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        own: LinkParameters,
        status: StatusWriter,
        counters: int,
        more_figures: Callable[[], dict[str, Any]],
    ) -> None:
        self._status, self._more_figures = status, more_figures
        self._outward, self._inward = map_stats(counters)
        self._resets = 0
        self._address, self._filter = address, PacketFilter(address, own.vnet_header)
        self._tun = Tun(name, own.vnet_header, Deadline.after(_INTERFACE_SECONDS))
        self._tun.set_offloads(own.offloads)
        self._mtu = own.mtu
        self._tun.configure(address, own.mtu)
        self._room = own.vnet_header + MAX_MTU
        self._buffer = memoryview(bytearray(self._room))
        self.descriptor = self._tun.descriptor

    def opened(self, params: LinkParameters, peer: str) -> None:
        """Set the interface up as negotiated and report the link. Raises InterfaceGone."""
        self._tun.set_offloads(params.offloads)
        self._filter = PacketFilter(self._address, params.vnet_header, offloads=params.offloads)
        if params.mtu != self._mtu:
            self._tun.set_mtu(params.mtu)
            self._mtu = params.mtu
        self._status.up(generation=params.generation, mtu=params.mtu, peer=peer, **self.figures())

    def closed(self, reason: str) -> None:
        """Report that the link is down."""
        self._status.down(reason, **self.figures())

    def violated(self, error: LinkViolation) -> None:
        """Count and log a violation by the host."""
        self._resets += 1
        log.warning("link reset: %s", error)

    def packet(self, packet: bytes | memoryview) -> None:
        """Write a host's packet to the interface, unless the filter drops it."""
        head = bytes(packet[: self._filter.head])
        cause = self._filter.verdict(head, len(packet))
        if cause is None and not self._tun.write(head, memoryview(packet)[len(head) :]):
            cause = "refused"
        if cause is None:
            self._inward.count(len(packet))
        else:
            self._inward.drop(cause)

    def read(self) -> memoryview | None:
        """Return a packet for the host, None if there is none now. It is valid until the next call, unless
        ``keep`` is called.
        """
        try:
            size = os.readv(self.descriptor, [self._buffer])
        except BlockingIOError:
            return None
        except OSError as error:
            raise InterfaceGone(f"interface {self._tun.name}: {error.strerror}") from None
        self._outward.count(size)
        return self._buffer[:size]

    def keep(self) -> None:
        """Keep the latest packet valid: use another buffer for the next."""
        self._buffer = memoryview(bytearray(self._room))

    def figures(self) -> dict[str, Any]:
        """Return the counters since the start."""
        outward, inward = self._outward.read(), self._inward.read()
        return {
            "resets": self._resets,
            "out": {"packets": outward.packets, "bytes": outward.bytes},
            "in": {"packets": inward.packets, "bytes": inward.bytes, "dropped": inward.dropped},
            **self._more_figures(),
        }

    def close(self) -> None:
        """Delete the interface."""
        self._tun.close()
