# SPDX-License-Identifier: Apache-2.0
"""Entry: the first process of a launched script's sandbox, a fork of a zygote that has loaded torch.

Its arguments are descriptors: of a Unix socket on which one Launch message comes, with the files behind it,
and of the channel of the script's requests; and the interface towards the other workers. The script runs in
forks of this process, in a folder of its own that holds its files. The folder is in memory: what the script
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConfigError, ConnectionLost
from millpond.launch.elastic import run_elastic, workers_of
from millpond.launch.inputs import lay_out, receive_inputs
from millpond.launch.reach import why_alone
from millpond.launch.saved import SavedFiles
from millpond.launch.script import run_script
from millpond.linux.confinement.sandbox import exit_code
from millpond.linux.network import listening, own_sockets
from millpond.linux.syscalls import die_with_parent, make_dumpable
from millpond.train.distributed.launch_messages import (
    MOST_CODE,
    SAVED_PART,
    Begun,
    Exited,
    Launch,
    Listening,
    RestartScript,
    StopScript,
)
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits

RECEIVE_SECONDS = 60.0
_REAP_SECONDS = 1.0
_PORTS_SECONDS = 0.01
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.002
_NOT_STARTED = 1


def main(arguments: Sequence[str]) -> int:
    """Run the script and send its exit code, 128 + N if signal N ended it, and what it has saved."""
    descriptor, requests, interface = arguments
    die_with_parent(signal.SIGKILL)
    limits = Limits(head=MOST_CODE + (1 << 20), payload=SAVED_PART)
    sock = socket.socket(fileno=int(descriptor))
    with contextlib.suppress(ConnectionLost), Channel(sock, "the launcher", limits=limits) as channel:
        launch = channel.expect(Launch, Deadline.after(RECEIVE_SECONDS))
        folder = Path(tempfile.gettempdir(), f"launch-{launch.run}")  # one path on all workers: they tell it
        folder.mkdir()
        error = _lay_out(launch, folder, channel) or why_alone(launch)
        if launch.tells_begin:
            channel.send(Begun(), NEVER)
        sent = SavedFiles(folder)
        code = _NOT_STARTED if error else _run(launch, folder, interface, int(requests), channel)
        _end_others()
        channel.send(Exited(code, error), NEVER)
        sent.send(channel, launch.most_saved)
        _until_launcher_left(channel)
    return 0


def _lay_out(launch: Launch, folder: Path, channel: Channel) -> str:
    """Write the script's files; return why that cannot be done, "" if it is."""
    try:
        lay_out(launch.files, folder)
        if launch.inputs:
            receive_inputs(channel, folder)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"the script's files cannot be written: {error.strerror}"
    return ""


def _run(launch: Launch, folder: Path, interface: str, requests: int, channel: Channel) -> int:
    """Run the script's processes to their end; return the exit code of the first that fails, or 0."""
    scripts, ports = set[int](), _Ports(channel) if launch.tells_ports else None
    for local in range(1 if launch.elastic else launch.processes):
        script = os.fork()
        if not script:
            channel.sock.close()  # not shut down: it is the first process's
            if launch.elastic:
                run_elastic(launch, launch.elastic, folder, interface, requests)
            run_script(launch, folder, interface, requests, local)
        scripts.add(script)
    os.close(requests)
    return _wait(scripts, channel, ports)


class _Ports:
    """The ports that the script listens on, told whenever they change."""

    def __init__(self, channel: Channel) -> None:
        make_dumpable()  # a change of the uid has ended that: a script's descriptors could not be looked at
        self._channel = channel
        self._all: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self) -> None:
        """Look at them again. Raises ConnectionLost."""
        now = listening()
        if now == self._all:
            return
        own, self._all = own_sockets(), now
        ports = {port for inode, port in now.items() if inode in own}
        if ports != self._told:
            self._told = ports
            self._channel.send(Listening(tuple(sorted(ports))), NEVER)


def _wait(scripts: set[int], channel: Channel, ports: _Ports | None) -> int:
    """Wait for the script's processes; kill them when that is wanted, when one has failed, or when the
    launcher has left. The first process of its pid namespace also reaps orphans.
    """
    handles = {script: os.pidfd_open(script) for script in scripts}
    poll = select.poll()
    for descriptor in (*handles.values(), channel.sock.fileno()):
        poll.register(descriptor, select.POLLIN)
    pause = 1000 * (_PORTS_SECONDS if ports else _REAP_SECONDS)
    failed = 0
    while handles:
        if ports:
            ports.look()
        ready = {descriptor for descriptor, _ in poll.poll(pause)}
        if channel.sock.fileno() in ready:
            if _is_to_restart(channel, Deadline.after(RECEIVE_SECONDS)):
                _end(workers_of(handles))
            else:
                _kill(handles)
        while handles and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if handle := handles.pop(ended[0], None):
                poll.unregister(handle)
                os.close(handle)
                code = exit_code(ended[1])
                if code and not failed:
                    failed = code
                    _kill(handles)
    return failed


def _is_to_restart(channel: Channel, deadline: Deadline) -> bool:
    """Return whether the launcher's next message is RestartScript, or StopScript. Raises RemoteError."""
    head = channel.receive(deadline)
    if isinstance(head.message, RestartScript):
        return True
    channel.checked(head, StopScript)
    return False


def _kill(handles: Mapping[int, int]) -> None:
    for handle in handles.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _end(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def _until_launcher_left(channel: Channel) -> None:
    """Wait until the launcher closes the channel. A wish to stop may still come: unread by a process that has
    ended, it would take away what the launcher has not read yet.
    """
    while True:
        _is_to_restart(channel, NEVER)


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
