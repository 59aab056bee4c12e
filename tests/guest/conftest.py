# SPDX-License-Identifier: Apache-2.0
"""One guest for all tests that need no hardware of their own and leave no trace for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .guest import Guest
from .machine import why_no_guest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Boot guests in full runs only, as that takes minutes on an emulated processor, and in one process."""
    item.add_marker(pytest.mark.full)
    item.add_marker(pytest.mark.xdist_group("guest"))


@pytest.fixture(scope="session")
def guest_works() -> None:
    """For tests that start guests of their own."""
    if reason := why_no_guest():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def guest(guest_works: None) -> Iterator[Guest]:
    """A plain guest with QEMU's own network, shared by all."""
    with Guest() as shared:
        yield shared
