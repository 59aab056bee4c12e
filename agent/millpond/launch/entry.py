# SPDX-License-Identifier: Apache-2.0
"""Entry: the first process of a launched script's sandbox: ``python -m millpond.launch.entry FD INTERFACE``.

FD is an inherited Unix socket on which one Launch message comes. The script runs as it would under torchrun,
in a folder of its own that holds its files; the folder is in memory, and goes when this process ends, as do
all others that the script has started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.linux.confinement.sandbox import exit_code
from millpond.linux.syscalls import die_with_parent
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.launch_messages import MOST_CODE, Launch, environment

RECEIVE_SECONDS = 60.0


def main(descriptor: str, interface: str) -> int:
    """Run the script; return its exit code, 128 + N if signal N ended it."""
    die_with_parent(signal.SIGKILL)
    limits = Limits(head=MOST_CODE + (1 << 20), payload=0)
    with Channel(socket.socket(fileno=int(descriptor)), "the launcher", limits=limits) as channel:
        launch = channel.expect(Launch, Deadline.after(RECEIVE_SECONDS))
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    for name, content in launch.files.items():
        (folder / name).write_bytes(content)
    # Output is shown line by line: Python must not keep it until a buffer is full.
    variables = os.environ | environment(launch, interface) | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, launch.script, *launch.arguments]
    script = subprocess.Popen(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL)
    while True:  # as the first process of its pid namespace it also reaps orphans
        pid, status = os.wait()
        if pid == script.pid:
            return exit_code(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
