# SPDX-License-Identifier: Apache-2.0
"""Pure: errors of an initiator, and their codes in NVMe/TCP when the connection is terminated."""

from __future__ import annotations

from enum import IntEnum

from millpond.tunnel.errors import LinkViolation


class FatalError(IntEnum):
    """Fatal error status (FES) of a termination request, NVMe/TCP transport specification 1.0, 3.6.2.3."""

    HEADER_FIELD = 1
    SEQUENCE = 2
    OUT_OF_RANGE = 4
    LIMIT_EXCEEDED = 5
    UNSUPPORTED = 6


class FabricsViolation(LinkViolation):
    """The initiator broke the transport's protocol: its connection is terminated with ``fatal``."""

    def __init__(self, fatal: FatalError, reason: str) -> None:
        super().__init__(reason)
        self.fatal = fatal
