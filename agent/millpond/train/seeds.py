"""Edge: the random generators of this process, and the seeds that go into them."""

from __future__ import annotations

import hashlib
import json
import os
import random

import numpy as np
import torch


def derive(seed: int, worker: str, round_: int) -> int:
    """The seed of one worker's round: a pure function, the same in every process; 0 to 2**63 - 1."""
    key = json.dumps([seed, worker, round_]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def plant(seed: int) -> None:
    """Seed every generator that a model may draw from: Python's, numpy's and torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def be_deterministic(threads: int) -> None:
    """Only reproducible operations, so that the same work with as many threads gives the same bits."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
