# SPDX-License-Identifier: Apache-2.0
"""Pure: the context of a datapath loop: the packet interface, the link, a queue pair and its notifier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from millpond.tunnel.datapath.packet_filter import PacketFilter
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import QueueMemory

if TYPE_CHECKING:
    from millpond.tunnel.datapath.notifier import Notifier
    from millpond.tunnel.datapath.stats_shm import SharedStats

Loop = Callable[[], NoReturn]
"""Carries packets in one direction, in a process of its own, until it is killed or raises LinkViolation,
ConnectionLost or InterfaceGone.
"""


class PacketInterface(Protocol):
    """A source and sink of packets, each with its vnet header; reads block. ``tun.Tun`` is one."""

    name: str
    descriptor: int

    def read_into(self, buffer: memoryview) -> int:
        """Wait for a packet and read it; returns its size in bytes. Raises InterfaceGone."""

    def write(self, head: bytes, rest: memoryview) -> bool:
        """Give the kernel a packet in two parts; False if the kernel refuses it. Raises InterfaceGone."""

    def check_gone(self, error: OSError) -> None:
        """Raise InterfaceGone if the error of a read or write means that."""

    def errors(self) -> AbstractContextManager[None]:
        """Map errors of the block to InterfaceGone where they mean that."""


@dataclass(frozen=True, slots=True)
class PumpNeeds:
    """The needs of a connection's pumps beyond their interface: ``descriptors`` that stay open, system
    ``calls`` beyond those for packets and notifications, as ``seccomp`` names them, ``requests`` of ioctl(2),
    and CAP_* ``capabilities``.
    """

    descriptors: frozenset[int] = frozenset()
    calls: frozenset[str] = frozenset()
    requests: frozenset[int] = frozenset()
    capabilities: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DatapathContext:
    """A link as its pumps see it, apart from its memory: the negotiated ``params``, the interface and its
    filter, counters from the interface (``outward``) and to it (``inward``), and the engine.
    """

    params: LinkParameters
    interface: PacketInterface
    filter: PacketFilter
    outward: SharedStats
    inward: SharedStats
    engine: str = "python"


@dataclass(frozen=True, slots=True)
class QueueContext:
    """One queue pair as a pump sees it, on the host's side (``host``) or the device's: its memory, the
    eventfd ``wake`` that the peer signals, and the ``notifier`` that wakes the peer.
    """

    host: bool
    memory: QueueMemory
    wake: int
    notifier: Notifier
    datapath: DatapathContext
    stats: SharedStats
