# SPDX-License-Identifier: Apache-2.0
"""Entry: what tasks of one's own, large data and small models cost, ``make bench-task``: ``task.json``."""

from __future__ import annotations

import sys

from bench import repeated
from bench.task import adapters, big_data, overhead, prepare, residence, wheels

_MEASURED: repeated.Measured = {
    "task_overhead": (overhead.TITLE, overhead.measure),
    "big_data": (big_data.TITLE, big_data.measure),
    "uint8_memory": (residence.TITLE, residence.measure),
    "wheels_s": (wheels.TITLE, wheels.measure),
    "prepare_over_import": (prepare.TITLE, prepare.measure),
    "lora_bytes": (adapters.TITLE, adapters.measure),
}

if __name__ == "__main__":
    sys.exit(repeated.main("task", "What tasks, large data and small models cost.", _MEASURED))
