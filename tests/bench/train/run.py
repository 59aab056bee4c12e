# SPDX-License-Identifier: Apache-2.0
"""Pure: defines how an experiment of this benchmark is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """``repeats`` of each measurement; ``quick`` is short; ``say`` tells a person how far it is."""

    repeats: int
    quick: bool
    say: Callable[[str], None]
