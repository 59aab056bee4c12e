# SPDX-License-Identifier: Apache-2.0
"""What RAUC calls on a device before it writes: an older image is refused, the slot spoilt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from millpond.images.build.recipe import RECIPE

OWN = 2000


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device that runs the image ``OWN``, with a slot to be written and the report of an earlier trial."""
    (tmp_path / "release.toml").write_text(f'version = "0.1.0"\nserial = {OWN}\nboard = "qemu-virt"\n')
    (tmp_path / "trial").write_text("it hung")
    (tmp_path / "esp").write_bytes(b"x" * (128 << 10))
    return tmp_path


def before_update(device: Path, version: str) -> subprocess.CompletedProcess[str]:
    text = (RECIPE / "root/usr/lib/millpond/before-update").read_text()
    places = {
        "/opt/millpond/release.toml": "release.toml",
        "/var/lib/millpond-trial": "trial",
        "/var/lib/millpond-update/older": "older",
    }
    for place, here in places.items():
        assert place in text
        text = text.replace(place, str(device / here))
    (device / "manifest.raucm").write_text(
        f"[update]\ncompatible=millpond-qemu-virt\n{version}\n\n[bundle]\n"
    )
    slots = {"RAUC_TARGET_SLOTS": "1 2", "RAUC_BUNDLE_MOUNT_POINT": str(device)}
    slots |= {"RAUC_SLOT_CLASS_1": "rootfs", "RAUC_SLOT_DEVICE_1": str(device / "root")}
    slots |= {"RAUC_SLOT_CLASS_2": "esp", "RAUC_SLOT_DEVICE_2": str(device / "esp")}
    argv = ["/bin/sh", "-c", text]
    return subprocess.run(argv, env=os.environ | slots, capture_output=True, text=True, timeout=60)


def is_spoilt(device: Path) -> bool:
    content = (device / "esp").read_bytes()
    assert content.endswith(b"x" * (64 << 10)) and len(content) == 128 << 10
    return not content.startswith(b"x")


@pytest.mark.parametrize("serial", [OWN, OWN + 1])
def test_a_later_image_and_the_same_are_installed(device: Path, serial: int) -> None:
    done = before_update(device, f"version=0.1.0+{serial}")
    assert (done.returncode, done.stderr) == (0, "")
    assert is_spoilt(device) and not (device / "trial").exists() and not (device / "root").exists()


@pytest.mark.parametrize("version", [f"version=0.1.0+{OWN - 1}", "version=0.1.0", "version=0.1.0+x", ""])
def test_an_older_image_is_refused_by_the_device(device: Path, version: str) -> None:
    """Before: only the command line refused an older image, whose signature is good."""
    done = before_update(device, version)
    assert done.returncode == 1 and f"is older than {OWN}, which runs" in done.stderr
    assert not is_spoilt(device) and (device / "trial").exists()


def test_an_older_image_that_its_owner_has_named_is_installed(device: Path) -> None:
    (device / "older").write_text(f"{OWN - 5}\n")
    assert before_update(device, f"version=0.1.0+{OWN - 6}").returncode == 1
    assert before_update(device, f"version=0.1.0+{OWN - 5}").returncode == 0
    assert is_spoilt(device)
