# SPDX-License-Identifier: Apache-2.0
"""Pure: the seed of a worker's round or step."""

from __future__ import annotations

import hashlib
import json


def derive(seed: int, worker: str, round_: int, again: int = 0) -> int:
    """Return the seed of one worker's round, or of its further tasks in it, of which this is number
    ``again``: a pure function, the same in every process; 0 to 2**63 - 1.
    """
    key = json.dumps([seed, worker, round_, *([again] if again else [])]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
