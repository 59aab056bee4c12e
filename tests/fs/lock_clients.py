# SPDX-License-Identifier: Apache-2.0
"""Clients that lock the files of one server, and requests that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.filelocks.remote import RemoteLocks
from millpond.fs.vfs.inode_api import Locking, Waiting
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, Lock, LockOwner, Mode

from ..waiting import eventually
from . import caching_client
from .caching_client import Client
from .support import SOON, Server

WRITE, READ, UNLOCK = Mode.WRITE, Mode.READ, Mode.UNLOCK
FAMILIES = pytest.mark.parametrize("family", Family)
LOST = pytest.mark.expected_log("a file lock was lost")
BIG = (1 << 64) - 1
"""An owner's number, as kernels have them."""


def lock(mode: Mode, start: int = 0, end: int = OFFSET_MAX, owner: int = BIG) -> Lock:
    return Lock(LockOwner(0, owner), mode, start, end, 77)


class Told:
    """A request that waits."""

    def __init__(self, ticket: int = 5) -> None:
        self.error: int | None = None
        self._event = threading.Event()
        self.waiting = Waiting(ticket, self._tell)

    def _tell(self, error: int) -> None:
        assert not self._event.is_set()
        self.error = error
        self._event.set()

    def answer(self) -> int | None:
        assert self._event.wait(4 * SOON)
        return self.error


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "f").write_bytes(bytes(100))
    return tmp_path


@pytest.fixture
def served(top: Path) -> Iterator[Server]:
    with caching_client.shared(top, LEASE_SECONDS) as made:
        yield made


@pytest.fixture
def one(served: Server) -> Iterator[Client]:
    made = Client(served)
    yield made
    made.close()


@pytest.fixture
def other(served: Server) -> Iterator[Client]:
    made = Client(served)
    yield made
    made.close()


def ask(client: Client, family: Family, wanted: Lock, told: Told | None = None) -> int | None:
    return client.tree.locks.lock(client.find(b"f"), family, wanted, told.waiting if told else None)


def end_grace(locks: Locking) -> None:
    """Have it ask for what is new in an instant, while it lets others ask again for what they had."""
    assert isinstance(locks, RemoteLocks)
    eventually(lambda: locks._grace_end > time.monotonic() + 1, "it lets others ask first")
    locks._grace_end = time.monotonic() + 0.2
