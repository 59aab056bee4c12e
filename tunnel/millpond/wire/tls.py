# SPDX-License-Identifier: Apache-2.0
"""Edge: connect by mutual TLS 1.3 under the fleet's own authority, the only one trusted."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, LocalError, RemoteError

HOST = "host"
_OUT_OF_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_ALERTS_OF_CLOCKS = ("ALERT_CERTIFICATE_EXPIRED", "ALERT_BAD_CERTIFICATE")
_CLOCKS = "; compare the clocks of both ends"
Stamp = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Identity:
    """The files that identify one member of the fleet: the authority's certificate, its own, and its key.

    Beside the authority's may lie its list of ``revoked`` certificates, and beside the key, while a renewal
    is put in place, the ``next_key``.
    """

    authority: Path
    certificate: Path
    key: Path

    @staticmethod
    def in_directory(directory: Path) -> Identity:
        """Return the identity in a directory, by the usual names of the files."""
        return Identity(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")

    @property
    def revoked(self) -> Path:
        """The authority's list of revoked certificates (a CRL, PEM); without the file none is revoked."""
        return self.authority.with_name("crl.pem")

    @property
    def next_key(self) -> Path:
        """The key of a renewed certificate, which is put in place after that."""
        return self.key.with_name(f"{self.key.name}.new")

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Make a context that presents this identity and demands one of the same fleet that is not revoked.
        Raises LocalError.
        """
        try:
            return self._context(server=server)
        except (OSError, ssl.SSLError) as error:
            raise LocalError(f"{self.certificate.parent}: this identity cannot be loaded: {error}") from None

    def _context(self, *, server: bool) -> ssl.SSLContext:
        authority = self.authority.read_text()
        try:
            context = _context(authority, self.certificate, self.key, server=server)
        except (OSError, ssl.SSLError):
            if not self.next_key.exists():
                raise
            context = _context(authority, self.certificate, self.next_key, server=server)
        if self.revoked.exists():
            _load_list(context, self.revoked)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return context

    def paired_key(self) -> Path:
        """Return the file of the key that belongs to the certificate: the next one while a renewal is put in
        place. Raises LocalError without one.
        """
        for key in (self.key, self.next_key):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, key)
            except (OSError, ssl.SSLError):
                continue
            return key
        raise LocalError(f"{self.key} is not the key of the certificate")

    def stamps(self) -> tuple[Stamp, ...]:
        """Return what changes when one of the files is written or replaced."""
        return tuple(map(stamp, (self.authority, self.certificate, self.key, self.next_key, self.revoked)))


class CurrentContext:
    """The context of an identity as its files are now: it is made again once one has changed."""

    def __init__(self, identity: Identity, *, server: bool) -> None:
        """Load the identity. Raises LocalError."""
        self._identity, self._server = identity, server
        self._lock = threading.Lock()
        self._stamps = identity.stamps()
        self._context = identity.context(server=server)

    def get(self) -> ssl.SSLContext:
        """Return the context. Raises LocalError while the files are none of an identity."""
        with self._lock:
            stamps = self._identity.stamps()  # before the files are read: a later change is seen next time
            if stamps != self._stamps:
                self._context = self._identity.context(server=self._server)
                self._stamps = stamps
            return self._context


def stamp(path: Path) -> Stamp:
    """Return what changes when the file is written or replaced; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def context_of(authority: str, chain: Path, *, server: bool) -> ssl.SSLContext:
    """Make a context that presents the certificate and key in the file ``chain`` and demands another of the
    ``authority`` (PEM). Raises LocalError.
    """
    try:
        return _context(authority, chain, None, server=server)
    except (OSError, ssl.SSLError) as error:
        raise LocalError(f"{chain}: this identity cannot be loaded: {error}") from None


def _context(authority: str, certificate: Path, key: Path | None, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    context.load_cert_chain(certificate, key)
    return context


def _load_list(context: ssl.SSLContext, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise LocalError(f"{path}: it is no list of revoked certificates") from None


def connect(sock: socket.socket, context: ssl.SSLContext, name: str, deadline: Deadline) -> ssl.SSLSocket:
    """Start TLS with the server, which must prove to be ``name``. Raises RemoteError."""
    return _handshake(sock, deadline, name, lambda: context.wrap_socket(sock, server_hostname=name))


def accept(
    sock: socket.socket, context: ssl.SSLContext, name: str | None, deadline: Deadline
) -> ssl.SSLSocket:
    """Accept TLS from a client, which must prove to be ``name``; None: any that the authority knows. Raises
    RemoteError.
    """
    tls = _handshake(sock, deadline, "a client", lambda: context.wrap_socket(sock, server_side=True))
    shown = peer_name(tls)
    if name is not None and name != shown:
        tls.close()
        raise RemoteError(f"the certificate of {shown or 'nobody'} was shown where '{name}' belongs")
    return tls


def peer_name(tls: ssl.SSLSocket) -> str:
    """Return the name in the certificate that a peer has shown, "" if it has none."""
    certificate: Any = tls.getpeercert()
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    return str(names[0]) if names else ""


def peer_of(sock: socket.socket) -> str:
    """Return the name and the serial number of the certificate that a peer has shown, "" on a connection
    without TLS.
    """
    return f"{peer_name(sock)} ({peer_serial(sock):x})" if isinstance(sock, ssl.SSLSocket) else ""


def peer_serial(tls: ssl.SSLSocket) -> int:
    """Return the serial number of the certificate that a peer has shown."""
    certificate: Any = tls.getpeercert()
    return int(certificate["serialNumber"], 16)


def peer_expiry(tls: ssl.SSLSocket) -> float:
    """Return when the certificate expires that a peer has shown, in seconds since 1970."""
    certificate: Any = tls.getpeercert()
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _handshake(
    sock: socket.socket, deadline: Deadline, peer: str, wrap: Callable[[], ssl.SSLSocket]
) -> ssl.SSLSocket:
    try:
        sock.settimeout(deadline.remaining())
        sock.getpeername()  # wrapping a socket that the peer has reset would leak it
        tls = wrap()
    except DeadlineExceeded:
        sock.close()
        raise
    except TimeoutError:
        sock.close()
        raise DeadlineExceeded(f"{peer} did not finish the TLS handshake in time") from None
    except ssl.SSLCertVerificationError as error:
        sock.close()
        hint = _CLOCKS if error.verify_code in _OUT_OF_TIME else ""
        raise RemoteError(f"{peer}: certificate refused: {error.verify_message}{hint}") from None
    except ssl.SSLError as error:
        sock.close()
        raise _failed(peer, error) from None
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"{peer}: {error.strerror or error}") from error
    if tls.version() is None:  # wrap_socket() skips the handshake silently if the peer has already reset
        tls.close()
        raise ConnectionLost(f"{peer} closed the connection")
    return tls


def translate_error(peer: str, error: OSError) -> RemoteError | None:
    """Convert an error of a TLS connection; None if it is not of TLS.

    TLS 1.3 reports a refused certificate to the client only at its first read.
    """
    # A broken pipe: OpenSSL 3.6 answers an end that was not announced with an alert, which nobody takes.
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, BrokenPipeError)):
        return ConnectionLost(f"{peer} closed the connection")
    return _failed(peer, error) if isinstance(error, ssl.SSLError) else None


def _failed(peer: str, error: ssl.SSLError) -> RemoteError:
    """Return the error of a handshake; a peer names a certificate out of its time by one of two alerts."""
    reason = error.reason or str(error)
    hint = _CLOCKS if reason.endswith(_ALERTS_OF_CLOCKS) else ""
    return RemoteError(f"{peer}: TLS failed: {reason}{hint}")
