# SPDX-License-Identifier: Apache-2.0
"""Entry: what an aggregation costs, ``make bench-aggregate``: ``aggregate.json``."""

from __future__ import annotations

import sys

from bench import repeated
from bench.aggregate import encodings, offload, peers, rounds, strategies, topology, udp

_MEASURED: repeated.Measured = {
    "rounds": (rounds.TITLE, rounds.measure),
    "flower": (peers.FLOWER_TITLE, peers.measure_flower),
    "split": (peers.SPLIT_TITLE, peers.measure_split),
    "staged": (peers.STAGED_TITLE, peers.measure_staged),
    "gigabyte": (peers.GIGABYTE_TITLE, peers.measure_gigabyte),
    "topology": (topology.TITLE, topology.measure),
    "offload": (offload.TITLE, offload.measure),
    "encodings": (encodings.TITLE, encodings.measure),
    "strategies": (strategies.TITLE, strategies.measure),
    **udp.MEASURED,
}

if __name__ == "__main__":
    sys.exit(repeated.main("aggregate", "What an aggregation costs.", _MEASURED))
