# SPDX-License-Identifier: Apache-2.0
"""Entry: the confined process that streams public data sets, a fork of the zygote: no private part, and no
network but the connections of a listening socket that the agent has made.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from millpond.agent.gate import CanaryError, Gate, GateOutlet, LedgerCounters, Pattern
from millpond.data.streaming.server import DataServer, ServiceSettings
from millpond.wire.channel import Buffer
from millpond.wire.messages import Kind

log = logging.getLogger(__name__)


class _LoggedOutlet(GateOutlet):
    """An outlet whose finds are in the device's log: the consumer is told of them, the agent is not."""

    def passing(self, kind: Kind, data: Buffer, payload: bool) -> None:
        try:
            super().passing(kind, data, payload)
        except CanaryError as error:
            log.error("connection cut: %s", error)
            raise


def main(arguments: Sequence[str]) -> int:
    """Serve until the agent kills this process. The arguments are the descriptors of the listening socket and
    of the counters of the ledger, and the settings as JSON.
    """
    listener, tally, text = arguments
    logging.basicConfig(level=logging.INFO, format="data service: %(message)s")
    settings = json.loads(text)
    sought = [Pattern(name, bytes.fromhex(data), stops) for name, data, stops in settings["patterns"]]
    gate = Gate(sought, LedgerCounters(int(tally)))

    def outlet(connection: socket.socket) -> GateOutlet | None:
        """Return a new outlet; None for a process of the device itself: what it reads leaves nothing."""
        here, there = connection.getsockname()[0], connection.getpeername()[0]
        return None if here == there else _LoggedOutlet(gate)

    sock = socket.socket(fileno=int(listener))
    with DataServer(sock, ServiceSettings(Path(settings["root"]), settings["secret"]), outlet):
        while True:
            signal.pause()
