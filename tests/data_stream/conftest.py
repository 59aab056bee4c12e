# SPDX-License-Identifier: Apache-2.0
"""A data service of images, for each test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .served import images, service


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the data set ``images``."""
    images(tmp_path / "images")
    return tmp_path


@pytest.fixture
def where(folder: Path) -> Iterator[str]:
    """The address of a service of ``folder``."""
    with service(folder) as address:
        yield address
