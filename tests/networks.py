# SPDX-License-Identifier: Apache-2.0
"""Bodies of tests in a network of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn
from millpond.linux.network import loopback_up


def in_namespace(body: Callable[[], None]) -> None:
    """Run ``body`` in a process with a network of its own; what it asserts is asserted here."""

    def inside() -> int:
        loopback_up()
        body()
        return 0

    assert exit_code(os.waitpid(spawn(Sandbox(own_network=True), inside), 0)[1]) == 0


def ip(*arguments: str) -> str:
    """Return what the program 'ip' prints."""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
