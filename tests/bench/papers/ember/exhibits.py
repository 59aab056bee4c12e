# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper Ember, in its order."""

from __future__ import annotations

from bench.papers.ember.chunks import figure_7
from bench.papers.ember.resources import figure_4, figure_6, table_3
from bench.papers.ember.training import table_2, table_4
from bench.papers.exhibit import Exhibit, Paper

PAPER = Paper(
    "ember",
    "Ember",
    (
        Exhibit("fig-4", "Fig. 4: server CPU over time", figure_4),
        Exhibit("table-2", "Table 2: training performance, three convolutions", table_2),
        Exhibit("fig-6", "Fig. 6: memory over time", figure_6),
        Exhibit("table-3", "Table 3: memory that streaming saves", table_3),
        Exhibit("table-4", "Table 4: Ember and Ray on three architectures", table_4),
        Exhibit("fig-7", "Fig. 7: batch and chunk", figure_7),
    ),
)
