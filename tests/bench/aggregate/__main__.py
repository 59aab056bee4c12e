# SPDX-License-Identifier: Apache-2.0
"""Entry: what an aggregation costs, ``make bench-aggregate``: ``aggregate.json``."""

from __future__ import annotations

import sys

from bench import harness
from bench.aggregate import encodings, offload, peers, rounds, strategies, topology, udp
from bench.experiment import Experiment

EXPERIMENTS = (
    Experiment("rounds", rounds.TITLE, rounds.measure),
    Experiment("flower", peers.FLOWER_TITLE, peers.measure_flower),
    Experiment("split", peers.SPLIT_TITLE, peers.measure_split),
    Experiment("staged", peers.STAGED_TITLE, peers.measure_staged),
    Experiment("gigabyte", peers.GIGABYTE_TITLE, peers.measure_gigabyte),
    Experiment("topology", topology.TITLE, topology.measure),
    Experiment("offload", offload.TITLE, offload.measure),
    Experiment("encodings", encodings.TITLE, encodings.measure),
    Experiment("strategies", strategies.TITLE, strategies.measure),
    Experiment("udp_over_tcp", udp.TITLE, udp.measure),
    Experiment("udp_accuracy", udp.ACCURACY_TITLE, udp.measure_accuracy),
)

if __name__ == "__main__":
    sys.exit(harness.main("aggregate", "What an aggregation costs.", EXPERIMENTS))
