# SPDX-License-Identifier: Apache-2.0
"""Edge (SSH): updates one device: a signed bundle into the other slot, a trial, a confirmation.

The device decides: it checks the signature itself, starts the new slot on trial, and keeps it only when this
host has shaken hands with its agent. If anything fails in between, the slot that worked is started again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import paramiko

from millpond.base import schema
from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.base.text import printable
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.remote import ssh
from millpond.host.remote.bundles import Bundle
from millpond.images.ondevice.sshd_config import ADMIN
from millpond.linux.file_lock import locked
from millpond.wire.control_messages import SSH_ADMIN_PORT

Phase = Literal["sending", "installing", "restarting", "confirming"]
Watch = Callable[[Phase, int], None]
"""Called with the phase, and with the bytes sent since the last call."""

_FOLDER = "/var/lib/millpond-update"
_BUNDLE = f"{_FOLDER}/bundle.raucb"
_OLDER = f"{_FOLDER}/older"
"""Holds the serial of the one image that the device installs though it is older than its own."""
_ROOM = 16 << 20
"""Bytes that a device's state needs beside the bundle."""
_STATUS = "python3 -m millpond.images.ondevice.boot_entries status"
_CHUNK = 1 << 18
_STALL_SECONDS = 45.0
"""How long a device may take no bytes of a bundle."""
_POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Running:
    """The software that a device runs; ``boot`` changes with every restart. ``report`` says why the last
    trial failed, as far as the device knows.
    """

    version: str
    serial: int
    board: str
    slot: str
    trial: bool
    boot: str
    report: str = ""


def running_of(document: object) -> Running:
    """Return what a device says that it runs, its types checked and its texts fit for terminals. Raises
    LocalError.
    """
    found = schema.load(Running, document, "what a device runs")
    return replace(
        found,
        version=printable(found.version, 100),
        board=printable(found.board, 100),
        slot=printable(found.slot, 100),
        boot=printable(found.boot, 100),
        report=printable(found.report, 300),
    )


