# SPDX-License-Identifier: Apache-2.0
"""Edge: reports the status of a volume's server."""

from __future__ import annotations

import contextlib
from pathlib import Path

from millpond.fs.proto.status import ClientIs, StatusIs
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.quota_fs import QuotaFs, Usage
from millpond.fs.store.usage import public_usage


def status(sessions: SessionTable, *, count: bool) -> StatusIs:
    """Return the status of the server that has these sessions; with ``count`` the files are counted."""
    tree, delegations = sessions.tree, sessions.delegations
    quota, wrong = None, None
    usage: Usage | None = None
    if isinstance(tree, QuotaFs):
        if count:
            with contextlib.suppress(OSError):  # directories are moved all the time
                wrong = (tree.recount() or (None,))[0]
        quota, usage = tree.quota.limit, (tree.quota.used, tree.quota.files)
    elif count:
        usage = _counted(tree)
    used, files = usage or (None, None)
    clients = []
    for client in sessions.clients():
        heard, kept = delegations.lease_of(client.holder)
        clients.append(
            ClientIs(client.holder, heard, kept, client.handlers.open_files, not client.disconnected)
        )
    device, written = delegations.device
    return StatusIs(
        quota, used, files, wrong, delegations.lease, tuple(clients), device, written, sessions.sandbox
    )


def _counted(tree: BackingFs) -> Usage | None:
    with contextlib.suppress(OSError):  # there is no public part, or directories are moved all the time
        return public_usage(Path(tree.top))
    return None
