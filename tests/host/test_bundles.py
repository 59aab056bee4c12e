# SPDX-License-Identifier: Apache-2.0
"""Bundles: signed by the fleet, for the image that the manifest tells of, made once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.fleet import provisioning
from millpond.host.remote import bundles
from millpond.images.build.recipe import RECIPE

from .update_support import make_image

_MISSING = [tool for tool in ("rauc", "mksquashfs") if not shutil.which(tool)]
needs_rauc = pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}")


def device_settings(folder: Path, authority: Path, board: str = "qemu-virt") -> Path:
    """The settings of a device's RAUC, with which it checks bundles."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (RECIPE / "root/etc/rauc/system.conf").read_text()
    text = text.replace("@BOARD@", board).replace("/etc/millpond/ca.pem", str(authority))
    path = folder / "system.conf"
    path.write_text(text.replace("/var/lib/rauc/status", str(folder / "status")))
    return path


def checked(bundle: Path, fleet: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    settings = device_settings(tmp_path / "device", fleet / "ca" / "ca.pem")
    argv = ["rauc", f"--conf={settings}", "info", str(bundle)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@needs_rauc
def test_a_device_accepts_the_bundles_of_its_own_fleet_alone(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path / "f", "farm", ())
    provisioning.create(tmp_path / "other", "farm", ())
    path, manifest = make_image(tmp_path / "image")
    bundle = bundles.make(fleet, path, manifest)
    assert bundle.path.parent == tmp_path / "f" / "updates"
    assert [one.name for one in bundle.path.parent.iterdir()] == [bundle.path.name]
    good = checked(bundle.path, tmp_path / "f", tmp_path)
    assert good.returncode == 0, good.stderr
    assert re.search(r"Compatible:\s+'millpond-qemu-virt'", good.stdout)
    assert re.search(r"Version:\s+'0\.1\.0\+1000'", good.stdout)
    assert re.search(r"Bundle Format:\s+verity", good.stdout)
    assert good.stdout.index("rootfs") < good.stdout.index("esp")  # the order in which they are written
    bad = checked(bundle.path, tmp_path / "other", tmp_path)
    assert bad.returncode != 0
    assert "signature verification failed" in bad.stderr


@needs_rauc
def test_a_certificate_of_the_fleet_that_is_no_signers_signs_nothing(tmp_path: Path) -> None:
    """The host's and the devices' own: who has one of these must not update the others."""
    fleet = provisioning.create(tmp_path / "f", "farm", ("csd0",))
    path, manifest = make_image(tmp_path / "image")
    content = bundles._content(tmp_path / "image", path.parent, manifest)
    etc = fleet.device_directory("csd0") / "etc"
    made = tmp_path / "forged.raucb"
    argv = ["rauc", "bundle", f"--cert={etc / 'cert.pem'}", f"--key={etc / 'key.pem'}"]
    subprocess.run([*argv, str(content), str(made)], capture_output=True, check=False, timeout=60)
    assert made.exists()
    forged = checked(made, tmp_path / "f", tmp_path)
    assert forged.returncode != 0
    assert "purpose" in forged.stderr


@needs_rauc
def test_a_bundle_is_made_once_and_a_later_one_takes_its_place(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path / "f", "farm", ())
    path, manifest = make_image(tmp_path / "image")
    told = list[str]()
    first = bundles.make(fleet, path, manifest, told.append)
    before = first.path.stat()
    other = bundles.make(fleet, *make_image(tmp_path / "uefi", board="generic-uefi"))
    again = bundles.make(fleet, path, manifest, told.append)
    assert again == first and len(told) == 1
    assert (first.path.stat().st_ino, first.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    image = make_image(tmp_path / "later", serial=2000)
    later = bundles.make(fleet, *image)
    assert later.path != first.path and later.sha256 != first.sha256
    assert first.path.exists()  # another update sends it
    for held in (first.held, again.held):
        os.close(held)
    bundles.make(fleet, *image)
    assert sorted(one.name for one in later.path.parent.iterdir()) == sorted(
        [later.path.name, other.path.name]
    )


@needs_rauc
def test_what_a_killed_update_has_left_is_removed(tmp_path: Path) -> None:
    """Before: an update that was killed left some 300 MB for ever."""
    fleet = provisioning.create(tmp_path / "f", "farm", ())
    left = tmp_path / "f/updates/tmpabc/content"
    left.mkdir(parents=True)
    (left / "rootfs.img").write_bytes(b"x")
    bundle = bundles.make(fleet, *make_image(tmp_path / "image"))
    assert list(bundle.path.parent.iterdir()) == [bundle.path]


@pytest.mark.parametrize("name", ["root.squashfs", "esp.vfat"])
def test_a_file_that_is_not_the_manifests_is_refused(tmp_path: Path, name: str) -> None:
    fleet = provisioning.create(tmp_path / "f", "farm", ())
    path, manifest = make_image(tmp_path / "image")
    with (path.parent / name).open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(LocalError, match=f"{name} is not what its manifest says: run 'make image' again"):
        bundles.make(fleet, path, manifest)
    assert list((tmp_path / "f" / "updates").iterdir()) == []


def test_without_its_tools_a_host_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = provisioning.create(tmp_path / "f", "farm", ())
    path, manifest = make_image(tmp_path / "image")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalError, match="an update needs rauc on this host: sudo apt install rauc"):
        bundles.make(fleet, path, manifest)
    assert list((tmp_path / "f" / "updates").iterdir()) == []


@needs_rauc
def test_what_rauc_complains_of_is_one_line(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path / "f", "farm", ())
    path, manifest = make_image(tmp_path / "image")
    for name in ("update.pem", "update.key"):
        (tmp_path / "f" / "ca" / name).write_text("no key\n")
    with pytest.raises(LocalError, match=r"rauc cannot make the bundle: .+") as caught:
        bundles.make(fleet, path, manifest)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "f" / "updates").iterdir()) == []
