# SPDX-License-Identifier: Apache-2.0
"""Edge: what images are made of, as data: locked packages, files of the root, the first program."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipe"


def read(name: str) -> dict[str, Any]:
    """Read the recipe's TOML file ``name``."""
    with (RECIPE / name).open("rb") as file:
        return tomllib.load(file)
