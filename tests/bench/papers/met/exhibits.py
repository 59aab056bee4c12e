# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper MET, in its order."""

from __future__ import annotations

from bench.papers.exhibit import Exhibit, Paper
from bench.papers.met import models
from bench.papers.met.sweeps import accuracy, distributions

_BANDS = (
    "Little data overfits at smaller (nm, rf) than climate images do. The score ends repetitions early, and "
    "regains more than in the paper; the band with a lower side alone regains less than the score, as a "
    "score that gets worse does not end them."
)
_MORE = (
    "Little data overfits at smaller (nm, rf) than ImageNet does; as in the paper, accuracy is "
    "lost where both are large. The paper tries adaptive rules in Fig. 9 and 10 alone."
)
_VIDEO = (
    "Little data overfits at smaller (nm, rf) than YouTube-8M does. The paper's points are "
    "differences of its accuracies: 0.803 of plain training, 7 % less with fixed repeats, 0.783 by score. "
    "It does not try bands here."
)

PAPER = Paper(
    "met",
    "MET",
    (
        Exhibit("fig-1", "Fig. 1: bandwidth to feed eight A100", models.bandwidth),
        Exhibit("fig-2", "Fig. 2: roofline of reading at 126 PF/s", models.under_the_roofline),
        Exhibit("fig-4", "Fig. 4: what DeepCAM reads, and what tiers give", models.mismatch),
        Exhibit(
            "fig-7",
            "Fig. 7: accuracy with fixed repeats, larger batches",
            accuracy("fig-7", {"fixed 64": "about 1; more than 7 at nm above 300"}, _MORE),
        ),
        Exhibit(
            "fig-8",
            "Fig. 8: accuracy with fixed repeats, smaller batches",
            accuracy("fig-8", {"fixed 16": "within 1", "fixed 32": "within 1", "fixed 64": 6}, _MORE),
        ),
        Exhibit(
            "fig-9",
            "Fig. 9: accuracy with repeats by score",
            accuracy("fig-9", {"plain": 80.3, "fixed 64": 7, "score": 2, "score regains": 5}, _VIDEO),
        ),
        Exhibit(
            "fig-10",
            "Fig. 10: accuracy with repeats by score and by bands",
            accuracy(
                "fig-10",
                {
                    "fixed 64": "more than 10 at nm = 128",
                    "score regains": "about 4 at nm = 128",
                    "bollinger": "less than 3 at nm = 128",
                    "bollinger regains": "more than 7 (10 less 3)",
                    "regains": "more than 7 (bollinger)",
                },
                _BANDS,
            ),
        ),
        Exhibit("fig-11", "Fig. 11: distribution of repeats", distributions),
        Exhibit("fig-12", "Fig. 12: throughput and bandwidth on Summit", models.throughput),
    ),
)
