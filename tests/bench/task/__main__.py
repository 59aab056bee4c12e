# SPDX-License-Identifier: Apache-2.0
"""Entry: what tasks of one's own, large data and small models cost, ``make bench-task``: ``task.json``."""

from __future__ import annotations

import sys

from bench import harness
from bench.experiment import Experiment
from bench.task import adapters, big_data, overhead, prepare, residence, wheels

EXPERIMENTS = (
    Experiment("task_overhead", overhead.TITLE, overhead.measure),
    Experiment("big_data", big_data.TITLE, big_data.measure),
    Experiment("uint8_memory", residence.TITLE, residence.measure),
    Experiment("wheels_s", wheels.TITLE, wheels.measure),
    Experiment("prepare_over_import", prepare.TITLE, prepare.measure),
    Experiment("lora_bytes", adapters.TITLE, adapters.measure),
)

if __name__ == "__main__":
    sys.exit(harness.main("task", "What tasks, large data and small models cost.", EXPERIMENTS))
