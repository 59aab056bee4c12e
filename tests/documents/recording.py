# SPDX-License-Identifier: Apache-2.0
"""Edge (a terminal, the clock): records a program in a terminal, in asciinema's format, version 2.

The format is a line of JSON with the terminal's size, then a line ``[seconds, "o", text]`` for each output.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

COLUMNS, LINES = 80, 24


def record(argv: Sequence[str], keys: Sequence[tuple[float, str]], path: Path, title: str) -> None:
    """Run a program in a terminal of 80 x 24, press ``keys``, each so many seconds after the one before, and
    write what the program prints to ``path`` until it ends.
    """
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    header = {"version": 2, "width": COLUMNS, "height": LINES, "title": title}
    with subprocess.Popen(
        argv, stdin=far, stdout=far, stderr=far, env=environment, start_new_session=True
    ) as process:
        os.close(far)
        try:
            shown = _outputs(near, keys)
        finally:
            process.terminate()
            os.close(near)
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in shown)]
    path.write_text("\n".join(lines) + "\n")


def _outputs(near: int, keys: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return what is printed and when (s), until the terminal is closed or the last key is ignored."""
    found, decoder = list[tuple[float, str]](), codecs.getincrementaldecoder("utf-8")("replace")
    began = time.monotonic()
    with contextlib.suppress(OSError):  # the program has ended
        for seconds, key in (*keys, (3.0, "")):
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                if select.select([near], [], [], left)[0]:
                    text = decoder.decode(os.read(near, 1 << 16))
                    found.append((time.monotonic() - began, text))
            os.write(near, key.encode())
    return found
