# SPDX-License-Identifier: Apache-2.0
"""Pure: the five papers."""

from __future__ import annotations

from bench.papers.dpu_server import exhibits as dpu_server
from bench.papers.ember import exhibits as ember
from bench.papers.firecaffe import exhibits as firecaffe
from bench.papers.met import exhibits as met
from bench.papers.stannis import exhibits as stannis

PAPERS = (stannis.PAPER, firecaffe.PAPER, ember.PAPER, met.PAPER, dpu_server.PAPER)
