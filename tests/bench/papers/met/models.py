# SPDX-License-Identifier: Apache-2.0
"""Pure: Fig. 1, 2, 4 and 12: the paper's models of reading, computed by the product's own formulas."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np

from bench.experiment import Line, Panel, Run
from bench.papers.exhibit import Shown, Value, computed
from millpond.data.tier.roofline import Roofline, point
from millpond.data.tier.tier_model import TieredSystem, predicted
from millpond.host.cli.simulation import roofline
from millpond.train.balance.curve import Floats

NETWORKS = roofline.read(Path(__file__).parents[4] / "agent" / "examples" / "roofline.toml").networks
"""Networks with the multiply-adds of their own papers, and an average image of ImageNet."""
A100, NODE = 312e12, 8
SUMMIT_PEAK, SUMMIT_SLOW = 126e15, 2.5e12
"""Operations per second of the paper's hypothetical system; bytes per second of Summit's file system."""
NEED = 3.8 * 1024 * 1e9
"""Bytes per second: 3.8 TB/s as the paper divides them, since 3.8 * 1024 / 128 = 30.4."""
SUMMIT = TieredSystem(65_000, NEED / 65_000, 400e9, 26e12)
_MINI_EPOCHS, _DRAWS = 128, 1000
_LINE = "the multiply-adds of the networks' own papers and 110 kB for an image; nothing is measured"


def bandwidth(_run: Run) -> Shown:
    """Fig. 1: the bandwidth that keeps eight A100 busy."""
    system = Roofline(NODE * A100, 10e9)
    needs = {each.name: point(system, each.operations, each.sample_bytes).needed / 1e9 for each in NETWORKS}
    rows = [computed("bandwidth for the network that needs most", "GB/s", 130, max(needs.values()))]
    rows += [computed(f"bandwidth for {name}", "GB/s", None, need) for name, need in needs.items()]
    names = list(needs)
    line = Line("millpond", ", ".join(names), list(range(len(names))), list(needs.values()), marks=True)
    paper = Line("paper", "the text: up to 130 GB/s", [0, len(names) - 1], [130, 130])
    panels = (Panel("Bandwidth to feed 8 A100", "network", "GB/s", (line, paper)),)
    return Shown(
        tuple(rows),
        _LINE,
        "The paper's networks are in its picture alone; at the peak of the GPUs AlexNet, which computes "
        "least for an image, needs what its text says if a multiply-add is one operation.",
        panels,
    )


def under_the_roofline(_run: Run) -> Shown:
    """Fig. 2: the roofline of a system with a peak of 126 PF/s."""
    system = Roofline(SUMMIT_PEAK, SUMMIT_SLOW)
    found = {each.name: point(system, each.operations, each.sample_bytes) for each in NETWORKS}
    ridge = SUMMIT_PEAK / SUMMIT_SLOW
    most = max(own.needed for own in found.values())
    limited = [name for name, own in found.items() if own.share < 1]
    rows = [
        computed("operations per byte from which computing is the limit, at 2.5 TB/s", "", None, ridge),
        computed(
            "networks that reading limits", "", "a significant portion", f"{len(limited)} of {len(found)}"
        ),
        computed("largest bandwidth that a network needs", "TB/s", "several", most / 1e12),
    ]
    rows += [
        computed(
            f"speed of {name}, {own.intensity:,.0f} operations per byte", "PF/s", None, own.reached / 1e15
        )
        for name, own in found.items()
    ]
    xs = sorted([5e3, ridge, 1e6])
    roof = Line("limit", "roofline at 2.5 TB/s", xs, [min(SUMMIT_PEAK, SUMMIT_SLOW * x) / 1e15 for x in xs])
    marks = [own.intensity for own in found.values()], [own.reached / 1e15 for own in found.values()]
    points = Line("millpond", "networks", *marks, marks=True)
    panel = Panel("Roofline of reading", "operations per byte", "PF/s", (roof, points), logarithmic=True)
    return Shown(
        tuple(rows),
        _LINE,
        "The paper prints no numbers beside its peak and 'several TB/s'; the bandwidth here is that of "
        "Summit's file system in its Fig. 3.",
        (panel,),
    )


def mismatch(_run: Run) -> Shown:
    """Fig. 4: what DeepCAM needs, and what the tiers of Summit give."""
    sample = 768 * 1152 * (16 * 4 + 1)
    whole = 65_000 * sample
    rows = [
        computed("a sample: 768 x 1152 x 16 float32 and a label of one byte", "MB", None, sample / 1e6),
        computed("bandwidth for 65,000 samples per second", "TB/s", 3.8, whole / 1e12),
        computed("data set of 63,000 such samples", "TB", 20, 63_000 * sample / 1e12),
        computed(
            "size of a sample of a data set of 20 TB and 63,000 samples", "MB", None, 20e12 / 63e3 / 1e6
        ),
    ]
    tiers = {"GPFS or Lustre": 400e9, "burst buffer": 2e12, "NVMe or DRAM": 26e12}
    rows += [
        computed(f"repeats that hide the fetch from {name}, {bytes_ / 1e12:g} TB/s", "", None, NEED / bytes_)
        for name, bytes_ in tiers.items()
    ]
    return Shown(
        tuple(rows),
        "the paper's own numbers; nothing is measured",
        "3.8 TB/s follow from the shape of a sample and 65,000 of them per second; 20 TB for 63,000 samples "
        "do not: they would be 317 MB each, five times as much.",
    )


def throughput(_run: Run) -> Shown:
    """Fig. 12: throughput and EB_2 on Summit, by equation 1."""
    fixed = {rf: predicted(SUMMIT, [rf]) for rf in (1, 2, 4, 8, 10, 16, 32, 64, 128)}
    rows = [
        computed("throughput with fixed rf 10", "samples/s", 65_000, fixed[10].throughput),
        computed("throughput without repeats", "samples/s", None, fixed[1].throughput),
        computed("EB_2 without repeats", "GB/s", 400, fixed[1].read / 1e9),
        computed("EB_2 with fixed rf 128 (3.8 * 1024 / 128)", "GB/s", 30.4, fixed[128].read / 1e9),
    ]
    for name, mean, of_paper in (("score", 55.0, 90.7), ("bollinger", 35.0, 147.0)):
        rows += _adaptive(name, mean, of_paper)
    xs = list(fixed)
    printed = Line("paper", "printed: 400 and 30.4 GB/s", [1, 128], [400, 30.4], marks=True)
    peak = Line("paper", "printed: 65,000 from rf 10 on", [10, 128], [65, 65])
    speed = Line("millpond", "equation 1", xs, [own.throughput / 1e3 for own in fixed.values()])
    read = Line("millpond", "equation 1", xs, [own.read / 1e9 for own in fixed.values()])
    panels = (
        Panel("Throughput", "rf", "1,000 samples/s", (speed, peak)),
        Panel("Bandwidth EB_2", "rf", "GB/s", (read, printed)),
    )
    return Shown(
        tuple(rows),
        "the model alone, as in the paper",
        "Equation 1 has MAX where its results need MIN; the paper's 90.7 and 147 GB/s follow if all t_i are "
        "equal, that is as a mean over mini-epochs, not over time.",
        panels,
    )


def _adaptive(name: str, mean: float, printed: float) -> list[Value]:
    """Return the rows of an adaptive rule whose repeats have this mean."""
    deviation = _deviation(mean, printed)
    repeats = _repeats(mean, deviation)
    short = float((repeats < 10).mean())
    by_time = predicted(SUMMIT, repeats.tolist())
    whole = f"{name}, rf {mean:g} on average"
    return [
        computed(f"{whole}: EB_2 with equal t_i", "GB/s", printed, _unweighted(repeats)),
        computed(f"{whole}: standard deviation of rf that gives this", "", None, deviation),
        computed(f"{whole}: mini-epochs with rf below 10", "%", "less than 5", 100 * short),
        computed(f"{whole}: EB_2 with the real t_i, as equation 1 says", "GB/s", None, by_time.read / 1e9),
        computed(f"{whole}: throughput", "samples/s", "degradation is negligible", by_time.throughput),
    ]


def _deviation(mean: float, printed: float) -> float:
    """Return the deviation of repeats for which the mean over mini-epochs is as printed, in steps of 0.5."""
    tried = np.arange(5.0, 40.0, 0.5)
    return float(min(tried, key=lambda deviation: abs(_unweighted(_repeats(mean, deviation)) - printed)))


def _repeats(mean: float, deviation: float) -> Floats:
    """Return repeats of 128 mini-epochs, 1 to 128: the quantiles of many draws of a gamma distribution."""
    shape = (mean / deviation) ** 2
    drawn = np.sort(np.random.default_rng(1).gamma(shape, mean / shape, _DRAWS * _MINI_EPOCHS))
    return np.clip(np.rint(drawn[_DRAWS // 2 :: _DRAWS]), 1.0, 128.0)


def _unweighted(repeats: Floats) -> float:
    """Return the mean over mini-epochs of what each reads, in GB/s."""
    return fmean(predicted(SUMMIT, [rf]).read for rf in repeats.tolist()) / 1e9
