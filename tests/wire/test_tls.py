# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS between identities that real authorities signed."""

from __future__ import annotations

import datetime
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, LocalError, RemoteError
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

SOON = 20.0
Result = ssl.SSLSocket | RemoteError


class Authority:
    """An authority that writes identities to directories."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = self._build(self._name, self._key).add_extension(basic, critical=True)
        self._signed = self._certificate.sign(self._key, hashes.SHA256())

    def _build(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, hours: float = 0
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
        return (
            x509.CertificateBuilder(subject_name=subject, issuer_name=self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )

    def identity(self, directory: Path, name: str, hours: float = 0) -> tls.Identity:
        """Write one that is valid for an hour from now on, or ``hours`` later."""
        directory.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        certificate = self._build(subject, key, hours).add_extension(names, critical=False)
        pem = serialization.Encoding.PEM
        (directory / "ca.pem").write_bytes(self._signed.public_bytes(pem))
        (directory / "cert.pem").write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(pem))
        (directory / "key.pem").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return tls.Identity.in_directory(directory)


@dataclass(frozen=True)
class Fleet:
    host: tls.Identity
    csd0: tls.Identity
    csd1: tls.Identity


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fleet, Fleet]:
    made = []
    for name in ("ours", "theirs"):
        base, authority = tmp_path_factory.mktemp(name), Authority(name)
        made.append(Fleet(*(authority.identity(base / part, part) for part in ("host", "csd0", "csd1"))))
    return made[0], made[1]


def handshake(
    client: tls.Identity, server: tls.Identity, *, expect_server: str = "csd0", expect_client: str = "host"
) -> tuple[Result, Result]:
    """Both sides' sockets or errors; the client also reads, as TLS 1.3 refuses its certificate only then."""
    near, far = socket.socketpair()
    results: dict[str, Result] = {}

    def attempt(side: str, work: Callable[[], ssl.SSLSocket]) -> None:
        try:
            results[side] = work()
        except RemoteError as error:
            results[side] = error

    def serve() -> ssl.SSLSocket:
        context = server.context(server=True)
        accepted = tls.accept(far, context, expect_client, Deadline.after(SOON))
        Channel(accepted, "host").send(Ok(), Deadline.after(SOON))
        return accepted

    def call() -> ssl.SSLSocket:
        context = client.context(server=False)
        connected = tls.connect(near, context, expect_server, Deadline.after(SOON))
        try:
            Channel(connected, "csd0").expect(Ok, Deadline.after(SOON))
        except RemoteError:
            connected.close()
            raise
        return connected

    thread = threading.Thread(target=attempt, args=("server", serve))
    thread.start()
    attempt("client", call)
    thread.join(SOON)
    assert not thread.is_alive()
    return results["client"], results["server"]


