# SPDX-License-Identifier: Apache-2.0
"""The signals that end a daemon: each in order, and SIGHUP only with the terminal that it was started on."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

DAEMON = """
import logging, signal, sys
from millpond.linux.signals import stop_event
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
stop = stop_event()
print("begun", flush=True)
while not stop.wait(0.05):
    sys.stdout.flush()
print("ended in order", flush=True)
"""


def start(stdin: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_ends_in_order(number: signal.Signals) -> None:
    with start(subprocess.DEVNULL) as process:
        process.send_signal(number)
        assert process.communicate(timeout=30)[0] == "ended in order\n" and process.returncode == 0


def test_a_daemon_without_a_terminal_goes_on_at_sighup() -> None:
    """It logs nothing: in a signal's handler the lock of the log may be held by the same thread."""
    with start(subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)  # it would end, or print, in much less
        process.terminate()
        assert process.communicate(timeout=30)[0] == "ended in order\n"


def test_a_daemon_ends_in_order_with_its_terminal() -> None:
    terminal, end = pty.openpty()
    with start(end) as process:
        os.close(end)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=30)[0] == "ended in order\n" and process.returncode == 0
    os.close(terminal)
