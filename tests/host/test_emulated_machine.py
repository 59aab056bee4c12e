# SPDX-License-Identifier: Apache-2.0
"""The processes of an emulated machine: its command, and what becomes of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from millpond.host.client.connection import ANSWER_SECONDS
from millpond.host.emulation.machine import EmulatedMachine
from millpond.host.fleet import provisioning
from millpond.linux import sockets


class Hung(EmulatedMachine):
    """A machine whose daemon takes connections and answers none; its user presses Ctrl-C then."""

    def _start_daemon(self) -> None:
        self.server = sockets.listen(self._fleet.socket)
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        self.connection, _ = self.server.accept()
        os.kill(os.getpid(), signal.SIGINT)


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


def test_a_daemon_that_hangs_does_not_keep_ctrl_c_back(
    in_namespace: Callable[[Callable[[], None]], None], tmp_path: Path
) -> None:
    fleet = provisioning.create(tmp_path / "fleet", "tests", [])

    def body() -> None:
        began = time.monotonic()
        assert Hung(fleet, ["true"], prepares=False).run() == 130
        assert time.monotonic() - began < ANSWER_SECONDS / 2

    in_namespace(body)
