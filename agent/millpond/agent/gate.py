# SPDX-License-Identifier: Apache-2.0
"""Edge (shared memory, files): the gate through which all bytes to the host leave the device.

Every process of the agent that holds a socket towards the host sends through a gate. It counts each byte by
kind and searches it, before any encryption, for canaries. Counts live in memory shared with the agent's main
process, which reports their sum: the privacy ledger.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.agent.config import Privacy
from millpond.base.errors import ConfigError, LocalError
from millpond.wire.channel import Buffer, Channel
from millpond.wire.messages import Kind

log = logging.getLogger(__name__)

KINDS = tuple(Kind)
SHORTEST = 8


class CanaryError(LocalError):
    """A canary, bytes that must not leave the device, was about to leave."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Bytes to look for; ``forbidden`` ones are stopped, others only counted."""

    name: str
    data: bytes
    forbidden: bool


def patterns(privacy: Privacy) -> tuple[Pattern, ...]:
    """Return the configured canaries and tracers, in a fixed order that all processes share."""
    forbidden = [Pattern(name, _bytes(name, text), True) for name, text in sorted(privacy.canaries.items())]
    counted = [Pattern(name, _bytes(name, text), False) for name, text in sorted(privacy.tracers.items())]
    return (*forbidden, *counted)


def _bytes(name: str, text: str) -> bytes:
    """Return the bytes of a text: itself, or the hexadecimal after ``hex:``. Raises ConfigError."""
    try:
        data = bytes.fromhex(text.removeprefix("hex:")) if text.startswith("hex:") else text.encode()
    except ValueError:
        raise ConfigError(f"privacy: {name}: '{text:.20}' is not hexadecimal") from None
    if len(data) < SHORTEST:
        raise ConfigError(f"privacy: {name}: {len(data)} bytes are too few; chance alone would find them")
    return data


class LedgerCounters:
    """Counters in memory that processes share: bytes by kind, then sightings by pattern."""

    def __init__(self, descriptor: int, *, shared: bool = True) -> None:
        self.descriptor, self._shared = descriptor, shared
        self._map = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self._counters = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()

    @classmethod
    def in_memory(cls, *, shared: bool = True) -> LedgerCounters:
        """Make counters that end with the processes that hold them; those that are not ``shared`` are for
        this process alone.
        """
        descriptor = os.memfd_create("ledger")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        made = cls(descriptor, shared=shared)
        weakref.finalize(made, os.close, descriptor)
        return made

    def add(self, index: int, count: int) -> None:
        """Add ``count`` to a counter. Several processes of a kind have the same ones: the kernel's lock is
        between them, and ends with one that is killed; the other is between threads.
        """
        start, size = self._counters.itemsize * index, self._counters.itemsize
        with self._lock:
            if not self._shared:
                self._counters[index] += count
                return
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, size, start)
            self._counters[index] += count
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, size, start)

    def __getitem__(self, index: int) -> int:
        return self._counters[index]


class Gate:
    """Counts and searches the bytes that leave through its outlets, one for each connection. Bytes are also
    counted in ``account``, which tells the audit log for which job they are.
    """

    def __init__(
        self, patterns: Sequence[Pattern], tally: LedgerCounters, account: LedgerCounters | None = None
    ) -> None:
        if len(KINDS) + len(patterns) > mmap.PAGESIZE // 8:
            raise LocalError(f"{len(patterns)} canaries and tracers are too many")
        self.patterns, self.tally, self._account = tuple(patterns), tally, account

    def charging(self, account: LedgerCounters) -> Gate:
        """Return the same gate for what is counted in another account."""
        return Gate(self.patterns, self.tally, account)

    def outlet(self) -> GateOutlet:
        """Make the outlet of a new connection."""
        return GateOutlet(self)

    def count(self, kind: Kind, size: int) -> None:
        """Count bytes that leave without a search: those sent again were searched the first time."""
        self.tally.add(KINDS.index(kind), size)
        if self._account is not None:
            self._account.add(KINDS.index(kind), size)


