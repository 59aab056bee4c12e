# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): runs one command on many devices at once; the output are whole lines with their device."""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import MillpondError
from millpond.base.text import printable
from millpond.host.api.daemon import DeviceInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records import device_set
from millpond.host.remote import ssh
from millpond.host.remote.shared_input import SharedInput
from millpond.images.ondevice.sshd_config import SshServer

log = logging.getLogger(__name__)

UNREACHABLE = 255
PATIENCE_SECONDS = 8.0
_LONGEST_LINE = 1 << 16
_WAITING = 1000  # pieces of output; then the writers wait


@dataclass(frozen=True, slots=True)
class OutputLines:
    """Lines that a device's command has written, without characters that terminals interpret."""

    device: str
    lines: tuple[str, ...]
    is_error: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the command on a device; ``captured`` is the result as JSON."""

    device: str
    result: ssh.CommandResult
    captured: dict[str, str | int]


def choose(known: Sequence[DeviceInfo], names: str, groups: Mapping[str, str]) -> dict[str, str]:
    """Return the devices that ``names`` lists, or all if it is empty, each with the reason for not reaching
    it, or "".

    Raises LocalError for an unknown name.
    """
    if not names:
        return {d.name: "" if d.state in ("ready", "faulty") else _not_ready(d) for d in known}
    return dict.fromkeys(device_set.expand(names, [device.name for device in known], groups), "")


def _not_ready(device: DeviceInfo) -> str:
    return f"not ready but {device.state}" + (f": {device.reason}" if device.reason else "")


class ParallelRun:
    """Runs ``line`` on devices, as the user of ``server``.

    ``capture`` keeps the output for the results, instead of yielding it. ``authority`` is the directory of
    the admin key, if that is apart. Each command gets the ``given`` input, or none.
    """

    def __init__(
        self,
        directory: Path,
        line: str,
        server: SshServer,
        timeout: float | None,
        *,
        capture: bool,
        authority: Path | None = None,
        given: SharedInput | None = None,
    ) -> None:
        self._authority, self._given = authority, given
        self._directory, self._line, self._server, self._timeout = directory, line, server, timeout
        self._capture = capture
        self._queue: queue.Queue[OutputLines | Ended] = queue.Queue(_WAITING)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._running: list[ssh.RemoteCommand] = []

    def follow(self, devices: dict[str, str]) -> Iterator[OutputLines | Ended]:
        """Yield output lines as they come, and the end of each command. Leaving early ends all commands.
        ``devices`` maps names to the reason for not reaching them, or "".
        """
        threads = [
            threading.Thread(target=self._run, args=item, name=f"run {item[0]}", daemon=True)
            for item in devices.items()
        ]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                event = self._queue.get()
                left -= isinstance(event, Ended)
                yield event
        finally:
            self._end(threads)

    def _end(self, threads: Sequence[threading.Thread]) -> None:
        """Hang up on all commands at once, and wait at most PATIENCE_SECONDS for their ends."""
        self._stop.set()
        with self._lock:
            enders = [threading.Thread(target=command.hang_up, daemon=True) for command in self._running]
        for ender in enders:
            ender.start()
        end = time.monotonic() + PATIENCE_SECONDS
        for thread in (*enders, *threads):
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, device: str, reason: str) -> None:
        out, err = io.BytesIO(), io.BytesIO()
        try:
            result = ssh.CommandResult(UNREACHABLE, reason) if reason else self._on(device, out, err)
        except MillpondError as error:
            result = ssh.CommandResult(UNREACHABLE, printable(str(error)))
        except Exception as error:
            log.exception("%s: internal error", device)  # and the other devices go on
            result = ssh.CommandResult(UNREACHABLE, f"internal error: {error!r}")
        if result.exit_code < 0:
            result = ssh.CommandResult(UNREACHABLE, result.error)
        self._put(Ended(device, result, {"device": device, **ssh.document(result, out, err)}))

    def _on(self, device: str, out: io.BytesIO, err: io.BytesIO) -> ssh.CommandResult:
        with (
            DaemonClient(self._directory, self._authority) as client,
            client.dial(device, self._server.port) as sock,
            ssh.connected(client.fleet, device, sock, self._server) as transport,
            contextlib.ExitStack() as stack,
        ):
            if self._stop.is_set():
                return ssh.CommandResult(UNREACHABLE)
            command = ssh.RemoteCommand(transport, self._line)
            with self._lock:
                self._running.append(command)
            stack.callback(self._forget, command)
            if self._stop.is_set():
                command.hang_up()
            given = self._given.reader() if self._given else None
            if self._capture:
                return command.run(given, out, err, self._timeout)
            shown, complained = (_LineSink(self, device, is_error=is_error) for is_error in (False, True))
            try:
                return command.run(given, shown, complained, self._timeout)
            finally:
                shown.end()
                complained.end()

    def _forget(self, command: ssh.RemoteCommand) -> None:
        with self._lock:
            self._running.remove(command)

    def show(self, device: str, lines: Sequence[bytes], *, is_error: bool) -> None:
        """Queue whole lines for ``follow``."""
        texts = (line.decode(errors="replace").rstrip("\r").expandtabs() for line in lines)
        self._put(OutputLines(device, tuple(printable(text, len(text)) for text in texts), is_error))

    def _put(self, event: OutputLines | Ended) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(event, timeout=0.2)
                return


class _LineSink:
    """Cuts a stream into lines; a line that is too long becomes several."""

    def __init__(self, run: ParallelRun, device: str, *, is_error: bool) -> None:
        self._fleet_run, self._device, self._is_error = run, device, is_error
        self._rest = b""

    def write(self, data: bytes, /) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._fleet_run.show(self._device, lines, is_error=self._is_error)

    def flush(self) -> None:
        """Do nothing: a line is shown when it is whole."""

    def end(self) -> None:
        """Show a last line that has no newline."""
        if self._rest:
            self._fleet_run.show(self._device, [self._rest], is_error=self._is_error)
