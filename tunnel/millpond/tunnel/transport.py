"""Pure: the one interface under the tunnel: shared memory, bells, and a way to know that the peer is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from millpond.tunnel.region import Region


@dataclass(frozen=True, slots=True)
class Bells:
    """Non-blocking eventfds, one per queue pair and direction: for the controller, and for the host."""

    to_controller: tuple[int, ...]
    to_host: tuple[int, ...]


class Connection:
    """One peer while it lives: its region, the bells, and ``gone``, a descriptor readable once it died."""

    def __init__(self, region: Region, bells: Bells, gone: int, release: Callable[[], None]) -> None:
        self.region, self.bells, self.gone = region, bells, gone
        self._release = release

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()


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
