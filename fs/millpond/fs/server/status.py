# SPDX-License-Identifier: Apache-2.0
"""Edge: reports the status of a volume's server."""

from __future__ import annotations

import contextlib

from millpond.fs.proto.status import ClientIs, StatusIs
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs


def status(sessions: SessionTable, *, count: bool) -> StatusIs:
    """Return the status of the server that has these sessions; with ``count`` the files are counted."""
    tree, delegations = sessions.tree, sessions.delegations
    quota, used, files = tree.quota, None, None
    if quota.limit is not None:
        if count:
            quota.count()
        used, files = quota.used, quota.files
    elif count:
        used, files = _counted(tree)
    clients = []
    for client in sessions.clients():
        heard, kept = delegations.lease_of(client.holder)
        clients.append(
            ClientIs(client.holder, heard, kept, client.handlers.open_files, not client.disconnected)
        )
    device, written = delegations.device
    return StatusIs(
        quota.limit,
        used,
        files,
        delegations.lease,
        tuple(clients),
        device,
        written,
        sessions.sandbox,
    )


def _counted(tree: BackingFs) -> tuple[int | None, int | None]:
    with contextlib.suppress(OSError):  # there is no public part, or directories are moved all the time
        return tree.usage()
    return None, None
