# SPDX-License-Identifier: Apache-2.0
"""Entry: Flower's clients of a round, a thread each: ``python flower_clients.py PORT VALUES CLIENTS``."""

from __future__ import annotations

import sys
import threading
from typing import Any

import flwr
import numpy as np


class Client(flwr.client.NumPyClient):  # type: ignore[misc]
    """Answers each vector with its own."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def fit(self, parameters: Any, config: Any) -> Any:
        """Return the vector."""
        return [self._values], 8, {}


def main() -> None:
    """Run until the server ends."""
    port, size, clients = map(int, sys.argv[1:])
    values = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)

    def run() -> None:
        flwr.client.start_client(
            server_address=f"127.0.0.1:{port}",
            client=Client(values).to_client(),
            grpc_max_message_length=64 << 20,
        )

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
