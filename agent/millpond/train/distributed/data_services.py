# SPDX-License-Identifier: Apache-2.0
"""Edge (a socket): where a launched script finds the data services of its launch's devices."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, Refused
from millpond.train.distributed.data_service_messages import REQUESTS_CHANNEL, DataFound, FindData
from millpond.train.distributed.group_messages import GROUP_CHANNEL
from millpond.wire.channel import Channel

_START_SECONDS = 120.0
"""The device may have to start its service first."""
_asking = threading.Lock()


def find_data_service(device: str) -> DataFound:
    """Return where the public data of a ``device`` of this launch are served. Raises LocalError outside of a
    launch, in a private one, and for a device whose data cannot be streamed; RemoteError.
    """
    if GROUP_CHANNEL in os.environ:
        raise LocalError(f"{device}: a script of a private launch has no network, and so no streams")
    if REQUESTS_CHANNEL not in os.environ:
        raise LocalError(f"{device}: a device's name is known in a script of 'millpond launch' alone")
    try:
        with _asking, _alone():
            return _channel().call(FindData(device), DataFound, Deadline.after(_START_SECONDS))
    except Refused as error:
        raise LocalError(error.text) from None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep the script's other processes from asking meanwhile: all have one channel."""
    with Path(tempfile.gettempdir(), "millpond-requests").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _channel() -> Channel:
    """Return this process's channel to the launch. Raises LocalError."""
    try:
        return Channel(socket.socket(fileno=int(os.environ[REQUESTS_CHANNEL])), "the launch")
    except (ValueError, OSError):
        text = "the script's own process and its forks alone can find a device's data"
        raise LocalError(text) from None
