# SPDX-License-Identifier: Apache-2.0
"""Attacks on files: a model that looks around while it is built. What it finds it prints to the job's log,
which stays on the device.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import Folder

from ..waiting import eventually
from .support import DIGITS, Device, Volume, device, model

LOOK_AROUND = """
def build(model):
    import json
    import os
    import socket

    files = []
    for folder, names, found in os.walk("/"):
        if folder == "/":
            names[:] = [name for name in names if name not in ("proc", "sys", "usr", "lib", "bin")]
        files += [os.path.join(folder, name) for name in found]
    told = {"files": [name for name in files if "/site-packages/" not in name]}
    told["pids"] = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    told["links"] = os.listdir(PUBLIC)
    told["opened"] = [path for path in TRIED if opens(path)]
    told["written"] = [path for path in WRITTEN if opens(path, "wb")]
    told["interfaces"] = [name for _, name in socket.if_nameindex()]
    told["uid"] = os.getuid()
    print("found: " + json.dumps(told))


def opens(path, mode="rb"):
    try:
        with open(path, mode) as file:
            return mode == "wb" or bool(file.read(1))
    except OSError:
        return False
"""


def found(volume: Volume, zygote: Zygote, folders: list[Folder], tried: list[str]) -> dict[str, Any]:
    """Return what a model sees that a job for ``folders`` builds, if the host has made links in public/."""
    links = {
        "up": "../private/other",
        "digits": "../private/digits",
        "absolute": str(volume.path / "private/other"),
        "state": str(volume.base / "state"),
        "root": "/proc/1/root",
        "parent": "../..",
    }
    for name, target in links.items():
        (volume.path / "public" / name).symlink_to(target)
    public = volume.path / "public"
    tried += [str(public / name / rest) for name in links for rest in ("secret.txt", "images.npy", "key")]
    tried += [str(volume.path / "private" / rest) for rest in ("other/secret.txt", "digits/images.npy")]
    tried += [str(public / "root" / str(volume.path)[1:] / "private/other/secret.txt")]
    tried += [f"/proc/{pid}/root{volume.path}/private/other/secret.txt" for pid in (1, 2, os.getpid())]
    tried += [str(volume.base / "state/key"), f"/proc/{os.getpid()}/environ", "/etc/shadow", "/dev/mem"]
    written = [str(public / "new"), str(public / "images.npy"), "/new", "/etc/new"]
    names = f"PUBLIC, TRIED, WRITTEN = {str(public)!r}, {tried!r}, {written!r}\n"
    with device(volume, zygote, model(names + LOOK_AROUND), folders) as made:
        line = eventually(lambda: told(made), "the model's findings are in the log")
        found: dict[str, Any] = json.loads(line)
    return found


def told(made: Device) -> str:
    lines = [line.partition("found: ")[2] for line in made.log.read_text().splitlines(keepends=True)]
    return next((line for line in lines if line.endswith("\n")), "")


def test_a_job_sees_its_own_folder_and_nothing_else(tmp_path: Path, zygote: Zygote) -> None:
    volume, other = Volume(tmp_path / "csd0"), Volume(tmp_path / "csd1")
    away = [str(other.path / "private/digits/images.npy"), str(other.path / "public")]
    seen = found(volume, zygote, [DIGITS], away)
    private = [path for path in seen["files"] if "/private/" in path]
    assert sorted(Path(path).parts[2:] for path in private) == [
        ("private", "digits", "images.npy"),
        ("private", "digits", "labels.npy"),
    ]
    assert not any(str(other.base) in path or str(volume.base / "state") in path for path in seen["files"])
    assert seen["opened"] == seen["written"] == []
    assert set(seen["links"]) == {"up", "digits", "absolute", "state", "root", "parent"}
    assert len(seen["pids"]) <= 2 and os.getpid() not in seen["pids"]
    assert seen["interfaces"] == ["lo"]
    assert seen["uid"] == 64002 or os.getuid() != 0


def test_a_public_job_sees_no_private_folder(tmp_path: Path, zygote: Zygote) -> None:
    volume = Volume(tmp_path)
    volume.save("public/set", volume.images.reshape(-1, 8, 8), volume.labels)
    seen = found(volume, zygote, [Folder("public/set", "csd0", public=True)], [])
    assert not [path for path in seen["files"] if "/private/" in path]
    assert seen["opened"] == []


def test_a_private_folder_that_is_a_link_is_not_shown(tmp_path: Path, zygote: Zygote) -> None:
    """Nobody but the device makes links there; one more reason not to follow them."""
    volume = Volume(tmp_path)
    (volume.path / "private/link").symlink_to("other")
    with pytest.raises(Refused, match="missing data: there is no folder private/link"):
        Device(volume, zygote, folders=[Folder("private/link", "csd0")])
