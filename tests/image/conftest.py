# SPDX-License-Identifier: Apache-2.0
"""The image, booted in QEMU: `make test-image` names it; other runs of tests skip these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..system.qemu import Board, create
from .image_support import Builder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--image", type=Path, help="the folder of an image of the board qemu-virt")
    parser.addoption(
        "--cache", type=Path, help="what its build has left for the next; other images are built"
    )
    parser.addoption("--fast", action="store_true", help="it was built so")


@pytest.fixture(scope="session")
def image(pytestconfig: pytest.Config) -> Path:
    given: Path | None = pytestconfig.getoption("--image", default=None)
    if given is None:
        pytest.skip("no --image is given: make test-image")
    return given.absolute()


@pytest.fixture(scope="session")
def builder(image: Path, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Builds other images of the same base."""
    cache: Path = pytestconfig.getoption("--cache") or image.parent / "cache"
    options = ("--fast",) if pytestconfig.getoption("--fast") else ()
    return Builder(tmp_path_factory.mktemp("images"), cache.absolute(), options)


@pytest.fixture(scope="session")
def board(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """One fleet of an emulated device and one in QEMU, for all tests."""
    made = create(tmp_path_factory.mktemp("image"), image, ["csd0"])
    try:
        made.emulation.start()
        made.wait_ready()
        yield made
    finally:
        left = made.emulation.stop(120.0)
    assert not left, f"left behind: {left}"
