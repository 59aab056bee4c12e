# SPDX-License-Identifier: Apache-2.0
"""The private part at rest: its bytes on the flash, and the agent's report where encryption is impossible."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.agent.encryption import encrypt
from millpond.base.errors import LocalError
from millpond.fs.store.layout import prepare
from millpond.linux import fscrypt, syscalls

from ..conftest import InNamespace

SIZE = 32 << 20
MARKER, TRACER = b"patient 8472 has a rare disease", b"anyone may read this, patient or not"
NAME = "patient-8472-of-the-private-part"


def command(*argv: str | Path) -> None:
    """Run it; skip the test where it cannot work."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"PATH": path})
    except FileNotFoundError:
        pytest.skip(f"{argv[0]} is not installed")
    if done.returncode:
        pytest.skip(f"{argv[0]}: {done.stderr.strip()}")


class Drive:
    """A flash of its own, and the agent's state, which is not on it."""

    def __init__(self, scratch: Path, features: str = "encrypt") -> None:
        self.image, self.flash, self.key = scratch / "image", scratch / "flash", scratch / "state" / "key"
        self.private = self.flash / "private"
        self.flash.mkdir()
        with self.image.open("wb") as file:
            file.truncate(SIZE)
        command("mke2fs", "-q", "-t", "ext4", "-b", "4096", "-O", features, self.image)
        self.switch_on()
        if features == "encrypt":
            self._check_kernel()

    def _check_kernel(self) -> None:
        try:
            fscrypt.policy_of(self.private)
        except OSError as error:
            pytest.skip(f"this kernel cannot encrypt: {error.strerror}")

    def switch_on(self) -> None:
        command("mount", "-o", "loop", self.image, self.flash)
        prepare(self.flash)

    def switch_off(self) -> None:
        """The kernel forgets all keys of a file system with its last mount."""
        command("umount", self.flash)


@pytest.fixture
def with_drive(tmp_path: Path, in_namespace: InNamespace) -> Callable[..., None]:
    """Run a function with a drive that is gone when it returns, in a process with mounts of its own."""

    def run(body: Callable[[Drive], None], features: str = "encrypt") -> None:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        scratch = tmp_path / "scratch"
        scratch.mkdir()

        def inside() -> None:
            syscalls.mount("tmpfs", scratch, "tmpfs", 0, "mode=755")
            body(Drive(scratch, features))

        in_namespace(inside)

    return run


