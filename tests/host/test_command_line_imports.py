# SPDX-License-Identifier: Apache-2.0
"""What the command line imports before it knows the command: each takes longer than most commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = "import sys, millpond.host.cli.app; print(*sys.modules)"


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["cryptography", "numpy", "paramiko", "torch", "millpond.fs.client", "millpond.host.daemon"]
)
def test_only_the_commands_that_need_it_import(loaded: set[str], module: str) -> None:
    assert "millpond.host.client" in loaded
    assert module not in loaded
