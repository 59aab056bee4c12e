# SPDX-License-Identifier: Apache-2.0
"""What ``millpond devices`` shows of private data at rest, and of devices that can run no job."""

from __future__ import annotations

import io
from dataclasses import replace

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


def test_a_device_that_can_run_no_job_is_shown_with_the_reason() -> None:
    """Before: the reason was told in JSON alone."""
    reason = "no process starts in a sandbox: exit code 70"
    faulty = replace(device("csd0", AtRest("AES-256-XTS")), state="faulty", reason=reason)
    output = io.StringIO()
    Console(width=160, file=output).print(tables.devices([faulty, device("csd1", AtRest("AES-256-XTS"))]))
    row, other = output.getvalue().splitlines()[1:]
    assert "faulty" in row and reason in row
    assert "ready" in other and "encrypted" in other
