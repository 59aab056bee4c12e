# SPDX-License-Identifier: Apache-2.0
"""Entry: what training costs beside its computation, ``make bench-train``: tables and ``train.json``."""

from __future__ import annotations

import sys

from bench import harness
from bench.experiment import Experiment
from bench.train import exchange, host_memory, lines, simulated_rounds

EXPERIMENTS = (
    Experiment("round_over_floor", exchange.TITLE, exchange.measure),
    Experiment("host_models", host_memory.TITLE, host_memory.measure),
    Experiment("sim_rounds_10000", simulated_rounds.TITLE, simulated_rounds.measure),
    Experiment("lines", lines.TITLE, lines.measure),
)

if __name__ == "__main__":
    sys.exit(harness.main("train", "What training costs beside its computation.", EXPERIMENTS))
