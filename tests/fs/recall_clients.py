# SPDX-License-Identifier: Apache-2.0
"""Fixtures of clients of one server, beside a device that changes files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..effort import scaled
from .caching_client import Client, Device, shared
from .support import Server

LEASE, LONG = scaled(quick=1.5, full=3.0), 12.0


@pytest.fixture
def lease() -> float:
    """So long that no test ends it that does not mean to."""
    return LONG


@pytest.fixture
def server(top: Path, lease: float) -> Iterator[Server]:
    with shared(top, lease) as made:
        yield made


@pytest.fixture
def device(server: Server) -> Device:
    return Device(server)


@pytest.fixture
def client(server: Server, device: Device) -> Iterator[Client]:
    device.put(b"f", b"one")
    device.put(b"g", b"another")
    made = Client(server)
    yield made
    made.close()


@pytest.fixture
def other(server: Server, client: Client) -> Iterator[Client]:
    made = Client(server)
    yield made
    made.close()
