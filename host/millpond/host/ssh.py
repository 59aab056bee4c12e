"""Edge (paramiko): commands and shells on a device, over SSH through its tunnel, its host key pinned."""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import paramiko

from millpond.host.fleet import Fleet
from millpond.images.ssh_server import USER
from millpond.wire.errors import LocalError, RemoteError

CONNECT_SECONDS = 15.0
_CHUNK = 1 << 16


class SshFailed(RemoteError):
    """No SSH connection; nothing was run."""


@contextlib.contextmanager
def connected(fleet: Fleet, device: str, sock: socket.socket) -> Iterator[paramiko.Transport]:
    """An authenticated SSH connection over ``sock``. Raises RemoteError, also for another host key."""
    transport = paramiko.Transport(sock)
    try:
        sock.settimeout(CONNECT_SECONDS)
        transport.start_client(timeout=CONNECT_SECONDS)
        if transport.get_remote_server_key() != _pinned(fleet.known_hosts, device):
            raise SshFailed(f"{device} shows another SSH host key than it was provisioned with")
        key = paramiko.Ed25519Key.from_private_key_file(str(fleet.ssh_key))
        transport.auth_publickey(USER, key)
        yield transport
    except BrokenPipeError:  # of our own output; the connection's are raised in the transport's thread
        raise
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise SshFailed(f"{device}: SSH failed: {error or type(error).__name__}") from error
    finally:
        transport.close()


def _pinned(known_hosts: Path, device: str) -> paramiko.PKey:
    try:
        keys = paramiko.HostKeys(str(known_hosts)).lookup(device)
    except OSError as error:
        raise LocalError(f"{known_hosts}: {error.strerror}") from None
    if not keys:
        raise LocalError(f"{known_hosts} has no key of {device}")
    return next(iter(keys.values()))


def run(transport: paramiko.Transport, command: str, stdin: int, out: BinaryIO, err: BinaryIO) -> int:
    """Run ``command``, passing on standard input, output and errors. Returns its exit code."""
    channel = transport.open_session(timeout=CONNECT_SECONDS)
    channel.exec_command(command)
    feeder = threading.Thread(target=_feed, args=(stdin, channel), daemon=True)
    feeder.start()
    _pass_on(channel, out, err)
    return channel.recv_exit_status()


def capture(fleet: Fleet, device: str, sock: socket.socket, command: str) -> dict[str, str | int]:
    """Run ``command`` without input; its ``exit_code``, ``stdout`` and ``stderr``."""
    out, err = io.BytesIO(), io.BytesIO()
    with connected(fleet, device, sock) as transport, Path("/dev/null").open("rb") as nothing:
        code = run(transport, command, nothing.fileno(), out, err)
    texts = {
        "stdout": out.getvalue().decode(errors="replace"),
        "stderr": err.getvalue().decode(errors="replace"),
    }
    return {"exit_code": code, **texts}


def _feed(source: int, channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(source, _CHUNK):
            channel.sendall(data)
        channel.shutdown_write()


def _pass_on(channel: paramiko.Channel, out: BinaryIO, err: BinaryIO) -> None:
    """Until both streams have ended."""
    errors = threading.Thread(target=_copy, args=(channel.recv_stderr, err))
    errors.start()
    _copy(channel.recv, out)
    errors.join()


def _copy(receive: object, target: BinaryIO) -> None:
    assert callable(receive)
    while data := receive(_CHUNK):
        target.write(data)
        target.flush()


def shell(transport: paramiko.Transport) -> int:
    """An interactive shell on this terminal. Returns its exit code. Raises LocalError without a terminal."""
    if not sys.stdin.isatty():
        raise LocalError("a shell needs a terminal; use 'millpond run DEVICE -- COMMAND'")
    channel = transport.open_session(timeout=CONNECT_SECONDS)
    size = shutil.get_terminal_size()
    channel.get_pty(os.environ.get("TERM", "vt100"), size.columns, size.lines)
    channel.invoke_shell()
    before = termios.tcgetattr(sys.stdin)
    previous = signal.signal(signal.SIGWINCH, lambda *_: _resize(channel))
    try:
        tty.setraw(sys.stdin, termios.TCSADRAIN)  # keys typed ahead are kept
        _converse(channel)
    finally:
        signal.signal(signal.SIGWINCH, previous)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
    return channel.recv_exit_status()


def _resize(channel: paramiko.Channel) -> None:
    size = shutil.get_terminal_size()
    channel.resize_pty(size.columns, size.lines)


def _converse(channel: paramiko.Channel) -> None:
    """Keys to the device, its output to the terminal, until the shell ends."""
    terminal = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([channel, terminal], [], [])
        if channel in ready:
            data = channel.recv(_CHUNK)
            if not data:
                return
            os.write(sys.stdout.fileno(), data)
        if terminal in ready:
            channel.sendall(os.read(terminal, _CHUNK))
