# SPDX-License-Identifier: Apache-2.0
"""Edge: the random generators of this process."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


def plant(seed: int) -> None:
    """Seed every generator that a model may draw from: Python's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def planted(seed: int) -> Iterator[None]:
    """Seed the generators as ``plant`` does, and give them back their states in the end."""
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        plant(seed)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])


def diverge() -> None:
    """Reseed numpy's generator, whose state all forks of a zygote share; Python reseeds its own at a fork."""
    np.random.seed()


def be_deterministic(threads: int) -> None:
    """Allow reproducible operations only: the same work with as many threads gives the same bits."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
