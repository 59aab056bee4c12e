# SPDX-License-Identifier: Apache-2.0
"""Edge: a launched script as a process of the agent or the host daemon, in a sandbox, with its output."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.linux import sockets
from millpond.linux.confinement.sandbox import Bind, Sandbox
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.limits.process_limits import REFUSED, Shortage
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import (
    SAVED_PART,
    SHARED_PLACE,
    Begun,
    Launch,
    RestartScript,
    StopScript,
)
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits

SEND_SECONDS = 60.0  # a cold ARM board takes some to start Python
_LIMITS = Limits(head=1 << 16, payload=SAVED_PART)
REQUEST_LIMITS = Limits(head=1 << 16, payload=1 << 34)


class LaunchedScript:
    """A running script, a fork of ``zygote``. Its output goes to the descriptor ``log``, or can be read.
    It has a channel for ``requests``: exchanges of a confined one, FindData of others. Raises OSError,
    RemoteError.
    """

    def __init__(
        self, zygote: Zygote, sandbox: Sandbox, launch: Launch, interface: str, log: int | None = None
    ) -> None:
        self.output = -1
        """The descriptor of the script's output. All of it is there before the end is told on the channel."""
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as theirs:
            self.channel, self.requests, descriptors = _channels(failed, theirs)
            if log is None:
                self.output, log = os.pipe2(os.O_CLOEXEC)
                failed.callback(os.close, self.output)
                theirs.callback(os.close, log)
            arguments = ["3", "4", interface]
            self._process = zygote.start(
                dataclasses.replace(sandbox, files=_files(launch, sandbox.uid or 0)),
                arguments,
                descriptors,
                log,
                entry="millpond.launch.entry",
                network=not sandbox.own_network,
            )
            failed.callback(end, self._process)
            self.channel.send(launch, Deadline.after(SEND_SECONDS))
            failed.pop_all()

    def begin(self, host: Channel, heed: Callable[[], object]) -> None:
        """Wait until the script's files are in place, and tell ``host``, whose messages ``heed`` takes
        meanwhile. A script's process that has died before is left to whoever waits for its end. Raises
        RemoteError.
        """
        own, other = self.channel.sock.fileno(), host.sock.fileno()
        while own not in (ready := sockets.readable([own, other])):
            if other in ready:
                heed()
        with contextlib.suppress(ConnectionLost):
            self.channel.expect(Begun, Deadline.after(SEND_SECONDS))
            host.send(Begun(), Deadline.after(SEND_SECONDS))

    def read(self, most: int = 1 << 15) -> bytes:
        """Wait for output and return it; empty when there will be no more."""
        return os.read(self.output, most)

    def kill(self) -> None:
        """Kill the script; what it has saved comes on the channel. Raises RemoteError."""
        self.channel.send(StopScript(), Deadline.after(SEND_SECONDS))

    def restart(self) -> None:
        """End the processes of an elastic script, which its agent starts again. Raises RemoteError."""
        self.channel.send(RestartScript(), Deadline.after(SEND_SECONDS))

    def shortage(self, patience: float = 0.0, code: int | None = None) -> Shortage:
        """Return the memory that the script, which has ended with ``code``, has run out of, if any. Waits for
        the end of its sandbox at most ``patience`` seconds.
        """
        return self._process.shortage(patience, code)

    @property
    def hint(self) -> str:
        """The hint that the script was refused a process or thread; "" if it was not."""
        return REFUSED if self._process.refusals else ""

    def stop(self) -> None:
        """Kill the script and all processes that it started."""
        end(self._process)
        self.channel.close()
        self.requests.close()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1


def shared_bind(mounted: Path, *, follow_links: bool = True) -> Bind:
    """Return the bind of a folder that all workers share, ``mounted`` here, into a script's sandbox."""
    return Bind(mounted, Path(SHARED_PLACE), read_only=False, follow_links=follow_links)


def _channels(
    failed: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[Channel, Channel, list[int]]:
    """Make the channels of the launch and for requests. Returns also the script's descriptors."""
    found = []
    for name, limits in (("process", _LIMITS), ("requests", REQUEST_LIMITS)):
        ours, their = socket.socketpair()
        theirs.enter_context(their)
        found.append((Channel(ours, f"the script's {name}", limits=limits), their.fileno()))
        failed.callback(found[-1][0].close)
    return found[0][0], found[1][0], [descriptor for _, descriptor in found]


def _files(launch: Launch, uid: int) -> dict[str, str]:
    """Return files that resolve names without DNS, of all workers and the machine, and that of its user."""
    own = ((launch.address, socket.gethostname()), (launch.master_address, "master"))
    names = (("127.0.0.1", "localhost"), *launch.names, *own)
    both = [(prefix + address, name) for prefix in ("", "::ffff:") for address, name in names if address]
    hosts = "".join(f"{address} {name}\n" for address, name in both)
    user = "millpond" if uid else "root"
    return {
        "/etc/hosts": hosts,
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "/etc/passwd": f"{user}:x:{uid}:{uid}:{user}:/tmp:/bin/sh\n",
        "/etc/group": f"{user}:x:{uid}:\n",
    }
