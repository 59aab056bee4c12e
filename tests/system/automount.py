# SPDX-License-Identifier: Apache-2.0
"""Entry: what systemd does for an automount: ``automount.py DIR COMMAND...`` lists DIR, whose listing waits
for what COMMAND mounts there.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path

from millpond.linux import syscalls

READY, FAIL = 0x9360, 0x9361
"""Requests of linux/auto_fs.h."""


def main() -> int:
    """Return the code of the command, after the listing."""
    place, *command = sys.argv[1:]
    os.setsid()
    asked, asks = os.pipe()
    options = f"fd={asks},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
    syscalls.mount("systemd-1", Path(place), "autofs", 0, options)
    trigger = os.open(place, os.O_RDONLY)  # this process group alone passes
    lister = subprocess.Popen(["ls", place], start_new_session=True)
    token = struct.unpack_from("=8xI", os.read(asked, 512))[0]
    code = 1
    try:
        code = subprocess.call(command, timeout=30)
    finally:
        fcntl.ioctl(trigger, FAIL if code else READY, token)
    lister.wait(10)
    return code


if __name__ == "__main__":
    sys.exit(main())
