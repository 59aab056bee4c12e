# SPDX-License-Identifier: Apache-2.0
"""Edge (paramiko): commands and shells on a device, over SSH through its tunnel, its host key pinned."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import shlex
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import paramiko

from millpond.base.errors import LocalError
from millpond.base.text import printable
from millpond.host.fleet.directory import Fleet
from millpond.host.remote.errors import SshFailed
from millpond.host.terminal import streams
from millpond.images.ondevice.sshd_config import ADMIN, USER, SshServer

# Paramiko reports by exceptions and exit codes; without a handler its log would be on stderr, too.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_SECONDS = 15.0
HANG_UP_SECONDS = 3.0
TIMED_OUT = 124
"""The exit code of a command that was ended for taking too long, as of timeout(1)."""

_ON_A_BOARD = Path("/etc/millpond")
_CHUNK = 1 << 16
# Each command of a connection leads a process group of its own, and all have one parent. This works for root,
# too, whose commands OpenSSH sends no signals.
_SIGNAL_ALL = (
    "read -r all < /proc/$PPID/task/$PPID/children; "
    "for p in $all; do [ $p = $$ ] || kill -s {} -- -$p; done 2>/dev/null"
)

# The SSH server hangs up on no command without a terminal when its connection is lost: here the kernel does,
# when the connection's process ends. What has a session of its own (setsid) goes on. Standard input goes by
# descriptor 3, since dash gives /dev/null as descriptor 0 to what runs in the background, and SIGINT and
# SIGQUIT are ignored there until env resets them. This shell survives what ends all others of its process
# group (kill 0), to tell of it.
_TIED = (
    'exec setpriv --pdeathsig HUP sh -c \'hang_up() { trap "" HUP; kill -s HUP -- -$$; }; '
    "trap hang_up HUP; trap : INT QUIT TERM PIPE USR1 USR2 ALRM; "
    'exec 3<&0; env --default-signal "${SHELL:-sh}" -c "$1" <&3 3<&- & child=$!; exec <&- 3<&-; '
    "wait $child; code=$?; while kill -s 0 $child 2>/dev/null; do wait $child; code=$?; done; "
    "exit $code' run "
)
KILLED = 128 + signal.SIGKILL


Input = Callable[[], bytes]
"""Returns the next bytes of a command's input, once there are some; b"" at the end."""


class Sink(Protocol):
    """A binary stream for a command's output."""

    def write(self, data: bytes, /) -> object:
        """Write the data."""

    def flush(self) -> None:
        """Show the data written so far."""


@contextlib.contextmanager
def connected(
    fleet: Fleet, device: str, sock: socket.socket, server: SshServer = USER
) -> Iterator[paramiko.Transport]:
    """Open an authenticated SSH connection to ``server`` over ``sock``. Raises RemoteError, also for another
    host key, and LocalError without a key to show.
    """
    key = key_for(fleet, server)
    transport = paramiko.Transport(sock)
    try:
        sock.settimeout(CONNECT_SECONDS)
        transport.start_client(timeout=CONNECT_SECONDS)
        if transport.get_remote_server_key() != _pinned(fleet.known_hosts, device):
            raise SshFailed(f"{device}: it shows another SSH host key than it was provisioned with")
        transport.auth_publickey(server.user, key)
        yield transport
    except BrokenPipeError:  # from our own output; the transport's thread raises those of the connection
        raise
    except paramiko.AuthenticationException:
        advice = f": {_advice(fleet, device)}" if server == ADMIN else ""
        raise SshFailed(f"{device}: its SSH server does not accept the fleet's key{advice}") from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        reason = printable(str(error) or type(error).__name__)  # it may quote the server
        raise SshFailed(f"{device}: SSH failed: {reason}") from error
    finally:
        transport.close()


def key_for(fleet: Fleet, server: SshServer) -> paramiko.PKey:
    """Return the key that opens ``server``. Raises LocalError."""
    path = fleet.admin_key if server == ADMIN else fleet.ssh_key
    try:
        return paramiko.Ed25519Key.from_private_key_file(str(path))
    except FileNotFoundError:
        elsewhere = ": name the directory where it is kept by --authority DIR, or" if server == ADMIN else ""
        make = (
            f" make one: ssh-keygen -q -t ed25519 -N '' -f {path}, then {_advice(fleet)}"
            if server == ADMIN
            else ""
        )
        raise LocalError(f"{path} is missing{elsewhere}{make}") from None
    except paramiko.SSHException as error:
        raise LocalError(f"{path}: {error}") from None


def _advice(fleet: Fleet, device: str = "NAME") -> str:
    """Return advice for fleets that were made before there was an admin key."""
    target = fleet.device_directory(device) / "etc" / ADMIN.authorized
    return f"copy {fleet.admin_key.name}.pub to {target} (on a real board: {_ON_A_BOARD / ADMIN.authorized})"


def _pinned(known_hosts: Path, device: str) -> paramiko.PKey:
    try:
        keys = paramiko.HostKeys(str(known_hosts)).lookup(device)
    except OSError as error:
        raise LocalError(f"{known_hosts}: {error.strerror}") from None
    if not keys:
        raise LocalError(f"{known_hosts} has no key of {device}")
    return next(iter(keys.values()))


