# SPDX-License-Identifier: Apache-2.0
"""The processes of an emulated machine: its command, and what becomes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from millpond.host.emulation.machine import EmulatedMachine
from millpond.host.fleet import provisioning


class Interrupted(EmulatedMachine):
    """A machine whose user presses Ctrl-C while its daemon starts."""

    def _start_daemon(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_command_that_was_not_even_started_has_not_succeeded(
    in_namespace: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    """A script that goes on with what it has made must not."""
    fleet = provisioning.create(tmp_path / "fleet", "tests", [])

    def body() -> None:
        assert Interrupted(fleet, ["touch", str(tmp_path / "made")], prepares=False).run() == 130
        assert Interrupted(fleet, None, prepares=False).run() == 0

    in_namespace(body)
    assert not (tmp_path / "made").exists()
