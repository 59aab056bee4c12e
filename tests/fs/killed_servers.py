# SPDX-License-Identifier: Apache-2.0
"""A server that is killed rather than stopped, and clients that come back to the next one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.coherence.lease_file import PersistentLeases, open_leases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.server.sessions import SessionTable

from .caching_client import Client, brisk
from .support import Cutting, Server, errno_of
from .test_2_write_behind_losses import cutting

LEASE = 5.0


class Killed(Server):
    """A server that is killed rather than stopped: the leases that it granted outlive it."""

    def __init__(self, top: Path) -> None:
        (top / "public").mkdir()
        super().__init__(top, public=b"public", lease=LEASE)
        self._file = open_leases(top / "leases")
        self._mapped: list[PersistentLeases] = []
        self.forget()

    def restart(self) -> None:
        self.sessions.delegations._leases = None  # it is given no time to end any
        super().restart()

    def forget(self) -> None:
        self.sessions.close()
        self.sessions = SessionTable(
            self.tree, DelegationManager(LEASE, leases=self._leases()), storage=self.storage
        )

    def _leases(self) -> PersistentLeases:
        self._mapped.append(PersistentLeases(self._file, LEASE))
        return self._mapped[-1]

    def end_leases(self) -> None:
        """As if the time of all were over."""
        leases = self._leases()
        for name in list(leases._former):
            leases.end(name)

    def end(self) -> None:
        """For good."""
        self.drop()
        self.sessions.close()
        for leases in self._mapped:
            leases._map.close()
        os.close(self._file)
        os.close(self.root)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Killed]:
    with brisk(LEASE):
        made = Killed(tmp_path)
        yield made
        Cutting.cut_after = Cutting.cut_after_that = Cutting.lose = None
        Cutting.then = staticmethod(lambda: None)
        made.end()


def unreachable(client: Client) -> None:
    """Nothing is sent any more, or something would while the server ends."""
    client.server.refusing = True
    for lane in client.tree.rpc._all:
        lane.disconnect()


def down(client: Client, *, expired: bool = False) -> Killed:
    """Its server is killed, and another one started that the client cannot reach yet. Its lease of the one
    before may be over by then.
    """
    server = client.server
    assert isinstance(server, Killed)
    unreachable(client)
    server.sessions.delegations._leases = None
    server.drop()
    if expired:
        server.end_leases()
    server.forget()
    return server


def back(client: Client) -> None:
    client.server.refusing = False
    client.await_lease()


def cut_at(client: Client, request: str, *, done: bool) -> None:
    """The next such request is the last thing that its server hears, which has ``done`` it or not."""

    def refuse() -> None:
        client.server.refusing = True

    cutting(client)
    Cutting.then = staticmethod(refuse)
    Cutting.cut_after, Cutting.lose = (request, None) if done else (None, request)


def was_cut() -> bool:
    return Cutting.cut_after is Cutting.lose is None


def flush_in_doubt(client: Client, *, done: bool, expired: bool) -> None:
    """The names are sent, and then the server is killed, after or before it has ``done`` it."""
    cut_at(client, "fs.tell", done=done)
    assert errno_of(client.tree.async_create.flush) == errno.EIO and was_cut()
    down(client, expired=expired)
