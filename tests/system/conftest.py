"""Fleets that the system tests work with; whatever happens, nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import Emulation, create, why_not

WHY_NOT = why_not()
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder where no fleet can be emulated."""
    if WHY_NOT:
        for item in items:
            if item.path.is_relative_to(_HERE):
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    """Three devices with digits, one fleet for all tests."""
    emulation = create(tmp_path_factory.mktemp("shared"), ("csd0", "csd1", "csd2"))
    try:
        emulation.start()
        emulation.wait_ready()
        yield emulation
    finally:
        left = emulation.stop()
    assert not left, f"left behind: {left}"


@pytest.fixture
def fleet(shared_fleet: Emulation) -> Emulation:
    """The shared fleet, all of it ready, whatever an earlier test has done to it."""
    shared_fleet.wait_ready()
    return shared_fleet
