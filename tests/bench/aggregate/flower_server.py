# SPDX-License-Identifier: Apache-2.0
"""Entry: Flower's server of rounds, for an interpreter that has flwr: ``flower_server.py PORT VALUES
CLIENTS ROUNDS``. It prints a line of JSON once it is ready, and after each round.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import flwr
import numpy as np
from flwr.common import ndarrays_to_parameters


def resident() -> int:
    """Return the peak of this process since the last call, in bytes."""
    text = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def tell(**values: float) -> None:
    """Print one line."""
    print(json.dumps(values), flush=True)


class Measured(flwr.server.strategy.FedAvg):  # type: ignore[misc]
    """FedAvg that tells what the time since the last round has cost."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Average, and tell."""
        found = super().aggregate_fit(server_round, results, failures)
        tell(clients=len(results), at=time.monotonic(), cpu=time.process_time(), peak=resident())
        return found


def main() -> None:
    """Serve the rounds."""
    port, size, clients, rounds = map(int, sys.argv[1:])
    resident()
    tell(alone=resident())
    strategy = Measured(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(size, np.float32)]),
    )
    config = flwr.server.ServerConfig(num_rounds=rounds)
    most = 64 << 20
    flwr.server.start_server(
        server_address=f"127.0.0.1:{port}", config=config, strategy=strategy, grpc_max_message_length=most
    )


if __name__ == "__main__":
    main()
