# SPDX-License-Identifier: Apache-2.0
"""What a command has put into the fleet's directory is on the disk before it counts, and whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.host.fleet import directory as fleets
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import DeviceConfig
from millpond.linux import files

Check = Callable[[], list[str]]


@pytest.fixture
def at_risk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Returns a function that names what a power cut may damage in the fleet's directory: files that had
    their names before their contents were on the disk, and names that are not there yet.
    """
    contents: set[tuple[int, int, int]] = set()
    names: dict[int, int] = {}
    really = os.fsync

    def fsync(descriptor: int) -> None:
        really(descriptor)
        found, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISDIR(found.st_mode):
            names[found.st_ino] = found.st_mtime_ns
        elif path.suffix == ".new":
            contents.add((found.st_ino, found.st_size, found.st_mtime_ns))

    def check() -> list[str]:
        known = ((path, path.stat()) for path in sorted(tmp_path.rglob("*")))
        return [
            path.relative_to(tmp_path).as_posix()
            for path, found in known
            if (
                (found.st_ino, found.st_size, found.st_mtime_ns) not in contents
                or names.get(path.parent.stat().st_ino) != path.parent.stat().st_mtime_ns
                if path.is_file() and path.suffix != ".lock"
                else path.suffix == ".new"
            )
        ]

    monkeypatch.setattr(os, "fsync", fsync)
    return check


def test_a_fleet_and_its_changes_are_on_the_disk(tmp_path: Path, at_risk: Check) -> None:
    """Before: none of it was, and fleet.toml could be empty, or an old one beside new keys."""
    keys = tmp_path / "keys"
    fleet = provisioning.create(tmp_path / "fleet", "farm", ("csd0", "csd1"), keys=keys)
    assert at_risk() == []
    grown = provisioning.add(fleet, DeviceConfig("csd2", lan="10.78.0.9/16"))
    assert at_risk() == []
    provisioning.write_lan(grown, DeviceConfig("csd2"))
    provisioning.remove(grown, provisioning.without(grown, "csd0"), "csd0")
    assert at_risk() == []
    assert [one.name for one in fleets.read(tmp_path / "fleet").config.device] == ["csd1", "csd2"]


def test_the_users_own_mode_of_fleet_toml_stays(tmp_path: Path) -> None:
    """Before: a file that only its owner could read was readable to all after the next command."""
    fleet = provisioning.create(tmp_path / "fleet", "farm", ("csd0",))
    path = tmp_path / "fleet" / "fleet.toml"
    path.chmod(0o640)
    provisioning.add(fleet, DeviceConfig("csd1"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "known_hosts"
    files.write_durably(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_durably(path, b"new")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("known_hosts", b"old")]
