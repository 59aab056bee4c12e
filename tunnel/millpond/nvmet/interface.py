"""Edge: the target's TUN interface: what a link does to it, the packets of both directions, the status."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from millpond.base.deadline import Deadline
from millpond.tunnel.addresses import Address
from millpond.tunnel.datapath.address_filter import AddressFilter
from millpond.tunnel.datapath.stats_shm import map_stats
from millpond.tunnel.endpoint.status import StatusWriter
from millpond.tunnel.errors import InterfaceGone, LinkViolation
from millpond.tunnel.netdev.tun import Tun
from millpond.tunnel.ring.link_params import MAX_MTU, LinkParameters

log = logging.getLogger(__name__)

_INTERFACE_SECONDS = 1.0


class Interface:
    """A ``port.LinkSide``. Raises LocalError if the interface cannot be made."""

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
        self._filter = AddressFilter(address, own.vnet_header)
        self._tun = Tun(name, own.vnet_header, Deadline.after(_INTERFACE_SECONDS))
        self._tun.set_offloads(own.offloads)
        self._mtu = own.mtu
        self._tun.configure(address, own.mtu)
        self._room = own.vnet_header + MAX_MTU
        self._buffer = memoryview(bytearray(self._room))
        self.descriptor = self._tun.descriptor

    def opened(self, terms: LinkParameters, peer: str) -> None:
        """Set the interface up as agreed and say so. Raises InterfaceGone."""
        self._tun.set_offloads(terms.offloads)
        if terms.mtu != self._mtu:
            self._tun.set_mtu(terms.mtu)
            self._mtu = terms.mtu
        self._status.up(generation=terms.generation, mtu=terms.mtu, peer=peer, **self.figures())

    def closed(self, reason: str) -> None:
        """Say that the link is down."""
        self._status.down(reason, **self.figures())

    def violated(self, error: LinkViolation) -> None:
        """Count and log it."""
        self._resets += 1
        log.warning("link reset: %s", error)

    def packet(self, packet: bytes | memoryview) -> None:
        """Give the interface a packet of the host, unless it is not from the host to us."""
        head = bytes(packet[: self._filter.head])
        cause = self._filter.verdict(head)
        if cause is None and not self._tun.write(head, memoryview(packet)[len(head) :]):
            cause = "refused"
        if cause is None:
            self._inward.count(len(packet))
        else:
            self._inward.drop(cause)

    def read(self) -> memoryview | None:
        """A packet for the host, None if there is none now. It holds until the next call, unless ``keep``."""
        try:
            size = os.readv(self.descriptor, [self._buffer])
        except BlockingIOError:
            return None
        except OSError as error:
            raise InterfaceGone(f"interface {self._tun.name}: {error.strerror}") from None
        self._outward.count(size)
        return self._buffer[:size]

    def keep(self) -> None:
        """Leave the latest packet alone."""
        self._buffer = memoryview(bytearray(self._room))

    def figures(self) -> dict[str, Any]:
        """What has been counted since the start."""
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
