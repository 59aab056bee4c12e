# SPDX-License-Identifier: Apache-2.0
"""Entry: the confined process that streams public data sets, a fork of the zygote: no private part, and no
network but the connections of a listening socket that the agent has made.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from millpond.agent.data_service.transformer import LONGEST_REASON
from millpond.agent.gate import CanaryError, Gate, GateOutlet, LedgerCounters, Pattern
from millpond.data.streaming.server import NO_TRANSFORMS, DataServer, ServiceSettings
from millpond.data.streaming.transforms.remote import RemoteTransforms, Restart
from millpond.linux.sockets import receive_with_descriptors
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
    """Serve until the agent kills this process. The arguments are the descriptors of the listening socket, of
    the counters of the ledger, of those for the audit log and, if there are transforms, of the socket where
    their process is asked for; and the settings as JSON.
    """
    listener, tally, account, *transformer, text = arguments
    torch.set_num_threads(1)  # chunks are read by several threads
    logging.basicConfig(level=logging.INFO, format="data service: %(message)s")
    settings = json.loads(text)
    sought = [Pattern(name, bytes.fromhex(data), stops) for name, data, stops in settings["patterns"]]
    gate = Gate(sought, LedgerCounters(int(tally)), LedgerCounters(int(account)))

    def outlet(connection: socket.socket) -> GateOutlet | None:
        """Return a new outlet; None for a process of the device itself: what it reads leaves nothing."""
        here, there = connection.getsockname()[0], connection.getpeername()[0]
        return None if here == there else _LoggedOutlet(gate)

    transforms = RemoteTransforms(restart_at(int(transformer[0]))) if transformer else NO_TRANSFORMS
    served = ServiceSettings(Path(settings["root"]), settings["secret"], transforms=transforms)
    with DataServer(socket.socket(fileno=int(listener)), served, outlet):
        while True:
            signal.pause()


def restart_at(descriptor: int) -> Restart:
    """Return what has the agent replace a process of the transforms, see TransformerProcesses."""
    sock, lock = socket.socket(fileno=descriptor), threading.Lock()

    def restart(number: int) -> tuple[str, socket.socket | None]:
        answer = bytearray(1 + LONGEST_REASON)
        try:
            with lock:
                sock.send(bytes([number]))
                size, found = receive_with_descriptors(sock, answer, 1)
        except OSError as error:
            return f"the agent does not answer: {error.strerror}", None
        return answer[1:size].decode(errors="replace"), socket.socket(fileno=found[0]) if found else None

    return restart
