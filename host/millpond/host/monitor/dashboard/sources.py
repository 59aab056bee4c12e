# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): what the pages of a device and of a job show beside the feed's snapshots."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Generic, TypeVar

from millpond.base.errors import MillpondError, ProtocolError
from millpond.fs.client.metrics import MountStats
from millpond.fs.mount.stats_socket import read_stats
from millpond.host.api.daemon import TunnelInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.train.job.spec import Job
from millpond.wire.audit_log import ChainReader, Entry
from millpond.wire.control_messages import Ledger, LogPosition
from millpond.wire.texts import cleaned

T = TypeVar("T")
ASK_SECONDS: Final = 1.0
LEDGER_SECONDS: Final = 5.0
LOG_LINES: Final = 200
MOST_ENTRIES: Final = 2000
"""Entries of a device's audit log that are read, the last ones."""
MOST_AUDIT_BYTES: Final = 1 << 23
"""Bytes of the lines that are kept as entries; those of an honest log are a tenth of that."""
MOST_KEPT: Final = 64
"""Devices whose details, and jobs whose definitions, are kept."""


@dataclass(frozen=True, slots=True)
class DeviceDetail:
    """A device's tunnel, its ledger, the ``mounts`` of its volume on this host, the last ``lines`` of its
    log, and the last ``entries`` of its audit log, which are not verified. ``fault`` is the reason why some
    of that is old, or missing.
    """

    tunnel: TunnelInfo | None = None
    lines: tuple[str, ...] = ()
    ledger: Ledger | None = None
    mounts: tuple[MountStats, ...] = ()
    entries: tuple[Entry, ...] = ()
    fault: str = ""


class DeviceSource:
    """The details of one device, asked for when somebody looks, at most once a second. Thread-safe."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._lock = threading.Lock()
        self._detail = DeviceDetail()
        self._position: LogPosition | None = None
        self._chain = ChainReader(None)
        self._size = 0  # the bytes of the lines of the chain so far
        self._asked = self._counted = -LEDGER_SECONDS

    def detail(self) -> DeviceDetail:
        """Return the details, which are at most a second old, the ledger and the audit log a few seconds."""
        with self._lock:
            if time.monotonic() - self._asked >= ASK_SECONDS:
                try:
                    with DaemonClient(self._directory) as client:
                        self._ask(client)
                except (MillpondError, OSError) as error:
                    self._detail = replace(self._detail, fault=str(error))
                self._asked = time.monotonic()
            return self._detail

    def _ask(self, client: DaemonClient) -> None:
        log = client.new_log(self._name, LOG_LINES, self._position)
        self._position = log.position or self._position
        lines = (*self._detail.lines, *log.lines)[-LOG_LINES:]
        tunnel = client.tunnel(self._name)
        self._detail = replace(self._detail, tunnel=tunnel, lines=lines, fault=log.gone)
        if not log.gone and time.monotonic() - self._counted >= LEDGER_SECONDS:
            self._counted = time.monotonic()
            ledger = client.ledgers(self._name).get(self._name)
            mounts = tuple(read_stats(client.fleet.mount_stats, self._name))
            self._detail = replace(self._detail, ledger=ledger, mounts=mounts)
            new = self._new_entries(client)
            self._detail = replace(self._detail, entries=(*self._detail.entries, *new)[-MOST_ENTRIES:])

    def _new_entries(self, client: DaemonClient) -> list[Entry]:
        """Return the entries of the audit log behind those that are known, at most MOST_ENTRIES. A log that
        is another one than before is read anew.
        """
        head, found = client.audit_head(self._name), list[Entry]()
        known = self._chain.head.number if self._chain.head else 0
        first = max(known + 1, head.oldest, head.number - MOST_ENTRIES + 1)
        if first > known + 1 or known > head.number:
            self._forget()
        while first + len(found) <= head.number:
            lines = client.audit_entries(self._name, first + len(found))
            self._size += sum(map(len, lines))
            if not lines or self._size > MOST_AUDIT_BYTES:
                break
            try:
                found += [cleaned(self._chain.take(line)) for line in lines]
            except ProtocolError:
                self._forget()
                raise
        if self._size > MOST_AUDIT_BYTES:  # what follows is read next, never the same again
            self._detail, self._size = replace(self._detail, entries=()), 0
            found.clear()
        return found

    def _forget(self) -> None:
        self._chain = ChainReader(None)
        self._detail, self._size = replace(self._detail, entries=()), 0


@dataclass(frozen=True, slots=True)
class Definition:
    """A job as it was submitted, and the digest of its code."""

    job: Job
    code: str


class Kept(Generic[T]):
    """Values by key, of which the MOST_KEPT that were used last are kept. Thread-safe."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self._make, self._found, self._lock = make, OrderedDict[str, T](), threading.Lock()

    def get(self, key: str) -> T:
        """Return the value of a key, made if it is not kept."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        made = self._make(key)
        with self._lock:
            made = self._found.setdefault(key, made)
            while len(self._found) > MOST_KEPT:
                self._found.popitem(last=False)
            return made


class Sources:
    """The devices and the definitions of jobs of the fleet in a ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._devices = Kept(lambda name: DeviceSource(directory, name))
        self._definitions = Kept(self._ask_definition)

    def device(self, name: str) -> DeviceDetail:
        """Return the details of a device."""
        return self._devices.get(name).detail()

    def definition(self, job: int) -> Definition:
        """Return the definition of a job, which stays what it was. Raises Refused for an unknown job."""
        return self._definitions.get(str(job))

    def _ask_definition(self, job: str) -> Definition:
        with DaemonClient(self.directory) as client:
            found = client.job(int(job), rounds=False)
        return Definition(found.job, found.code)
