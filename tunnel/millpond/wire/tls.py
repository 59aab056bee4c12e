# SPDX-License-Identifier: Apache-2.0
"""Edge: connect by mutual TLS 1.3 under the fleet's own authority, the only one trusted."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, LocalError, RemoteError

HOST = "host"


@dataclass(frozen=True, slots=True)
class Identity:
    """The files that identify one member of the fleet: the authority's certificate, its own, and its key."""

    authority: Path
    certificate: Path
    key: Path

    @staticmethod
    def in_directory(directory: Path) -> Identity:
        """Return the identity in a directory, by the usual names of the files."""
        return Identity(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Make a context that presents this identity and demands one of the same fleet. Raises LocalError."""
        try:
            return _context(self.authority.read_text(), self.certificate, self.key, server=server)
        except (OSError, ssl.SSLError) as error:
            raise LocalError(f"{self.certificate.parent}: this identity cannot be loaded: {error}") from None


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
    certificate: Any = tls.getpeercert()
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if name is not None and name not in names:
        tls.close()
        raise RemoteError(
            f"the certificate of {', '.join(names) or 'nobody'} was shown where '{name}' belongs"
        )
    return tls


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
        raise RemoteError(f"{peer}: certificate refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        sock.close()
        raise RemoteError(f"{peer}: TLS failed: {error.reason or error}") from None
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
    return (
        RemoteError(f"{peer}: TLS failed: {error.reason or error}")
        if isinstance(error, ssl.SSLError)
        else None
    )
