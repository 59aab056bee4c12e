# SPDX-License-Identifier: Apache-2.0
"""A device's first boot: its identity is whole or absent after any power cut, and the seed is erased."""

from __future__ import annotations

import itertools
import os
import random
import stat
import sys
import threading
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.format import seed
from millpond.images.ondevice import provision

from ..effort import scaled

FILES = {"agent.toml": 'name = "csd3"\n', "key.pem": "secret", "ssh_host_key": "s" * 9000}
_STEPS = {"open", "fsync", "fchmod", "write", "flush", "rename", "mkdir", "rmdir", "unlink", "close", "seek"}


def make_seed(path: Path, files: dict[str, str] = FILES) -> Path:
    etc = path.with_name("etc")
    etc.mkdir(exist_ok=True)
    for name, text in files.items():
        (etc / name).write_text(text)
        (etc / name).chmod(0o600 if name == "key.pem" else 0o664)
    path.write_bytes(seed.seed(etc).ljust(1 << 20, b"\0"))
    return path


def found(identity: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in identity.iterdir()} if identity.exists() else {}


def test_an_identity_is_taken_over_once_and_the_seed_is_wiped(tmp_path: Path) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "state" / "identity"
    before = os.umask(0o077)
    try:
        assert provision.take_over(given, identity)
    finally:
        os.umask(before)
    assert found(identity) == FILES
    assert stat.S_IMODE((identity / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((identity / "agent.toml").stat().st_mode) == 0o664
    assert given.read_bytes() == seed.WIPED + bytes(seed.MAX_TAR)
    assert not provision.take_over(given, identity)
    assert found(identity) == FILES
    assert [path.name for path in identity.parent.iterdir()] == ["identity"]


def test_a_new_seed_replaces_the_whole_identity(tmp_path: Path) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    identity.mkdir()
    (identity / "of-former-days").touch()
    assert provision.take_over(given, identity)
    assert found(identity) == FILES


def _killed_at(step: int, given: Path, identity: Path) -> bool:
    """Take over in a child that is killed just before its so-manieth step; whether it came so far."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    count = 0

    def watch(_frame: object, event: str, called: object) -> None:
        nonlocal count
        if event == "c_call" and getattr(called, "__name__", "") in _STEPS:
            count += 1
            if count == step:
                os.kill(os.getpid(), 9)

    try:
        sys.setprofile(watch)
        provision.take_over(given, identity)
    finally:
        sys.setprofile(None)  # what coverage does at the end is no step
        os._exit(0)


@pytest.mark.parametrize("former", [None, {"agent.toml": 'name = "old"\n'}])
def test_however_it_is_cut_it_is_whole_after_the_next_boot(
    tmp_path: Path, former: dict[str, str] | None
) -> None:
    given, identity, step = tmp_path / "seed", tmp_path / "state" / "identity", 0
    cut = True
    while cut:
        step += scaled(3, 1)
        assert step < 1000
        make_seed(given)
        if former:
            identity.mkdir(parents=True, exist_ok=True)
            for path in identity.iterdir():
                path.unlink()
            (identity / "agent.toml").write_text(former["agent.toml"])
        cut = _killed_at(step, given, identity)
        assert found(identity) in ({}, former, FILES), f"half of it after step {step}"
        provision.take_over(given, identity)
        assert found(identity) == FILES, f"after step {step}"
        assert not given.read_bytes()[seed.HEADER :].strip(b"\0"), f"secrets are left after step {step}"
    assert step > 20  # all files, folders, renames and the wiping


def test_a_wiping_that_a_power_cut_tears_is_no_damaged_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written between two syncs may be on the disk in any part: here sector by sector, by chance."""
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    states, fsync = [given.read_bytes()], os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        if os.fstat(descriptor).st_ino == given.stat().st_ino:
            states.append(given.read_bytes())

    monkeypatch.setattr(os, "fsync", noting)
    provision.take_over(given, identity)
    monkeypatch.undo()
    assert len(states) > 1
    chance = random.Random(1)
    for before, after in itertools.pairwise(states):
        for share in (0.0, 0.1, 0.5, 0.9, 1.0) * scaled(1, 4):
            sectors = range(0, len(before), 512)
            torn = b"".join((after if chance.random() < share else before)[at : at + 512] for at in sectors)
            given.write_bytes(torn)
            provision.take_over(given, identity)
            assert found(identity) == FILES
            assert not given.read_bytes()[seed.HEADER :].strip(b"\0")


def test_a_damaged_seed_gives_no_identity_and_stays(tmp_path: Path) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    damaged = bytearray(given.read_bytes())
    damaged[2000] ^= 1
    given.write_bytes(damaged)
    with pytest.raises(LocalError, match="damaged"):
        provision.take_over(given, identity)
    with pytest.raises(LocalError, match="damaged"):
        provision.refresh(given, identity, 0)
    assert not identity.exists()
    assert given.read_bytes() == damaged


def test_a_device_with_an_identity_needs_no_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, identity = make_seed(tmp_path / "seed"), tmp_path / "identity"
    assert provision.refresh(given, identity, 0) == "csd3"
    given.write_bytes(b"x" * 4096)
    assert provision.refresh(given, identity, 0) == "csd3"
    assert "the identity stays as it is" in capsys.readouterr().out
    given.unlink()
    assert provision.refresh(given, identity, 1000) == "csd3"  # at once: it is not waited for
    assert found(identity) == FILES


def test_a_seed_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    made = make_seed(tmp_path / "made")
    later = threading.Timer(0.3, lambda: made.rename(tmp_path / "seed"))
    later.start()
    try:
        assert provision.refresh(tmp_path / "seed", tmp_path / "identity", 30) == "csd3"
    finally:
        later.join()


def test_without_seed_and_identity_a_device_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provision, "SEED", tmp_path / "seed")
    monkeypatch.setattr(provision, "IDENTITY", tmp_path / "identity")
    monkeypatch.setattr(provision, "HOST_NAME", tmp_path / "hostname")
    monkeypatch.setattr(provision, "SEED_SECONDS", 0.0)
    assert provision.main() == 1
    assert "flash it with --device NAME" in capsys.readouterr().out
    (tmp_path / "seed").write_bytes(bytes(1 << 20))  # flashed without --device
    assert provision.main() == 1
    assert "flash it with --device NAME" in capsys.readouterr().out
    make_seed(tmp_path / "seed")
    assert provision.main() == 0
    assert (tmp_path / "hostname").read_text() == "csd3"
