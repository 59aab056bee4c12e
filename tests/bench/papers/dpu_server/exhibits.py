# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper Federated-learning server on a DPU, in its order."""

from __future__ import annotations

from bench.papers.exhibit import Paper

PAPER = Paper("dpu-server", "Federated-learning server on a DPU", ())
