# SPDX-License-Identifier: Apache-2.0
"""The modules that the agent's idle processes import: memory is short on a board."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OPENSSL = {"ssl", "_ssl", "_hashlib"}
TOOLS = {"subprocess", "shutil", "random", "lzma", "bz2", "tempfile", "asyncio"}
HEAVY = {"torch", "numpy", "pyroute2", "asyncio", "email", "unittest", "multiprocessing"}


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("millpond.agent.daemon", HEAVY),
        ("millpond.agent.volume_server", HEAVY | OPENSSL | TOOLS | {"psutil", "argparse"}),
        (
            "millpond.fs.mount.device",
            HEAVY | OPENSSL | TOOLS | {"psutil", "fuse", "millpond.fs.coherence.manager"},
        ),
        ("millpond.tunnel.__main__", HEAVY | OPENSSL | TOOLS | {"psutil", "msgpack"}),
    ],
)
def test_what_a_process_that_lasts_does_not_load(module: str, without: set[str]) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    # make coverage would have this process load coverage's own modules.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) & without == set()