def stranger(fleet: Fleet) -> ssl.SSLContext:
    """A client's context, not millpond's, that trusts the fleet. Python 3.13's default one is strict and
    wants more of certificates than these have.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(fleet.host.authority)
    return context


def close(*results: Result) -> None:
    for result in results:
        if isinstance(result, ssl.SSLSocket):
            result.close()


def test_two_of_one_fleet(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    client, server = handshake(ours.host, ours.csd0)
    assert isinstance(client, ssl.SSLSocket)
    assert isinstance(server, ssl.SSLSocket)
    assert client.version() == server.version() == "TLSv1.3"
    assert 0 < tls.peer_expiry(server) - time.time() <= 3600
    close(client, server)


def test_a_server_of_another_fleet_is_refused(fleets: tuple[Fleet, Fleet]) -> None:
    ours, theirs = fleets
    client, server = handshake(ours.host, theirs.csd0)
    assert isinstance(client, RemoteError)
    assert str(client).startswith("csd0: certificate refused: ")
    assert isinstance(server, RemoteError)
    assert str(server).startswith("a client: TLS failed: ")


@pytest.mark.parametrize(("hours", "reason"), [(-3, "certificate has expired"), (3, "not yet valid")])
def test_a_certificate_out_of_its_time_is_one_of_clocks_for_both_ends(
    tmp_path: Path, hours: int, reason: str
) -> None:
    authority = Authority("ours")
    host, csd0 = authority.identity(tmp_path / "host", "host"), authority.identity(tmp_path / "csd0", "csd0")
    late_host, late = (
        authority.identity(tmp_path / f"late-{name}", name, hours) for name in ("host", "csd0")
    )
    for results in (handshake(host, late), handshake(late_host, csd0)):
        for result in results:
            assert isinstance(result, RemoteError) and "compare the clocks of both ends" in str(result)
        assert sum(reason in str(result) for result in results) == 1


def test_a_client_of_another_fleet_is_refused(fleets: tuple[Fleet, Fleet]) -> None:
    ours, theirs = fleets
    # This client trusts our authority, so that only the server has a reason to refuse.
    mixed = tls.Identity(ours.host.authority, theirs.host.certificate, theirs.host.key)
    client, server = handshake(mixed, ours.csd0)
    assert isinstance(server, RemoteError)
    assert str(server).startswith("a client: certificate refused: ")
    assert isinstance(client, RemoteError)
    assert str(client).startswith("csd0: TLS failed: TLSV1_ALERT_UNKNOWN_CA")


def test_another_device_than_asked_for_is_refused(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    client, server = handshake(ours.host, ours.csd1)
    assert str(client).startswith("csd0: certificate refused: Hostname mismatch")
    assert isinstance(server, RemoteError)


def test_a_device_is_not_the_host(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    client, server = handshake(ours.csd1, ours.csd0)
    assert str(server) == "the certificate of csd1 was shown where 'host' belongs"
    assert isinstance(client, ConnectionLost)
    assert str(client) == "csd0 closed the connection"


def test_a_client_without_certificate_is_refused(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    near, far = socket.socketpair()
    context = stranger(ours)

    def anonymous() -> None:
        with near, pytest.raises(ssl.SSLError), context.wrap_socket(near, server_hostname="csd0") as client:
            client.recv(1)

    thread = threading.Thread(target=anonymous)
    thread.start()
    with pytest.raises(RemoteError, match="a client: TLS failed: PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        tls.accept(far, ours.csd0.context(server=True), "host", Deadline.after(SOON))
    thread.join(SOON)


def test_an_older_tls_is_refused(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    near, far = socket.socketpair()
    context = stranger(ours)
    context.load_cert_chain(ours.host.certificate, ours.host.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def old() -> None:
        with near, pytest.raises(ssl.SSLError):
            context.wrap_socket(near, server_hostname="csd0")

    thread = threading.Thread(target=old)
    thread.start()
    with pytest.raises(RemoteError, match="a client: TLS failed: UNSUPPORTED_PROTOCOL"):
        tls.accept(far, ours.csd0.context(server=True), "host", Deadline.after(SOON))
    thread.join(SOON)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b""])
def test_something_else_connects(fleets: tuple[Fleet, Fleet], data: bytes) -> None:
    ours, _ = fleets
    near, far = socket.socketpair()
    near.sendall(data)
    near.close()
    with pytest.raises(RemoteError, match=r"^a client: ") as caught:
        tls.accept(far, ours.csd0.context(server=True), "host", Deadline.after(SOON))
    assert "\n" not in str(caught.value)
    assert far.fileno() == -1


def test_a_client_that_resets_before_the_handshake(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(RemoteError, match=r"^a client: "):
            tls.accept(accepted, ours.csd0.context(server=True), "host", Deadline.after(SOON))


def test_a_silent_peer_meets_the_deadline(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    near, far = socket.socketpair()
    with far, pytest.raises(DeadlineExceeded, match=r"^csd0 did not finish the TLS handshake in time$"):
        tls.connect(near, ours.host.context(server=False), "csd0", Deadline.after(0.1))


def test_no_time_left_closes_the_socket(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    near, far = socket.socketpair()
    with far, pytest.raises(DeadlineExceeded):
        tls.connect(near, ours.host.context(server=False), "csd0", Deadline.after(-1))
    assert near.fileno() == -1


@pytest.mark.parametrize("missing", ["ca.pem", "cert.pem", "key.pem"])
def test_an_incomplete_identity(fleets: tuple[Fleet, Fleet], tmp_path: Path, missing: str) -> None:
    ours, _ = fleets
    for part in (ours.host.authority, ours.host.certificate, ours.host.key):
        (tmp_path / part.name).write_bytes(part.read_bytes())
    (tmp_path / missing).unlink()
    with pytest.raises(LocalError, match=f"^{tmp_path}: this identity cannot be loaded: "):
        tls.Identity.in_directory(tmp_path).context(server=True)


def test_a_key_of_another(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    mixed = tls.Identity(ours.host.authority, ours.host.certificate, ours.csd0.key)
    with pytest.raises(LocalError, match="this identity cannot be loaded"):
        mixed.context(server=False)


def test_bulk_through_tls(fleets: tuple[Fleet, Fleet]) -> None:
    ours, _ = fleets
    client, server = handshake(ours.host, ours.csd0)
    assert isinstance(client, ssl.SSLSocket)
    assert isinstance(server, ssl.SSLSocket)
    data = bytes(range(256)) * 20_000
    with Channel(client, "csd0") as near, Channel(server, "host") as far:
        thread = threading.Thread(target=lambda: near.send(Ok(), Deadline.after(SOON), data))
        thread.start()
        far.expect(Ok, Deadline.after(SOON), payload=None)
        assert far.receive_payload(len(data), Deadline.after(SOON)) == data
        thread.join(SOON)
