# SPDX-License-Identifier: Apache-2.0
"""Edge: the random generators of this process."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def plant(seed: int) -> None:
    """Seed every generator that a model may draw from: Python's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def diverge() -> None:
    """Reseed numpy's generator, whose state all forks of a zygote share; Python reseeds its own at a fork."""
    np.random.seed()


def be_deterministic(threads: int) -> None:
    """Allow reproducible operations only: the same work with as many threads gives the same bits."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
