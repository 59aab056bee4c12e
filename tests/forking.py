# SPDX-License-Identifier: Apache-2.0
"""Python programs as forks of a server that has imported their modules already.

Each has pipes, signals and an exit code as if a shell had started it, but the command line's modules take a
second to load, and torch two. This file is the server, too: it is run as a program, and so imports nothing of
the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from millpond.base.errors import MillpondError
from millpond.linux.syscalls import die_with_parent

MILLPOND, CLI = "millpond", "millpond.host.cli.app"
LATE = (
    *("millpond.host.cli." + name for name in ("data", "devices", "fleet", "jobs", "launch")),
    *("millpond.host.cli.ssh." + name for name in ("logs", "run", "ssh_config")),
    *("millpond.host.cli.volumes." + name for name in ("copy", "mount", "volume")),
    *("millpond.host.remote." + name for name in ("run_many", "volume_report")),
)
"""What commands import themselves, and takes long."""
TRAINING = ("torch.distributed", "torch.utils.data", "torch._dynamo", "millpond.train.distributed.group")
"""What scripts that train import, the third with their first optimizer."""
_MOST = 1 << 18
_STREAMS = 3


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """A command that a server has started, with pipes; used like ``subprocess.Popen`` in text mode."""

    def __init__(self, stdin: int, stdout: int, stderr: int, reply: socket.socket) -> None:
        self.stdin: IO[str] = os.fdopen(stdin, "w")
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)
        self.returncode: int | None = None
        self._reply = reply
        _, descriptors, *_ = socket.recv_fds(reply, 1, 1)
        assert descriptors, "the server has ended"
        (self._pidfd,) = descriptors

    def poll(self) -> int | None:
        """Return the exit code, minus a signal's number, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                self.returncode = int(self._reply.recv(_MOST))
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(MILLPOND, timeout or 0) from None
            self._reply.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, stdin: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Send the input, and return the output. Kills it after ``timeout``: subprocess.TimeoutExpired."""
        found = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                found[number] = stream.read()

        streams = enumerate((self.stdout, self.stderr))
        threads = [threading.Thread(target=read, args=pair) for pair in streams]
        threads.append(threading.Thread(target=self._feed, args=(stdin,)))
        for thread in threads:
            thread.start()
        try:
            self.wait(timeout)
        finally:
            self.kill()
            self.wait()
            for thread in threads:
                thread.join()
        return found[0], found[1]

    def _feed(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError), self.stdin:
            self.stdin.write(text)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happens in the block, nothing of it is left."""
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class ForkServer:
    """The client's side of a server that has loaded ``modules`` and runs by way of ``prefix``, such as
    ``unshare -m``.
    """

    def __init__(self, *modules: str, prefix: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            # Its streams are pipes, as those of its commands will be: Python looks at them when it starts.
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-P", __file__, str(number), *modules],
                pass_fds=(number,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def start(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> Command:
        """Start a command: ``millpond``, a program of Python by its path, or any other program."""
        about = {"argv": [str(word) for word in argv], "cwd": str(Path.cwd()), "env": dict(env or os.environ)}
        request = json.dumps(about).encode()
        (in_theirs, in_ours), (out_ours, out_theirs), (err_ours, err_theirs) = (os.pipe() for _ in range(3))
        reply, reply_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs = [in_theirs, out_theirs, err_theirs]
        try:
            socket.send_fds(self._control, [request], [*theirs, reply_theirs.fileno()])
        finally:
            reply_theirs.close()
            for descriptor in theirs:
                os.close(descriptor)
        return Command(in_ours, out_ours, err_ours, reply)

    def run(self, *argv: str | Path, stdin: str = "", timeout: float = 90.0) -> Result:
        """Run a command to its end. Raises subprocess.TimeoutExpired."""
        command = self.start(*argv)
        out, err = command.communicate(stdin, timeout)
        return Result(command.wait(), out, err)

    def close(self) -> None:
        """End the server; its commands end with it."""
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        self._process.communicate()


@functools.cache
def server(*modules: str) -> ForkServer:
    """Return the server of this process with these modules, which ends with it."""
    started = ForkServer(*modules)
    atexit.register(started.close)
    return started


class _Serving:
    """The server's own side."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._replies: dict[int, tuple[int, socket.socket]] = {}

    def run(self) -> list[str] | None:
        """Serve until the client has left; in a child, return at once with what it shall run."""
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._tell(key.fd)
                elif (argv := self._take()) is not None:
                    return argv or None

    def _take(self) -> list[str] | None:
        """Fork for a request. What to run, in the child; nothing to run, if there are no more requests."""
        request, descriptors, *_ = socket.recv_fds(self._control, _MOST, _STREAMS + 1)
        if not request:
            return []
        reply = socket.socket(fileno=descriptors.pop())
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            reply.close()
            return self._begin(json.loads(request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(reply, [b"\0"], [pidfd])
        self._replies[pidfd] = pid, reply
        self._selector.register(pidfd, selectors.EVENT_READ)
        return None

    def _begin(self, request: dict[str, Any], descriptors: list[int]) -> list[str]:
        """Make this process what a shell would have made of it."""
        self._selector.close()
        self._control.close()
        for pidfd, (_, reply) in self._replies.items():
            os.close(pidfd)
            reply.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        argv: list[str] = request["argv"]
        return argv

    def _tell(self, pidfd: int) -> None:
        pid, reply = self._replies.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with reply, contextlib.suppress(BrokenPipeError):
            reply.send(str(code).encode())


def main() -> None:
    """Be the server, and in its children what they shall be."""
    _, control, *modules = sys.argv
    for name in modules:
        importlib.import_module(name)
    if CLI in modules:
        _load_late_imports()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests
    gc.freeze()
    argv = _Serving(socket.socket(fileno=int(control))).run()
    if argv is None:
        return
    if argv[0] != MILLPOND and not argv[0].endswith(".py"):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = argv
    if argv[0] == MILLPOND:
        importlib.import_module(CLI).main()
    else:
        runpy.run_path(argv[0], run_name="__main__")


def _load_late_imports() -> None:
    """Of the command line; there is no such fleet."""
    for name in LATE:
        importlib.import_module(name)
    with contextlib.suppress(MillpondError):
        importlib.import_module(CLI).app(["devices", "--fleet", os.devnull], standalone_mode=False)


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    main()
