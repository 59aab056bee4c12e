# SPDX-License-Identifier: Apache-2.0
"""Entry: agents without devices, a thread for each connection: ``python -m bench.train.simulated_devices
VALUES FD...``. They speak the real messages, and have no model: each update is the same vector.
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Final

import numpy as np

from millpond.base.deadline import NEVER
from millpond.base.errors import ConnectionLost
from millpond.train.protocol import PART_VALUES, Fetch, MissingFiles, Part, PrepareWorker, Ready, Update, Work
from millpond.train.state import layout
from millpond.train.task.sums import LOSS
from millpond.wire.channel import Channel
from millpond.wire.messages import Message, Ok

SAMPLES: Final = 8


class Agents:
    """What all of them share: the values of their updates, and a place for states that nobody reads."""

    def __init__(self, values: int) -> None:
        self._update = np.random.default_rng(0).uniform(-1, 1, values).astype(np.float32)
        self._state = bytearray(4 * values)
        self._size = values

    def serve(self, channel: Channel) -> None:
        """Answer one connection until its end."""
        try:
            while True:
                head = channel.receive(NEVER)
                if head.payload_size:
                    channel.receive_into(memoryview(self._state)[: head.payload_size], NEVER)
                self._answer(head.message, channel)
        except ConnectionLost:
            channel.close()

    def _answer(self, message: Message, channel: Channel) -> None:
        if isinstance(message, PrepareWorker):
            self._size = layout.size(message.tensors)
            channel.send(MissingFiles(()), NEVER)
            channel.send(Ready((SAMPLES,)), NEVER)
        elif isinstance(message, Work):
            norm = float(np.linalg.norm(self._update[: self._size]))
            samples = message.samples
            metrics = {LOSS: (0.0, float(samples))}
            update = Update(message.exchange, samples, samples, 1.0, norm, 0.0, 0.0, 0, metrics)
            channel.send(update, NEVER)
        elif isinstance(message, Fetch):
            for start in range(0, message.stop, PART_VALUES):
                part = self._update[start : min(start + PART_VALUES, message.stop)]
                channel.send(Part(start), NEVER, part.data)
        else:
            channel.send(Ok(), NEVER)


def main() -> None:
    """Serve all connections until the last has ended."""
    values, *descriptors = map(int, sys.argv[1:])
    agents = Agents(values)
    for descriptor in descriptors:
        channel = Channel(socket.socket(fileno=descriptor), "the host")
        threading.Thread(target=agents.serve, args=(channel,)).start()


if __name__ == "__main__":
    main()
