# SPDX-License-Identifier: Apache-2.0
"""A fleet whose owner's keys are elsewhere: its daemon needs none; certificates are renewed and revoked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import RemoteError
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import revocation
from millpond.host.fleet.device import HEARTBEAT_SECONDS
from millpond.host.fleet.directory import read
from millpond.host.remote import certificate_renewal, ssh
from millpond.images.ondevice.sshd_config import ADMIN
from millpond.images.runtime.emulated import STATE
from millpond.wire.tls import Identity

from ..forking import ForkServer
from .conftest import _switched_on
from .support import Emulation, create

pytestmark = pytest.mark.timeout(180)
BOTH = dict.fromkeys(("csd0", "csd1"), "ready")
REVOKED = "millpond: csd1: its certificate is revoked\n"


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Emulation, Path]]:
    """A fleet of two devices, and the directory to which its owner moved the keys before it was switched on.
    The tests change it one after the other.
    """
    emulation = create(tmp_path_factory.mktemp("owned"), ("csd0", "csd1"))
    owner, host = emulation.base / "owner", emulation.directory / "host"
    (emulation.directory / "ca").rename(owner)
    for name in ("admin_key", "admin_key.pub"):
        (host / name).rename(owner / name)
    with _switched_on(emulation):
        emulation.wait(BOTH)
        yield emulation, owner


def test_a_daemon_runs_without_the_owners_keys(owned: tuple[Emulation, Path]) -> None:
    emulation, owner = owned
    assert emulation.millpond("run", "csd0", "--", "echo", "ran").out == "ran\n"
    for words, key in (
        (("revoke", "csd0"), "ca/ca.key"),
        (("renew", "csd0"), "ca/ca.key"),
        (("add", "dev0", "--board", "qemu-virt"), "ca/ca.key"),
        (("run", "--admin", "csd0", "--", "true"), "host/admin_key"),
        (("run", "--admin", "--all", "--", "true"), "host/admin_key"),
    ):
        result = emulation.millpond(*words)
        assert (result.code, result.err.count("\n")) == (2, 1), result
        assert f"{emulation.directory / key} is missing" in result.err and "--authority DIR" in result.err
    for where in ("csd0", "csd0,csd1"):
        result = emulation.millpond("run", "--admin", "--authority", owner, where, "--", "whoami")
        assert result.code == 0 and "root" in result.out, result


def test_a_running_device_gets_a_new_certificate(owned: tuple[Emulation, Path]) -> None:
    emulation, owner = owned
    emulation.wait(BOTH)
    before = revocation.known_serials(emulation.fleet, "csd0")
    boot = emulation.agent("csd0").pid
    assert "is seen for the first time" in emulation.millpond("audit", "csd0", "--verify").out
    result = emulation.millpond("renew", "csd0", "--authority", owner)
    assert (result.code, result.out) == (0, "csd0 has a new certificate\n"), result
    assert revocation.is_listed(emulation.fleet, before[0])
    assert not revocation.is_revoked(emulation.fleet, "csd0")
    end = time.monotonic() + 4 * HEARTBEAT_SECONDS  # in which the daemon sees that the old one is revoked
    with emulation.client() as client:
        while time.monotonic() < end:
            assert [one.state for one in client.devices()] == ["ready", "ready"]
    assert emulation.millpond("run", "csd0", "--", "echo", "ran").out == "ran\n"
    assert emulation.agent("csd0").pid == boot
    result = emulation.millpond("audit", "csd0", "--verify")
    assert result.code == 0 and "has grown since entry" in result.out, result


def test_a_boards_certificate_goes_to_it_by_its_admins_ssh_server(
    owned: tuple[Emulation, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emulated board's identity is read-only to it: here a directory of its state takes the place."""
    emulation, owner = owned
    emulation.wait(BOTH)
    fleet = read(emulation.directory, owner)
    there, source = (
        fleet.device_directory("csd0") / "state" / "renewed",
        fleet.device_directory("csd1") / "etc",
    )
    monkeypatch.setattr(certificate_renewal, "IDENTITY", f"{STATE}/renewed")
    sent = Identity.in_directory(source)
    with (
        DaemonClient(emulation.directory) as client,
        client.dial("csd0", ADMIN.port) as sock,
        ssh.connected(fleet, "csd0", sock, ADMIN) as transport,
    ):
        with pytest.raises(RemoteError, match=r"^csd0: its new certificate was not put in place: .+renewed$"):
            certificate_renewal._deliver(transport, "csd0", sent)
        there.mkdir()
        certificate_renewal._deliver(transport, "csd0", sent)
    for path in (sent.key, sent.certificate):
        assert (there / path.name).read_bytes() == path.read_bytes()
    assert (there / "key.pem").stat().st_mode & 0o777 == 0o600


def test_a_revoked_device_is_out_and_the_others_stay(
    owned: tuple[Emulation, Path], apart: ForkServer, tmp_path: Path
) -> None:
    emulation, owner = owned
    emulation.wait(BOTH)
    fleet = ("--fleet", emulation.directory)
    try:
        assert apart.run("millpond", "mount", *fleet, "csd1", tmp_path / "mounted").code == 0
        result = emulation.millpond("revoke", "csd1", "--authority", owner)
        assert (result.code, result.out) == (0, "the certificate of csd1 is revoked\n"), result
        found = emulation.devices()
        assert {name: device.state for name, device in found.items()} == {"csd0": "ready", "csd1": "revoked"}
        for words in (("run", "csd1", "--", "true"), ("logs", "csd1"), ("volume", "csd1")):
            result = emulation.millpond(*words)
            assert (result.code, result.err) == (1, REVOKED), result
        assert "is revoked" in apart.run("millpond", "mount", *fleet, "csd1", tmp_path / "more").err
        assert apart.run("sh", "-c", f"echo new > {tmp_path}/mounted/public/new").code != 0
        assert not (emulation.fleet.device_directory("csd1") / "flash" / "public" / "new").exists()
    finally:
        apart.run("umount", "-l", tmp_path / "mounted")
    interfaces = Path(f"/proc/{emulation.daemon().pid}/net/dev").read_text()
    assert "mp-csd0" in interfaces and "mp-csd1" not in interfaces
    assert emulation.millpond("run", "csd0", "--", "echo", "ran").out == "ran\n"


def test_a_revoked_device_comes_back_with_new_keys(owned: tuple[Emulation, Path]) -> None:
    emulation, owner = owned
    emulation.millpond("revoke", "csd1", "--authority", owner)
    emulation.wait({"csd1": "revoked"})
    result = emulation.millpond("renew", "csd1", "--authority", owner)
    assert (result.code, result.err) == (0, ""), result
    assert result.out == "csd1 has a new certificate; it is used when the device is started\n"
    emulation.wait(BOTH)
