# SPDX-License-Identifier: Apache-2.0
"""Entry: several hosts, and what one holds, ``make bench-hosts``: tables and ``hosts.json``."""

from __future__ import annotations

import sys

from bench import harness
from bench.experiment import Experiment
from bench.hosts import crowd, federation, kills, launched, levels, scale

EXPERIMENTS = (
    Experiment(
        "flower",
        "Two fleets of three devices by Flower, beside one fleet of six",
        federation.measure,
        figures=federation.FIGURES,
    ),
    Experiment(
        "flower_kills",
        "Each process of a federation killed in the middle of a round",
        kills.measure,
        figures=kills.FIGURES,
    ),
    launched.EXPERIMENT,
    levels.EXPERIMENT,
    scale.EXPERIMENT,
    crowd.EXPERIMENT,
)


def main() -> int:
    """Run the experiments. Exit codes: the harness's."""
    return harness.main("hosts", "Several hosts that train one model, and what one host holds.", EXPERIMENTS)


if __name__ == "__main__":
    sys.exit(main())