def test_raw_flash_tells_nothing_of_private_files(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        at_rest = encrypt(drive.private, drive.key, "required")
        assert at_rest.cipher in ("AES-256-XTS", "Adiantum") and not at_rest.reason
        (drive.private / NAME).write_bytes(MARKER)
        (drive.flash / "public" / "README").write_bytes(TRACER)
        drive.switch_off()
        raw = drive.image.read_bytes()
        assert TRACER in raw and b"README" in raw
        assert MARKER not in raw and NAME.encode() not in raw and NAME[:8].encode() not in raw
        assert drive.key.read_bytes() not in raw

    with_drive(body)


def test_without_the_key_there_are_no_names_and_no_contents(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        encrypt(drive.private, drive.key, "auto")
        (drive.private / NAME).write_bytes(MARKER)
        drive.switch_off()
        drive.switch_on()
        (shown,) = drive.private.iterdir()
        assert shown.name != NAME
        with pytest.raises(OSError) as caught:
            shown.read_bytes()
        assert caught.value.errno == errno.ENOKEY
        assert encrypt(drive.private, drive.key, "off").cipher  # never begins to; what is encrypted stays so
        assert (drive.private / NAME).read_bytes() == MARKER

    with_drive(body)


def test_the_key_is_made_once_and_for_nobody_else(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        encrypt(drive.private, drive.key, "auto")
        key, found = drive.key.read_bytes(), drive.key.stat()
        assert len(key) == 64 and stat.S_IMODE(found.st_mode) == 0o600
        drive.private.rmdir()
        prepare(drive.flash)
        encrypt(drive.private, drive.key, "auto")
        assert drive.key.read_bytes() == key
        assert list(drive.key.parent.iterdir()) == [drive.key]

    with_drive(body)


@pytest.mark.parametrize("other", [None, bytes(64), b"short"], ids=["missing", "another", "short"])
def test_a_lost_key_is_told_in_one_line(other: bytes | None, with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        encrypt(drive.private, drive.key, "auto")
        (drive.private / NAME).write_bytes(MARKER)
        drive.switch_off()
        drive.switch_on()
        drive.key.unlink()
        if other is not None:
            drive.key.write_bytes(other)
        with pytest.raises(LocalError) as caught:
            encrypt(drive.private, drive.key, "auto")
        words = "another one" if other and len(other) == 64 else "not a key" if other else "missing"
        assert words in str(caught.value) and str(drive.key) in str(caught.value)
        assert "\n" not in str(caught.value)

    with_drive(body)


def test_private_files_that_are_there_already_stay_as_they_are(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        (drive.private / NAME).write_bytes(MARKER)
        at_rest = encrypt(drive.private, drive.key, "auto")
        assert not at_rest.cipher and "files already" in at_rest.reason
        assert (drive.private / NAME).read_bytes() == MARKER
        assert fscrypt.policy_of(drive.private) is None and not drive.key.exists()
        with pytest.raises(LocalError, match=r"must be encrypted.*files already"):
            encrypt(drive.private, drive.key, "required")

    with_drive(body)


def test_it_can_be_switched_off(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        assert "switched off" in encrypt(drive.private, drive.key, "off").reason
        assert fscrypt.policy_of(drive.private) is None

    with_drive(body)


def test_a_key_on_the_flash_itself_would_protect_nothing(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        key = drive.flash / "state" / "key"
        assert "on the flash itself" in encrypt(drive.private, key, "auto").reason
        assert not key.exists() and fscrypt.policy_of(drive.private) is None

    with_drive(body)


def test_what_a_killed_agent_left_does_not_count_as_a_file(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        (drive.private / ".encryption-probe").mkdir()
        (drive.private / ".encryption-probe" / "file").touch()
        assert encrypt(drive.private, drive.key, "auto").cipher
        assert not list(drive.private.iterdir())

    with_drive(body)


def test_a_flash_in_an_encrypted_directory_is_left_to_whoever_did_that(
    with_drive: Callable[..., None],
) -> None:
    def body(drive: Drive) -> None:
        home = drive.flash / "home"
        home.mkdir()
        fscrypt.set_policy(home, fscrypt.EncryptionPolicy(fscrypt.AES, fscrypt.add_key(home, os.urandom(64))))
        prepare(home / "flash")
        at_rest = encrypt(home / "flash" / "private", drive.key, "auto")
        assert not at_rest.cipher and "in an encrypted directory" in at_rest.reason
        assert not drive.key.exists()

    with_drive(body)


def test_a_file_system_that_cannot_is_named_with_what_it_lacks(with_drive: Callable[..., None]) -> None:
    def body(drive: Drive) -> None:
        assert "needs its feature 'encrypt'" in encrypt(drive.private, drive.key, "auto").reason
        elsewhere = drive.image.parent / "tmpfs"
        prepare(elsewhere)
        at_rest = encrypt(elsewhere / "private", drive.key, "auto")
        assert not at_rest.cipher and "cannot encrypt" in at_rest.reason
        assert not drive.key.exists()

    with_drive(body, "^encrypt")


def test_the_device_works_with_its_encrypted_files(with_drive: Callable[..., None]) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")

    def body(drive: Drive) -> None:
        encrypt(drive.private, drive.key, "required")
        volume = drive.image.parent / "volume"
        volume.mkdir()
        argv = [sys.executable, "-m", "millpond.fs.mount.device", drive.flash, volume, "--name", "csd0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline().startswith("ready")
            (volume / "public" / "README").write_bytes(TRACER)
            (volume / "private" / NAME).write_bytes(MARKER)
            assert (volume / "private" / NAME).read_bytes() == (drive.private / NAME).read_bytes() == MARKER
            with pytest.raises(OSError) as caught:  # an encrypted directory takes no files that are not
                (volume / "public" / "README").rename(volume / "private" / "README")
            assert caught.value.errno == errno.EXDEV
            shutil.move(volume / "public" / "README", volume / "private" / "README")
            assert (volume / "private" / "README").read_bytes() == TRACER
            process.terminate()

    with_drive(body)


def test_an_agent_that_must_encrypt_and_cannot_does_not_start(tmp_path: Path) -> None:
    places = "".join(f'{name} = "{tmp_path / name}"\n' for name in ("flash", "volume", "state", "identity"))
    link = f'[link]\nsocket = "{tmp_path}/socket"\naddress = "10.77.0.2/30"\n'
    config = tmp_path / "agent.toml"  # whatever is below, the key would lie on the same disk
    config.write_text(f'name = "csd0"\n{places}{link}[privacy]\nat_rest = "required"\n')
    argv = [sys.executable, "-m", "millpond.agent.daemon", "--config", config]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"ERROR {tmp_path}/flash/private must be encrypted ([privacy] at_rest), but " in line
