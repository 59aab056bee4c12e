# SPDX-License-Identifier: Apache-2.0
"""Entry: attacks on what leaves a device, level by level, and what masks cost, ``make bench-privacy``: tables
and ``privacy.json``.
"""

from __future__ import annotations

import sys

from bench import harness
from bench.privacy import aimed, dp, masked, membership, property_inference, rebuilding

EXPERIMENTS = (
    rebuilding.EXPERIMENT,
    membership.EXPERIMENT,
    property_inference.EXPERIMENT,
    aimed.EXPERIMENT,
    masked.EXPERIMENT,
    dp.EXPERIMENT,
)


def main() -> int:
    """Run the experiments. Exit codes: the harness's."""
    return harness.main("privacy", "What attackers learn at each level of privacy.", EXPERIMENTS)


if __name__ == "__main__":
    sys.exit(main())
