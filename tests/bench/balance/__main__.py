# SPDX-License-Identifier: Apache-2.0
"""Entry: training on unequal devices, ``make bench-balance``: tables, ``balance.json`` and a picture."""

from __future__ import annotations

import sys

from bench import harness
from bench.balance import against_simulation, convergence, csds, exchange, killed, quotas, simulated, squeezed

EXPERIMENTS = (
    squeezed.EXPERIMENT,
    quotas.EXPERIMENT,
    csds.EXPERIMENT,
    simulated.EXPERIMENT,
    against_simulation.EXPERIMENT,
    exchange.EXPERIMENT,
    killed.EXPERIMENT,
    convergence.EXPERIMENT,
)
NOTE = "; virtual workers sleep for their curves' time"

if __name__ == "__main__":
    sys.exit(harness.main("balance", "What unequal devices reach of what they could.", EXPERIMENTS, NOTE))
