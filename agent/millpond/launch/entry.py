# SPDX-License-Identifier: Apache-2.0
"""Entry: the first process of a launched script's sandbox, a fork of a zygote that has loaded torch.

Its arguments are descriptors: of a Unix socket on which one Launch message comes, and of the channel
of the script's requests; and the interface towards the other workers. The script runs in a
fork of this process, in a folder of its own that holds its files. The folder is in memory: what the script
has saved there is sent at the end, and goes when this process ends, as do all others that it has started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost
from millpond.launch.saved import SavedFiles
from millpond.launch.script import run_script
from millpond.linux.confinement.sandbox import exit_code
from millpond.linux.syscalls import die_with_parent
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.launch_messages import MOST_CODE, Exited, Launch, StopScript

RECEIVE_SECONDS = 60.0
_REAP_SECONDS = 1.0
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.002


def main(arguments: Sequence[str]) -> int:
    """Run the script and send its exit code, 128 + N if signal N ended it, and what it has saved."""
    descriptor, requests, interface = arguments
    die_with_parent(signal.SIGKILL)
    limits = Limits(head=MOST_CODE + (1 << 20), payload=0)
    sock = socket.socket(fileno=int(descriptor))
    with contextlib.suppress(ConnectionLost), Channel(sock, "the launcher", limits=limits) as channel:
        launch = channel.expect(Launch, Deadline.after(RECEIVE_SECONDS))
        folder = Path(tempfile.mkdtemp(prefix="launch-"))
        _write(launch.files, folder)
        sent = SavedFiles(folder)
        script = os.fork()
        if not script:
            channel.sock.close()  # not shut down: it is the first process's
            run_script(launch, folder, interface, int(requests))
        os.close(int(requests))
        code = _wait(script, channel)
        _end_others()
        channel.send(Exited(code), NEVER)
        sent.send(channel, launch.most_saved)
    return 0


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _wait(script: int, channel: Channel) -> int:
    """Return the script's exit code; kill it when that is wanted or the launcher has left. The first process
    of its pid namespace also reaps orphans.
    """
    handle = os.pidfd_open(script)
    poll = select.poll()
    for descriptor in (handle, channel.sock.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(1000 * _REAP_SECONDS)}
        if channel.sock.fileno() in ready:
            channel.expect(StopScript, Deadline.after(RECEIVE_SECONDS))
            os.kill(script, signal.SIGKILL)
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == script:
                return exit_code(ended[1])


def _end_others() -> None:
    """Kill all other processes of the namespace, and close the output, which is then at its end."""
    if os.getpid() == 1:  # otherwise it would be all of this user's
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            try:
                os.kill(-1, signal.SIGKILL)
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(_LOOK_SECONDS)
            except (ProcessLookupError, ChildProcessError):  # there are none
                break
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
