# SPDX-License-Identifier: Apache-2.0
"""Entry: attacks on what leaves a device, level by level, ``make bench-privacy``: tables and
``privacy.json``.
"""

from __future__ import annotations

import sys

from bench import harness
from bench.privacy import rebuilding

EXPERIMENTS = (rebuilding.EXPERIMENT,)


def main() -> int:
    """Run the experiments. Exit codes: the harness's."""
    return harness.main("privacy", "What attackers learn at each level of privacy.", EXPERIMENTS)


if __name__ == "__main__":
    sys.exit(main())
