# SPDX-License-Identifier: Apache-2.0
"""Pure: define the interface of transports: find peers, open a link with each, carry its packets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from millpond.tunnel.datapath.context import DatapathContext, Loop, PumpNeeds
from millpond.tunnel.ring.link_params import LinkParameters

Wait = Callable[[Sequence[int], float | None], set[int]]
"""Waits until some of the descriptors are readable, at most so many seconds (None: for ever), and returns
these. Raises EndpointStopped when the endpoint shall stop.
"""


class Connection(Protocol):
    """A connection with one peer. A context manager that releases what it holds."""

    gone: int
    """A descriptor that is readable once the peer is known to be dead."""
    check_seconds: float | None
    """Seconds between calls of ``check`` while the link is up; None for no calls."""

    @property
    def needs(self) -> PumpNeeds:
        """The needs of its pumps, once it is open. An endpoint is gone for its peer only when its pumps are
        gone too, so they keep the descriptors by whose end the peer knows that.
        """

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Open the link; returns the negotiated parameters and the peer's name. Raises VersionMismatch,
        LinkViolation, ConnectionLost, DeadlineExceeded, and errors of ``wait``.
        """

    def check(self) -> None:
        """Check that the peer lives and this link is its latest. Raises ConnectionLost."""

    def loops(self, datapath: DatapathContext) -> tuple[Loop, Loop]:
        """Return the loops from the interface to the peer, and from the peer to the interface."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Transport(Protocol):
    """Finds peers, one after another."""

    def readiness(self) -> int | None:
        """Return a descriptor that is readable when a peer connects; None if ``join`` is to be retried."""

    def join(self) -> Connection:
        """Connect to a peer now. Raises RemoteError or OSError if there is none, Refused if the peer has
        another.
        """

    def reject(self) -> None:
        """Reject a waiting connection attempt: an endpoint serves one peer."""

    def close(self) -> None:
        """Accept no more peers."""

    def __str__(self) -> str:
        """Describe the peer that is waited for, for the status."""
