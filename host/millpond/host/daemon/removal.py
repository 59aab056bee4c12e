# SPDX-License-Identifier: Apache-2.0
"""Edge: the removal of a device from the daemon, or from what the next daemon will go on with.

Without a daemon this reads the store itself: the device may be removed on a host whose daemon cannot start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from millpond.base.errors import LocalError, Refused
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet.directory import Fleet
from millpond.host.jobs import queue
from millpond.host.store.store import Store
from millpond.linux.file_lock import locked


@contextlib.contextmanager
def forgotten_by_daemon(fleet: Fleet, device: str) -> Iterator[bool]:
    """Have the daemon forget a device; where none runs, let none start inside the context. Yields whether one
    knew the device. Raises Refused while a job or a launch uses the device.
    """
    try:
        client = DaemonClient(fleet.directory)
    except LocalError:  # none runs, or none answers: then it has the lock
        with locked(fleet.directory / "host.lock", f"the host daemon of {fleet.directory} starts or ends"):
            _check_unused(fleet, device)
            yield False
        return
    with client:
        try:
            client.remove_device(device)
        except Refused as error:
            if error.code != "unknown":
                raise
            yield False
        else:
            yield True


def _check_unused(fleet: Fleet, device: str) -> None:
    """Raise Refused if the next daemon will go on with a job that uses a device."""
    if fleet.database.exists():
        with contextlib.closing(Store(fleet.database)) as store:
            queue.check_unused(device, store.active())
