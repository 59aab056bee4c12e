# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper Stannis and Laguna, in its order."""

from __future__ import annotations

from bench.papers.exhibit import Paper
from bench.papers.stannis import energy, fig1, fig6, fig7, rules, table1

PAPER = Paper(
    "stannis",
    "Stannis and Laguna",
    (
        fig1.EXHIBIT,
        table1.EXHIBIT,
        rules.EXHIBIT,
        fig6.EXHIBIT,
        fig7.FIG_7A,
        fig7.FIG_7B,
        energy.EXHIBIT,
    ),
)
