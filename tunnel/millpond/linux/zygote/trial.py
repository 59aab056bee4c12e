# SPDX-License-Identifier: Apache-2.0
"""Entry: a fork of a zygote that ends at once, to try whether the zygote forks and a sandbox starts."""

from __future__ import annotations

from collections.abc import Sequence


def main(_arguments: Sequence[str]) -> int:
    """Return the exit code of success."""
    return 0