class GateOutlet:
    """The sending side of one connection. Finds patterns also across two sends, and across the payloads of
    two messages, as a pattern in a file that is read in parts lies.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tail = b""  # the last bytes of all that was sent
        self._payload_tail = b""  # the last bytes of payloads alone
        self._examined_tail = b""  # the last bytes of what leaves in another form
        self._keep = max((len(pattern.data) for pattern in gate.patterns), default=1) - 1

    def charge(self, account: LedgerCounters) -> None:
        """Count in another account what leaves from now on: the connection has turned out to be a job's."""
        self._gate = self._gate.charging(account)

    @property
    def searches(self) -> bool:
        """Return whether data is searched and not only counted, see ``wire.channel.Outlet``."""
        return bool(self._gate.patterns)

    def passing(self, kind: Kind, data: Buffer, payload: bool) -> None:
        """Count and search ``data``. Raises CanaryError before a forbidden pattern is whole on the wire."""
        gate = self._gate
        if gate.patterns:
            content = bytes(data)
            self._search(self._tail, content)
            if payload and self._payload_tail != self._tail:
                self._search(self._payload_tail, content, across_only=True)
            self._tail = self._end_of(self._tail, content)
            if payload:
                self._payload_tail = self._end_of(self._payload_tail, content)
        gate.count(kind, len(data))

    def examine(self, data: Buffer) -> None:
        """Search ``data`` that is going to leave in another form, which is then searched and counted as it
        passes. Raises CanaryError.
        """
        content = bytes(data)
        self._search(self._examined_tail, content)
        self._examined_tail = self._end_of(self._examined_tail, content)

    def _end_of(self, tail: bytes, content: bytes) -> bytes:
        return (tail + content[-self._keep :])[-self._keep :] if self._keep else b""

    def _search(self, tail: bytes, content: bytes, *, across_only: bool = False) -> None:
        """Look for patterns that end in ``content``; if ``across_only``, for those that begin in ``tail``."""
        for index, pattern in enumerate(self._gate.patterns, len(KINDS)):
            reach = len(pattern.data) - 1
            across = tail[max(0, len(tail) - reach) :] + content[:reach]
            found = across.count(pattern.data) + (0 if across_only else content.count(pattern.data))
            if found:
                self._gate.tally.add(index, found)
                if pattern.forbidden:
                    raise CanaryError(f"canary '{pattern.name}' was about to leave the device")


def charge(connection: Channel, account: LedgerCounters) -> None:
    """Count in ``account`` what leaves by a connection from now on."""
    if isinstance(connection.outlet, GateOutlet):
        connection.outlet.charge(account)


def ledger(gate: Gate, others: Sequence[LedgerCounters]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes sent by kind and the sightings by pattern, over all processes."""
    tallies = (gate.tally, *others)
    sent = {str(kind): sum(tally[i] for tally in tallies) for i, kind in enumerate(KINDS)}
    seen = {
        pattern.name: sum(tally[i] for tally in tallies)
        for i, pattern in enumerate(gate.patterns, len(KINDS))
    }
    return sent, seen


def totals(tallies: Sequence[LedgerCounters]) -> list[int]:
    """Return the bytes of all kinds together, for each of ``tallies``."""
    return [sum(tally[i] for i in range(len(KINDS))) for tally in tallies]


def open_ledger(folder: Path, process: str, patterns: Sequence[Pattern]) -> LedgerCounters:
    """Open the counters of ``process`` in a file, which goes on counting when the agent starts again.

    Other patterns, or kinds, begin a new file: its counters would mean something else.
    """
    import hashlib  # only here: the volume's server counts at a gate, and does without it

    digest = hashlib.sha256(repr((*KINDS, *patterns)).encode()).hexdigest()[:16]
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / f"{process}-{digest}", flags, 0o600)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)  # a hole would end the agent when the flash is full
    except OSError as error:
        log.warning("the ledger cannot be kept, and begins anew: %s", error.strerror)
        return LedgerCounters.in_memory()
    return LedgerCounters(descriptor)
