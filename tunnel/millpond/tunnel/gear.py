"""Pure: what a datapath loop works with: the packet interface, the link, a queue pair and its notifier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from millpond.tunnel.filter import AddressFilter
from millpond.tunnel.parameters import Parameters
from millpond.tunnel.region import QueueMemory

if TYPE_CHECKING:
    from millpond.tunnel.bells import Bell
    from millpond.tunnel.counters import Counters

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
class Gear:
    """What pumps work with besides the link; ``outward`` counts from the interface, ``inward`` to it."""

    terms: Parameters
    interface: PacketInterface
    filter: AddressFilter
    outward: Counters
    inward: Counters
    engine: str = "python"


@dataclass(frozen=True, slots=True)
class Station:
    """One queue pair as a pump of the host or the device sees it: the eventfd ``wake`` rings for it, ``bell``
    rings at the peer.
    """

    host: bool
    memory: QueueMemory
    wake: int
    bell: Bell
    gear: Gear
    counters: Counters
