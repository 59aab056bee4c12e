# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper FireCaffe, in its order."""

from __future__ import annotations

from bench.papers.exhibit import Exhibit, Paper
from bench.papers.firecaffe import fleet, models, speed, trees

PAPER = Paper(
    "firecaffe",
    "FireCaffe",
    (
        Exhibit("table-1", "Table 1: volumes of data and computation, batches of 1024", models.table_1),
        Exhibit("fig-2", "Fig. 2: size of the parameters and accuracy", models.figure_2),
        Exhibit("fig-4", "Fig. 4: a parameter server and reduction trees, 30 MB a node", trees.figure_4),
        Exhibit("table-2", "Table 2: training of midsized networks", speed.table_2),
        Exhibit("table-3", "Table 3: training of ultra-deep networks", speed.table_3),
        Exhibit("rates", "Section 7.3: learning rates for a large batch", speed.sweep),
        Exhibit("fleet", "Section 7.1: speed over a single machine, on an emulated fleet", fleet.speeds),
    ),
)