class DeviceUpdate:
    """The update of ``device`` by ``bundle``. ``patience`` is how long its restart may take, in seconds,
    ``authority`` the directory of the admin key, if that is apart. A device that runs the image already is
    updated ``again`` only if that is asked for.

    An update that was cut off goes on where it broke off: with the bytes of the bundle that the device lacks,
    or with the wait for the end of the trial.
    """

    def __init__(
        self,
        directory: Path,
        device: str,
        bundle: Bundle,
        watch: Watch,
        patience: float,
        authority: Path | None = None,
        *,
        again: bool = False,
    ) -> None:
        self._again, self.was_current = again, False
        self._directory, self.device, self._bundle = directory, device, bundle
        self._watch, self._patience, self._authority = watch, patience, authority

    def run(self, *, allow_older: bool = False) -> Running:
        """Update the device and return what it runs once the new slot is kept. Raises RemoteError,
        LocalError: then the device is as before, or has fallen back to its old slot.
        """
        busy = f"{self.device} is being updated by another command"
        with locked(self._directory / f"update.{self.device}.lock", busy):
            return self._run(allow_older=allow_older)

    def _run(self, *, allow_older: bool) -> Running:
        before = self.check(allow_older=allow_older)
        if before.trial:  # of this image, by an update that was cut off
            return self._wait_for_trial(before)
        if before.serial == self._bundle.manifest.serial and not self._again:
            self.was_current = True
            return before
        with self._connected() as transport:
            self._send(transport)
            if allow_older:
                allow = f"echo {self._bundle.manifest.serial} >{_OLDER}"
                self._command(transport, allow, "its state cannot be written")
            self._watch("installing", 0)
            self._command(transport, f"rauc install {_BUNDLE}", "it did not install the update")
            self._watch("restarting", 0)
            restart = f"rm -rf {_FOLDER}; systemctl reboot"
            self._command(transport, restart, "it did not restart", may_vanish=True)
        return self._wait(before)

    def check(self, *, allow_older: bool = False) -> Running:
        """Return the running software. Raises LocalError if the image is not for the device, RemoteError."""
        with self._connected() as transport:
            running = self._running(transport)
        manifest = self._bundle.manifest
        if running.board != manifest.board:
            raise LocalError(f"{self.device} is a {running.board}, the image is for a {manifest.board}")
        if running.trial and running.serial != manifest.serial:
            raise RemoteError(f"{self.device} has its last update on trial still; wait for its end")
        if running.serial > manifest.serial and not allow_older:
            raise LocalError(
                f"{self.device} runs a later image ({running.serial}) than this one ({manifest.serial}); "
                "--allow-older installs it nevertheless"
            )
        return running

    @contextlib.contextmanager
    def _connected(self) -> Iterator[paramiko.Transport]:
        with (
            DaemonClient(self._directory, self._authority) as client,
            client.dial(self.device, SSH_ADMIN_PORT) as sock,
            ssh.connected(client.fleet, self.device, sock, ADMIN) as transport,
        ):
            yield transport

    def _command(
        self, transport: paramiko.Transport, line: str, problem: str, *, may_vanish: bool = False
    ) -> str:
        """Run a command and return its output. Raises RemoteError, but not for a lost connection or a signal
        if it ``may_vanish``.
        """
        out, err = io.BytesIO(), io.BytesIO()
        result = ssh.RemoteCommand(transport, line).run(None, out, err, timeout=self._patience)
        if result.exit_code and not (may_vanish and not 0 < result.exit_code <= 128):
            said = (out.getvalue() + err.getvalue()).decode(errors="replace").strip().splitlines()
            prefix = "LastError: "  # before the reason, which RAUC prints before its failure
            reasons = [line.removeprefix(prefix) for line in said if line.startswith(prefix)] or said
            why = result.error or (reasons[-1] if reasons else f"exit code {result.exit_code}")
            raise RemoteError(f"{self.device}: {problem}: {printable(why, 300)}")
        return out.getvalue().decode(errors="replace")

    def _running(self, transport: paramiko.Transport) -> Running:
        text = self._command(transport, _STATUS, "it does not say what it runs")
        try:
            return running_of(json.loads(text))
        except (ValueError, LocalError):
            raise RemoteError(f"{self.device} says something strange of what it runs") from None

    def _send(self, transport: paramiko.Transport) -> None:
        """Send the bundle, whole or not at all: the device compares its digest before it installs."""
        start = self._sent_before(transport)
        self._make_room(transport, start)
        self._watch("sending", 0)
        self._copy(transport, start)
        check = f"echo {shlex.quote(self._bundle.sha256)}  {_BUNDLE} | sha256sum --check --status"
        self._command(transport, check, "the bundle did not arrive as it was sent")

    def _sent_before(self, transport: paramiko.Transport) -> int:
        """Return how many bytes of this bundle the device has by an update that was cut off."""
        ask = f"[ ! -f {_BUNDLE} ] || {{ stat -c %s {_BUNDLE}; sha256sum <{_BUNDLE}; }}"
        size, digest, *_ = *self._command(transport, ask, "its state cannot be read").split(), "", ""
        count = int(size) if size.isascii() and size.isdecimal() else 0
        if not 0 < count <= self._bundle.path.stat().st_size:
            return 0
        with self._bundle.path.open("rb") as source:
            return count if _digest_of(source, count) == digest else 0

    def _make_room(self, transport: paramiko.Transport, start: int) -> None:
        """Make room for all but the ``start`` of the bundle. Raises RemoteError."""
        needed = self._bundle.path.stat().st_size - start + _ROOM
        clean = "true" if start else f"rm -rf {_FOLDER} && mkdir -m 700 {_FOLDER}"
        self._command(transport, clean, "its state cannot be written")
        output = self._command(
            transport, f"df --output=avail -B1 {_FOLDER} | tail -n 1", "its room is unknown"
        )
        free = int(output) if output.strip().isdigit() else 0
        if free < needed:
            raise RemoteError(
                f"{self.device} has {free >> 20} MiB for updates, this one needs {needed >> 20}"
            )

    def _copy(self, transport: paramiko.Transport, start: int = 0) -> None:
        """Send the bundle's bytes behind ``start``. Raises RemoteError, also where the device stops taking
        them.
        """
        with contextlib.closing(transport.open_session(timeout=ssh.CONNECT_SECONDS)) as channel:
            channel.settimeout(_STALL_SECONDS)
            channel.exec_command(f"cat >>{_BUNDLE}")
            try:
                with self._bundle.path.open("rb") as source:
                    source.seek(start)
                    if start:
                        self._watch("sending", start)
                    while data := source.read(_CHUNK):
                        channel.sendall(data)
                        self._watch("sending", len(data))
                channel.shutdown_write()
                taken = channel.status_event.wait(_STALL_SECONDS)
            except TimeoutError:
                taken = False
            if not taken:
                raise RemoteError(
                    f"{self.device} has taken nothing for {_STALL_SECONDS:.0f} s: is its state well?"
                )
            if channel.recv_exit_status():
                raise RemoteError(f"{self.device}: the bundle was not taken")

    def _wait(self, before: Running) -> Running:
        """Wait until the device runs a slot that is kept. Raises RemoteError if that is the old one."""
        end, reason = time.monotonic() + self._patience, "it has not come back"
        self._watch("confirming", 0)
        while time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            try:
                with self._connected() as transport:
                    running = self._running(transport)
            except MillpondError as error:
                reason = str(error)
                continue
            if self._is_kept(running, before):
                return running
            reason = "its new slot is on trial still"
        raise RemoteError(f"{self.device}: no confirmation in {self._patience:.0f} s: {reason}")

    def _wait_for_trial(self, running: Running) -> Running:
        """Wait for the end of a trial of this image. Raises RemoteError if the device has fallen back."""
        ended = self._wait(replace(running, slot=""))
        if ended.serial != self._bundle.manifest.serial:
            why = ended.report or "it does not say why"
            raise RemoteError(f"{self.device} fell back to slot {ended.slot}: {why}")
        return ended

    def _is_kept(self, running: Running, before: Running) -> bool:
        """Return whether the device keeps the new slot. Raises RemoteError if it fell back to the old one."""
        if running.slot == before.slot and running.boot != before.boot:
            why = running.report or "the new one did not come so far that it could say why"
            raise RemoteError(f"{self.device} fell back to slot {before.slot}: {why}")
        return running.slot != before.slot and not running.trial


def _digest_of(source: BinaryIO, count: int) -> str:
    """Return the SHA-256 of the first bytes of a file."""
    digest = hashlib.sha256()
    while count and (data := source.read(min(count, _CHUNK))):
        digest.update(data)
        count -= len(data)
    return digest.hexdigest()
