# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper Stannis and Laguna, in its order."""

from __future__ import annotations

from bench.papers.exhibit import Paper

PAPER = Paper("stannis", "Stannis and Laguna", ())
