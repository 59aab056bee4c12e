# SPDX-License-Identifier: Apache-2.0
"""Devices that are added to a running daemon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from millpond.host.daemon.addition import DeviceAddition
from millpond.host.fleet import directory
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.fleet.forwarding import Forwarding
from millpond.host.fleet.registry import DeviceRegistry


class _Forwarding:
    def add(self, device: str) -> None:
        pass


class _Device:
    """A device whose thread starts at the second attempt."""

    attempts = 0

    def __init__(self, config: DeviceConfig) -> None:
        self.name = config.name

    def start(self) -> None:
        type(self).attempts += 1
        if self.attempts == 1:
            raise RuntimeError("can't start new thread")


def test_a_device_that_has_not_started_is_started_when_it_is_added_again(tmp_path: Path) -> None:
    """Before: the second attempt did nothing, and its answer was Ok."""
    (tmp_path / "fleet.toml").write_text('name = "one"\n[[device]]\nname = "csd0"\n')
    fleet, devices = directory.read(tmp_path), DeviceRegistry({})
    fleet.config = replace(fleet.config, device=())
    make = cast(Callable[[DeviceConfig], Device], _Device)
    addition = DeviceAddition(fleet, devices, cast(Forwarding, _Forwarding()), make)
    with pytest.raises(RuntimeError):
        addition.add("csd0")
    assert not devices
    addition.add("csd0")
    assert list(devices) == ["csd0"] and _Device.attempts == 2
