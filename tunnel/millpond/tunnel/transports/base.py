"""Pure: the one interface under the tunnel: finds peers, opens a link with each, and carries its packets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from millpond.tunnel.datapath.context import DatapathContext, Loop
from millpond.tunnel.ring.link_params import LinkParameters

Wait = Callable[[Sequence[int], float | None], set[int]]
"""Waits until some of the descriptors are readable, at most so many seconds; those that are. It raises when
the end shall stop."""


class Connection(Protocol):
    """One peer while it lives. A context manager that releases what it holds."""

    gone: int
    """A descriptor that is readable once the peer is known to be dead."""
    check_seconds: float | None
    """How often ``check`` is to be called while the link is up; None for never."""
    calls: frozenset[str]
    """System calls of its loops beyond those for packets and bells, as ``linux.seccomp`` names them."""
    privileged: bool
    """Whether its loops need the end's capabilities."""

    def open(self, own: LinkParameters, wait: Wait) -> tuple[LinkParameters, str]:
        """Settle the parameters; these and the peer's name. Raises VersionMismatch, LinkViolation,
        ConnectionLost, DeadlineExceeded, and what ``wait`` raises."""

    def check(self) -> None:
        """Raises ConnectionLost if the peer has died or begun anew."""

    def loops(self, gear: DatapathContext) -> tuple[Loop, Loop]:
        """What carries packets from the interface to the peer, and from the peer to the interface."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Transport(Protocol):
    """Finds peers, one after another."""

    def readiness(self) -> int | None:
        """A descriptor that is readable when a peer knocks; None if ``join`` is to be tried repeatedly."""

    def join(self) -> Connection:
        """Connect to a peer now. Raises RemoteError or OSError if there is none, Refused if it is taken."""

    def turn_away(self) -> None:
        """Tell a peer that knocks that this end already has one."""

    def close(self) -> None:
        """Take no more peers."""

    def __str__(self) -> str:
        """Where the peer is waited for, for the status."""
