# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): run a link over an ivshmem device: pairing first, then rings as over any shared memory,
with a heartbeat.
"""

from __future__ import annotations

import abc
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from millpond.base.errors import ConnectionLost
from millpond.tunnel.datapath.context import DatapathContext, Loop, PumpNeeds
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.region import Region
from millpond.tunnel.transports.base import Wait
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.pairing import (
    NUMBERS,
    DeviceSession,
    HostSession,
    Mailbox,
    Pulse,
    Word,
)
from millpond.tunnel.transports.ring_connection import RingConnection

T = TypeVar("T")

HEARTBEAT_SECONDS = 0.1
LOST_SECONDS = 1.0
"""Seconds of an unchanged heartbeat after which a peer is taken for dead."""
_POLL_SHARE, _FIRST_POLL_SECONDS = 1 / 16, 0.001


def draw() -> int:
    """Draw a random session number."""
    return 1 + secrets.randbelow(NUMBERS - 1)


class IvshmemConnection(abc.ABC):
    """A link of an endpoint of ``role``. ``open`` finds the peer, which may change until then."""

    check_seconds: float | None = HEARTBEAT_SECONDS

    def __init__(self, role: str, device: IvshmemDevice) -> None:
        self._role, self.device = role, device
        self.mailbox = Mailbox(device.memory, role)
        self._peer, self._pulse = 0, Pulse(0, 0)
        self.gone = os.eventfd(0, os.EFD_CLOEXEC)  # never readable: ``check`` detects the end

    @property
    @abc.abstractmethod
    def session(self) -> HostSession | DeviceSession:
        """The session of this link; its word is the one that this endpoint writes."""

    @abc.abstractmethod
    def pair(self, wait: Wait) -> tuple[Region, int]:
        """Wait for a peer without a time limit; returns the region to share and the peer's ID."""

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Wait for the peer's endpoint without a time limit; then open the link with it, within 2 s."""
        region, self._peer = self.pair(wait)
        notifiers = self.device.notifiers(self._peer)
        if notifiers is None:
            raise ConnectionLost("the peer left the doorbell server")
        self._ring = RingConnection(self._role, region, self.device.wakes, notifiers, self.gone, _nothing)

        def watchful(descriptors: Sequence[int], seconds: float | None) -> set[int]:
            ready = wait(descriptors, seconds)
            self._verify()
            return ready

        params, name = self._ring.open(own, watchful)
        self._pulse = Pulse(self.mailbox.peer_heartbeat, time.monotonic())
        return params, name

    def await_peer(self, found: Callable[[], T | None], wait: Wait) -> T:
        """Poll ``found`` until it returns a result, ever less often: each ms at first and after events, later
        10 times a second. Notifications are not used here, for the reason given in ``RingConnection``.

        Raises ConnectionLost after a second on a device that is lost: another may have replaced it.
        """
        began = time.monotonic()
        while (result := found()) is None:
            waited = time.monotonic() - began
            if self.device.lost and waited > LOST_SECONDS:
                raise ConnectionLost("the doorbell server is gone, and no peer answers")
            if wait(
                self.device.events, min(max(_POLL_SHARE * waited, _FIRST_POLL_SECONDS), HEARTBEAT_SECONDS)
            ):
                began = time.monotonic()
            self.device.refresh()
        return result

    def check(self) -> None:
        """Send a heartbeat and check the peer's. Raises ConnectionLost."""
        self.mailbox.send_heartbeat()
        self._verify()
        if self._pulse.unchanged_for(self.mailbox.peer_heartbeat, time.monotonic()) > LOST_SECONDS:
            raise ConnectionLost(f"no sign of life from the peer for {LOST_SECONDS:g} s")

    def _verify(self) -> None:
        self.device.refresh()
        if not self.device.lost and self.device.notifiers(self._peer) is None:
            raise ConnectionLost("the peer left the doorbell server")
        if not self.session.intact:
            raise ConnectionLost("the peer ended the link, or began anew")

    @property
    def needs(self) -> PumpNeeds:
        """The needs of the rings, and the connection with the doorbell server, whose end tells the peer."""
        needs = self._ring.needs
        return replace(needs, descriptors=needs.descriptors | {*self.device.events})

    def loops(self, datapath: DatapathContext) -> tuple[Loop, Loop]:
        """Return the loops of the configured engine, one per queue pair."""
        return self._ring.loops(datapath)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session, which the peer detects; the device stays open."""
        self.mailbox.write(Word())
        os.close(self.gone)


def _nothing() -> None:
    """Do nothing: the transport releases the device."""
