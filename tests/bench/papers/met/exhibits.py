# SPDX-License-Identifier: Apache-2.0
"""Pure: all tables and figures with data of the paper MET, in its order."""

from __future__ import annotations

from bench.papers.exhibit import Paper

PAPER = Paper("met", "MET", ())
