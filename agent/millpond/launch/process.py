# SPDX-License-Identifier: Apache-2.0
"""Edge: a launched script as a process of the agent or the host daemon, in a sandbox, with its output."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys

from millpond.base.deadline import Deadline
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.wire.channel import Channel
from millpond.wire.launch_messages import Launch

SEND_SECONDS = 60.0  # a cold ARM board takes some to start Python


class LaunchedScript:
    """A running script; it dies with the thread that starts it. Raises OSError, RemoteError."""

    def __init__(self, sandbox: Sandbox, launch: Launch, interface: str) -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "millpond.launch.entry", str(theirs.fileno()), interface]
        with Channel(ours, "the script's process") as channel:
            with theirs:
                self._process = start(
                    dataclasses.replace(sandbox, files=_names(launch)),
                    argv,
                    pass_fds=[theirs.fileno()],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            try:
                channel.send(launch, Deadline.after(SEND_SECONDS))
            except BaseException:
                self.stop()
                raise

    @property
    def output(self) -> int:
        """Return the descriptor of the script's output; at its end all processes of the script are gone."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def read(self, most: int = 1 << 15) -> bytes:
        """Wait for output and return it; empty when there will be no more."""
        return os.read(self.output, most)

    def wait(self) -> int:
        """Return the script's exit code, once its output has ended."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self) -> None:
        """Kill the script and all processes that it started."""
        end(self._process)
        if self._process.stdout:
            self._process.stdout.close()


def _names(launch: Launch) -> dict[str, str]:
    """Return files that resolve names without DNS: torch looks up the name of the master's address."""
    hosts = f"127.0.0.1 localhost\n{launch.master_address} master\n"
    return {"/etc/hosts": hosts, "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n"}