class RemoteCommand:
    """A command that runs on a device. Raises SSHException, which ``connected`` translates."""

    def __init__(self, transport: paramiko.Transport, line: str) -> None:
        self._transport = transport
        self._channel = transport.open_session(timeout=CONNECT_SECONDS)
        command = _TIED + shlex.quote(line)
        self._channel.exec_command(command.encode(errors="surrogateescape"))  # names of files are any bytes
        self._timed_out = self._given_up = False

    def run(self, stdin: Input | None, out: Sink, err: Sink, timeout: float | None = None) -> CommandResult:
        """Relay input and output until the command ends, or is ended after ``timeout`` seconds.

        The exit code is TIMED_OUT then, 128 + N if signal N has ended the command, -1 if the connection is
        lost.
        """
        if stdin is None:
            self._channel.shutdown_write()
        else:
            threading.Thread(target=_feed, args=(stdin, self._channel), daemon=True).start()
        timer = threading.Timer(timeout or 0.0, self._expire)
        timer.daemon = True
        if timeout is not None:
            timer.start()
        try:
            self._pass_on(out, err)
            return self._result(self._channel.recv_exit_status())
        except BaseException:
            self._given_up = True  # a shell there reports its command's SIGHUP: no error of the command
            self.hang_up()
            raise
        finally:
            timer.cancel()

    def _result(self, code: int) -> CommandResult:
        if self._timed_out:
            return CommandResult(TIMED_OUT, "it was ended at its time limit")
        if code < 0 and not self._transport.is_active():
            return CommandResult(code, "the connection was lost")
        if code < 0:  # the shell around it, too; it survives all other signals
            return CommandResult(KILLED, "it was killed with all of its process group")
        return CommandResult(code)

    def hang_up(self) -> None:
        """Send SIGHUP to all processes in the command's process group, and close its channel."""
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._signal("HUP")
        self._close()

    def _expire(self) -> None:
        self._timed_out = True
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._signal("HUP")
            if not self._channel.status_event.wait(HANG_UP_SECONDS):
                self._signal("KILL")
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # the connection was lost
            self._channel.close()

    def _signal(self, name: str) -> None:
        if self._channel.exit_status_ready():
            return
        channel = self._transport.open_session(timeout=HANG_UP_SECONDS)
        channel.exec_command(_SIGNAL_ALL.format(name))
        channel.status_event.wait(HANG_UP_SECONDS)
        channel.close()

    def _pass_on(self, out: Sink, err: Sink) -> None:
        """Relay output until both streams have ended."""
        errors = threading.Thread(target=self._copy, args=(self._channel.recv_stderr, err), daemon=True)
        errors.start()
        self._copy(self._channel.recv, out)
        errors.join()

    def _copy(self, receive: Callable[[int], bytes], target: Sink) -> None:
        while (data := receive(_CHUNK)) and not self._given_up:
            target.write(data)
            target.flush()


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The end of a command. ``error`` says why it was ended, where ``exit_code`` is not its own."""

    exit_code: int
    error: str = ""


def capture(
    fleet: Fleet,
    device: str,
    sock: socket.socket,
    command: str,
    server: SshServer = USER,
    timeout: float | None = None,
    given: Input | None = None,
) -> dict[str, str | int]:
    """Run ``command`` with the ``given`` input. Returns its ``exit_code``, ``stdout`` and ``stderr``, and
    ``error`` if any.
    """
    out, err = io.BytesIO(), io.BytesIO()
    with connected(fleet, device, sock, server) as transport:
        result = RemoteCommand(transport, command).run(given, out, err, timeout)
    return document(result, out, err)


def document(result: CommandResult, out: io.BytesIO, err: io.BytesIO) -> dict[str, str | int]:
    """Return a result with the captured output, as a JSON document."""
    error = {"error": result.error} if result.error else {}
    texts = {
        name: text.getvalue().decode(errors="replace") for name, text in (("stdout", out), ("stderr", err))
    }
    return {"exit_code": result.exit_code, **texts, **error}


def _feed(source: Input, channel: paramiko.Channel) -> None:
    with contextlib.suppress(OSError):
        while data := source():
            channel.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        channel.shutdown_write()  # also where the input cannot be read


def shell(transport: paramiko.Transport) -> int:
    """Run an interactive shell on this terminal. Returns its exit code. Raises LocalError without one."""
    if not sys.stdin.isatty():
        raise LocalError("a shell needs a terminal; use 'millpond run DEVICE -- COMMAND'")
    channel = transport.open_session(timeout=CONNECT_SECONDS)
    channel.get_pty(os.environ.get("TERM", "vt100"), *_terminal_size())
    channel.invoke_shell()
    before = termios.tcgetattr(sys.stdin)
    resized = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    previous = signal.signal(signal.SIGWINCH, lambda *_: os.eventfd_write(resized, 1))
    try:
        tty.setraw(sys.stdin, termios.TCSADRAIN)  # keys typed ahead are kept
        _relay_terminal(channel, resized)
    finally:
        signal.signal(signal.SIGWINCH, previous)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        os.close(resized)
    return channel.recv_exit_status()


def _terminal_size() -> tuple[int, int]:
    """Return the terminal's own columns and lines, whatever variables say."""
    try:
        size = os.get_terminal_size(sys.stdin.fileno())
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24


def _relay_terminal(channel: paramiko.Channel, resized: int) -> None:
    """Relay keys to the device and its output to the terminal, until the shell ends; after each event of
    ``resized`` the terminal's size.
    """
    terminal, output = sys.stdin.fileno(), streams.WholeOutput(sys.stdout.fileno())
    sources = [channel, terminal, resized]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if channel in ready:
            data = channel.recv(_CHUNK)
            if not data:
                return
            output.write(data)
        if resized in ready:
            os.eventfd_read(resized)
            channel.resize_pty(*_terminal_size())
        if terminal in ready:
            keys = streams.read(terminal, _CHUNK)
            if keys:
                channel.sendall(keys)
            else:  # the terminal is gone
                sources.remove(terminal)
                channel.shutdown_write()
