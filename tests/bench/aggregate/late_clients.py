# SPDX-License-Identifier: Apache-2.0
"""Entry: simulated devices of which the first answers late: ``python -m ... VALUES SECONDS FD...``."""

from __future__ import annotations

import socket
import sys
import threading
import time

from bench.train.simulated_devices import Agents
from millpond.train.protocol import Work
from millpond.wire.channel import Channel
from millpond.wire.messages import Message


class LateAgents(Agents):
    """Devices that answer work after some seconds."""

    def __init__(self, values: int, seconds: float) -> None:
        super().__init__(values)
        self._seconds = seconds

    def _answer(self, message: Message, channel: Channel) -> None:
        if isinstance(message, Work):
            time.sleep(self._seconds)
        super()._answer(message, channel)


def main() -> None:
    """Serve all."""
    values, seconds = int(sys.argv[1]), float(sys.argv[2])
    for number, descriptor in enumerate(map(int, sys.argv[3:])):
        agents = Agents(values) if number else LateAgents(values, seconds)
        channel = Channel(socket.socket(fileno=descriptor), "the server")
        threading.Thread(target=agents.serve, args=(channel,)).start()


if __name__ == "__main__":
    main()
