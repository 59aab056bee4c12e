# SPDX-License-Identifier: Apache-2.0
"""The column of ``millpond devices`` for private data at rest."""

from __future__ import annotations

import io

from rich.console import Console

from millpond.host.api.daemon import DeviceInfo
from millpond.host.terminal import tables
from millpond.wire.control_messages import AtRest, Load, Welcome

LOAD = Load(0.0, 1, 1, None, ())


def device(name: str, at_rest: AtRest) -> DeviceInfo:
    welcome = Welcome(name, "1", "boot", "aarch64", 4, 2, 2, at_rest)
    return DeviceInfo(name, "real", "ready", "", "10.77.0.2", welcome, LOAD, (0, 0))


def test_who_does_not_encrypt_is_shown_and_named_with_the_reason() -> None:
    infos = [
        device("csd0", AtRest("AES-256-XTS")),
        device("csd1", AtRest(reason="it held files already")),
        device("csd2", AtRest(reason="it held files already")),
        DeviceInfo("csd3", "real", "absent", "not seen yet", "10.77.0.14", None, None, (0, 0)),
    ]
    output = io.StringIO()
    Console(width=160, file=output).print(tables.devices(infos))
    rows = output.getvalue().splitlines()
    assert ["encrypted" in row for row in rows] == [False, True, False, False, False]
    assert ["plain" in row for row in rows] == [False, False, True, True, False]
    assert tables.plain(infos) == [
        "csd1, csd2: private data are not encrypted on the flash: it held files already"
    ]


def test_an_agent_that_does_not_say_counts_as_plain() -> None:
    old = DeviceInfo(
        "csd0", "real", "ready", "", "10.77.0.2", Welcome("csd0", "1", "b", "arm", 1, 2, 2), LOAD, (0, 0)
    )
    assert tables.plain([old]) == [
        "csd0: private data are not encrypted on the flash: the agent does not say"
    ]
