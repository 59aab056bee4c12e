# SPDX-License-Identifier: Apache-2.0
"""System calls of a child process before it executes another program."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

STARTS = """
import subprocess, sys
from millpond.linux.syscalls import killed_with_parent
print(subprocess.Popen(["sleep", "60"], preexec_fn=killed_with_parent()).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kill", [True, False])
def test_a_child_is_killed_when_its_parent_ends(kill: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin and parent.stdout
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([child], [], [], 0.2)[0]
        if kill:
            parent.kill()
        parent.stdin.close()
        ended = select.select([child], [], [], 20)[0]
    if not ended:
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)
    assert ended
