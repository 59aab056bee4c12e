"""Pure: what a datapath loop works with: the packet interface, the link, a queue pair and its notifier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from millpond.tunnel.datapath.address_filter import AddressFilter
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import QueueMemory

if TYPE_CHECKING:
    from millpond.tunnel.datapath.notifier import Notifier
    from millpond.tunnel.datapath.stats_shm import SharedStats

Loop = Callable[[], NoReturn]
"""Carries packets in one direction, in a process of its own, until it is killed or raises LinkViolation,
ConnectionLost or InterfaceGone."""


class PacketInterface(Protocol):
    """Where packets come from and go to, each with its vnet header; reads wait. ``tun.Tun`` is one."""

    name: str
    descriptor: int

    def read_into(self, buffer: memoryview) -> int:
        """Wait for a packet and read it; its bytes. Raises InterfaceGone."""

    def write(self, head: bytes, rest: memoryview) -> bool:
        """Give the kernel a packet in two parts; False if it refuses it. Raises InterfaceGone."""

    def check_gone(self, error: OSError) -> None:
        """Raises InterfaceGone if that is what the error of a read or write means."""

    def errors(self) -> AbstractContextManager[None]:
        """Maps errors within to InterfaceGone where they mean that."""


@dataclass(frozen=True, slots=True)
class DatapathContext:
    """What pumps work with besides the link; ``outward`` counts from the interface, ``inward`` to it."""

    terms: LinkParameters
    interface: PacketInterface
    filter: AddressFilter
    outward: SharedStats
    inward: SharedStats
    engine: str = "python"


@dataclass(frozen=True, slots=True)
class QueueContext:
    """One queue pair as a pump of the host or the device sees it: the eventfd ``wake`` rings for it, ``bell``
    rings at the peer.
    """

    host: bool
    memory: QueueMemory
    wake: int
    bell: Notifier
    gear: DatapathContext
    counters: SharedStats
