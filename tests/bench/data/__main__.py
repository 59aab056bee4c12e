# SPDX-License-Identifier: Apache-2.0
"""Entry: what data in a slow tier, and streamed data, cost, ``make bench-data``: ``data.json``."""

from __future__ import annotations

import sys

from bench import repeated
from bench.data import (
    elastic,
    heat_map,
    mini_epochs,
    stream_accuracy,
    stream_peers,
    stream_ray,
    streamed,
    tier_speed,
)

_MEASURED: repeated.Measured = {
    "met_points": (mini_epochs.TITLE, mini_epochs.measure),
    "met_speed": (tier_speed.TITLE, tier_speed.measure),
    "streamed": (streamed.TITLE, streamed.measure),
    "tuner": (heat_map.TITLE, heat_map.measure),
    "accuracy": (stream_accuracy.TITLE, stream_accuracy.measure),
    "elastic": (elastic.TITLE, elastic.measure),
    "mosaic": (stream_peers.TITLE, stream_peers.measure),
    "ray": (stream_ray.TITLE, stream_ray.measure),
}

if __name__ == "__main__":
    sys.exit(repeated.main("data", "What streamed training data, and data in a slow tier, cost.", _MEASURED))
