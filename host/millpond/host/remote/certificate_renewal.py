# SPDX-License-Identifier: Apache-2.0
"""Edge (SSH): brings a device its new certificate, and revokes the old one once the device shows the new."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Literal

import paramiko

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import printable
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import provisioning, revocation
from millpond.host.fleet.authority import Authority
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.renewal import Renewal
from millpond.host.remote import ssh
from millpond.images.boards import EMULATED
from millpond.images.ondevice.sshd_config import ADMIN
from millpond.images.runtime.emulated import IDENTITY
from millpond.linux.file_lock import locked
from millpond.wire import tls
from millpond.wire.control_messages import CONTROL_PORT, SSH_ADMIN_PORT

Renewed = Literal["in use", "at its start", "to be flashed"]
"""Where a new certificate is: shown by the device, or in the fleet's directory alone."""

DELIVERY_SECONDS = 30.0
SHOWN_SECONDS = 10.0
_POLL_SECONDS = 0.25
_WAITS = f"it takes its new certificate, at most {SHOWN_SECONDS:.0f} s"
_LONGEST_COMPLAINT = 4096

# The key comes first: a cut leaves the old pair, or the new certificate and its key beside the old one. The
# agent takes that, too.
_SCRIPT = """\
set -e; cd {identity}; umask 077; rm -f key.pem.new cert.pem.new
head -c {key} >key.pem.new; cat >cert.pem.new; chmod 644 cert.pem.new
[ "$(stat -c %s key.pem.new cert.pem.new | tr '\\n' ' ')" = "{key} {certificate} " ] || exit 65
sync key.pem.new cert.pem.new; mv cert.pem.new cert.pem; sync .; mv key.pem.new key.pem; sync .
"""


def renew(fleet: Fleet, device: str, tell: Callable[[str], None] = lambda _: None) -> Renewed:
    """Give a device a new certificate, and ``tell`` how far that is. One whose certificate is revoked gets
    new keys, too, in the fleet's directory alone. Raises LocalError, RemoteError: then the same call goes on.
    """
    board = fleet.device(device).board
    busy = f"another command renews the certificate of {device}"
    with locked(fleet.device_directory(device) / "renewal.lock", busy):
        authority = Authority.load(fleet.ca, fleet.identity.authority)
        if revocation.is_revoked(fleet, device):
            provisioning.identify(fleet, authority, device)
            return "at its start" if board == EMULATED else "to be flashed"
        renewal = Renewal(fleet, authority, device)
        shown = (
            _renew_emulated(fleet, device, renewal, tell)
            if board == EMULATED
            else _renew(fleet, device, renewal, tell)
        )
        renewal.install()
        renewal.finish()
    return "in use" if shown else "at its start"


def _renew_emulated(fleet: Fleet, device: str, renewal: Renewal, tell: Callable[[str], None]) -> bool:
    """Renew where the fleet's directory is the device's own disk. Returns whether the device runs."""
    renewal.install()
    try:
        client = DaemonClient(fleet.directory)
    except LocalError:
        return False
    with client:
        states = {one.name: one.state for one in client.devices()}
        if states.get(device, "absent") == "absent":
            return False
        tell(_WAITS)
        _wait_until_shown(client, device, renewal.serial)
    return True


def _renew(fleet: Fleet, device: str, renewal: Renewal, tell: Callable[[str], None]) -> bool:
    tell("its certificate is sent")
    with DaemonClient(fleet.directory) as client:
        with (
            client.dial(device, SSH_ADMIN_PORT) as sock,
            ssh.connected(fleet, device, sock, ADMIN) as transport,
        ):
            _deliver(transport, device, renewal.identity)
        tell(_WAITS)
        _wait_until_shown(client, device, renewal.serial)
    return True


def script(identity: str, key: int, certificate: int) -> str:
    """Return what a shell runs on the device to put a key and a certificate of so many bytes in place."""
    return _SCRIPT.format(identity=identity, key=key, certificate=certificate)


def _deliver(transport: paramiko.Transport, device: str, identity: tls.Identity) -> None:
    key, certificate = identity.key.read_bytes(), identity.certificate.read_bytes()
    with contextlib.closing(transport.open_session(timeout=ssh.CONNECT_SECONDS)) as channel:
        channel.settimeout(DELIVERY_SECONDS)
        channel.exec_command(script(IDENTITY, len(key), len(certificate)))
        with contextlib.suppress(OSError):  # it has ended before it took all: its exit code says so
            channel.sendall(key + certificate)
            channel.shutdown_write()
        if not channel.status_event.wait(DELIVERY_SECONDS):
            raise RemoteError(f"{device}: it did not take its new certificate in time")
        if code := channel.recv_exit_status():
            said = channel.recv_stderr(_LONGEST_COMPLAINT).decode(errors="replace").strip().splitlines()
            why = printable(said[-1], 300) if said else f"exit code {code}"
            raise RemoteError(f"{device}: its new certificate was not put in place: {why}")


def _wait_until_shown(client: DaemonClient, device: str, serial: int) -> None:
    """Wait until a device shows its new certificate. Raises RemoteError if it does not."""
    end = time.monotonic() + SHOWN_SECONDS
    while _shown(client, device) != serial:
        if time.monotonic() > end:
            raise RemoteError(
                f"{device} has its new certificate, but still shows the old one, which stays good: "
                "restart its agent, then renew again"
            )
        time.sleep(_POLL_SECONDS)


def _shown(client: DaemonClient, device: str) -> int:
    context = client.fleet.identity.context(server=False)
    sock = client.dial(device, CONTROL_PORT)  # which is closed also where TLS fails
    with tls.connect(sock, context, device, Deadline.after(SHOWN_SECONDS)) as secure:
        return tls.peer_serial(secure)
