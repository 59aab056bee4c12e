# SPDX-License-Identifier: Apache-2.0
"""Edge: forks that a process prepares while it has one thread and knows no secret, for programs that it
starts later, with threads: each waits to be told its program.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Sequence

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import Sandbox, become
from millpond.linux.confinement.sandbox_exec import kept_environment, parsed, serialized
from millpond.linux.confinement.sandboxed_process import can_be_first, new_pids
from millpond.linux.sockets import receive_with_descriptors
from millpond.linux.zygote import forked
from millpond.linux.zygote.forked import ForkedProgram

_MOST_REQUEST, _MOST_DESCRIPTORS = 1 << 16, 16
_SANDBOXED = Sandbox(binds=None, own_pids=True, uid=1)


class PreparedFork:
    """A fork of this process, which must have one thread still. It is for one program, in a sandbox with PIDs
    and a user of its own if it is ``sandboxed``, and ends with this process. Raises OSError.
    """

    def __init__(self, *, sandboxed: bool = False) -> None:
        first = sandboxed and can_be_first(_SANDBOXED)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        with theirs, new_pids() if first else contextlib.nullcontext():
            self._process = forked.fork(lambda: _await(theirs, first), keep=[number])

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        *,
        stdout: int | None = None,
        sandbox: Sandbox | None = None,
    ) -> ForkedProgram:
        """Have it call ``main`` of a module, with descriptors that have the same numbers there. Raises
        OSError if it has died meanwhile, or has a program already.
        """
        about = [module, list(arguments), list(pass_fds), stdout is not None]
        request = json.dumps([*about, serialized(sandbox) if sandbox else None]).encode()
        with self._control:
            self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST_REQUEST)
            passed = [*pass_fds, *(() if stdout is None else (stdout,))]
            socket.send_fds(self._control, [request], passed)
        return self._process


def _await(control: socket.socket, first: bool) -> int:
    request = bytearray(_MOST_REQUEST)
    size, received = receive_with_descriptors(control, request, _MOST_DESCRIPTORS)
    if not size:  # the parent ends
        return 0
    module, arguments, numbers, has_stdout, spec = json.loads(request[:size])
    control.close()
    _place(received, [*numbers, *([1] if has_stdout else [])])
    if spec is not None:
        become(parsed(spec), lambda: _run_confined(module, arguments), is_first=first)
    return forked.run(module, arguments, dict(os.environ))


def _run_confined(module: str, arguments: Sequence[str]) -> int:
    syscalls.make_dumpable()  # a change of credentials has made its /proc root's
    environment = kept_environment() | {"HOME": "/tmp"}  # noqa: S108 - its own
    return forked.run(module, arguments, environment)


def _place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each received descriptor its number."""
    high = max([*received, *numbers], default=2) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, high) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
