# SPDX-License-Identifier: Apache-2.0
"""Entry: clients of the plain server, a thread each: ``python -m ... VALUES FD...``."""

from __future__ import annotations

import socket
import sys
import threading

import numpy as np


def serve(client: socket.socket, values: memoryview, state: memoryview) -> None:
    """Take a vector and give one, until the server ends."""
    while True:
        left = state
        while left:
            count = client.recv_into(left)
            if not count:
                return
            left = left[count:]
        client.sendall(values)


def main() -> None:
    """Serve all."""
    size, *descriptors = map(int, sys.argv[1:])
    values = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32).data.cast("B")
    for descriptor in descriptors:
        client, state = socket.socket(fileno=descriptor), memoryview(bytearray(4 * size))
        threading.Thread(target=serve, args=(client, values, state)).start()


if __name__ == "__main__":
    main()
