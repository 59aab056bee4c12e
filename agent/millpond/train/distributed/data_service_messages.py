# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages by which a launched script gets a stream of a device's public data.

The script asks its agent or host daemon where the data service of a device is; the host answers, and has
the device's agent start one for the launch before that.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.distributed.launch_messages import Launch
from millpond.wire.messages import Kind, Message, message

REQUESTS_CHANNEL = "MILLPOND_REQUESTS_CHANNEL"
"""The variable of a launched script's environment that holds the descriptor of the channel for FindData."""
SHORTEST_SECRET = 32
"""Least characters of a data service's secret."""


@message("data_service.start")
@dataclass(frozen=True, slots=True)
class StartDataService(Message):
    """Serve the public part of the volume to those that know the ``secret``, while this control connection is
    open. Answered by DataServiceReady. The service applies the transforms of ``code``, a launch that has
    some: the files, what the digest covers and the signature matter.
    """

    secret: str
    code: Launch | None = None


@message("data_service.ready")
@dataclass(frozen=True, slots=True)
class DataServiceReady(Message):
    """The data service listens at the device's address in the tunnel, which the host knows, and ``port``."""

    port: int


@message("launch.find_data", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class FindData(Message):
    """Ask where the public data of a ``device`` of the launch are served. Answered by DataFound."""

    device: str


@message("launch.data_found")
@dataclass(frozen=True, slots=True)
class DataFound(Message):
    """The data service is at ``address`` and ``port``, for those that know the ``secret``."""

    address: str
    port: int
    secret: str
