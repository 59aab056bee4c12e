# SPDX-License-Identifier: Apache-2.0
"""Entry: what data in a slow tier, and streamed data, cost, ``make bench-data``: ``data.json``."""

from __future__ import annotations

import sys

from bench import harness
from bench.data import (
    elastic,
    heat_map,
    mini_epochs,
    stream_accuracy,
    stream_peers,
    stream_ray,
    streamed,
    tier_speed,
    transforms,
)
from bench.experiment import Experiment

EXPERIMENTS = (
    Experiment("met_points", mini_epochs.TITLE, mini_epochs.measure),
    Experiment("met_speed", tier_speed.TITLE, tier_speed.measure),
    Experiment("streamed", streamed.TITLE, streamed.measure),
    Experiment("tuner", heat_map.TITLE, heat_map.measure),
    Experiment("transforms", transforms.TITLE, transforms.measure),
    Experiment("accuracy", stream_accuracy.TITLE, stream_accuracy.measure),
    Experiment("elastic", elastic.TITLE, elastic.measure),
    Experiment("mosaic", stream_peers.TITLE, stream_peers.measure),
    Experiment("ray", stream_ray.TITLE, stream_ray.measure),
)

if __name__ == "__main__":
    sys.exit(harness.main("data", "What streamed training data, and data in a slow tier, cost.", EXPERIMENTS))
