# SPDX-License-Identifier: Apache-2.0
"""A device that runs the image: its hardware report, its users' rights, and its place in a fleet."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from millpond.images.format import locate
from millpond.images.format.seed import WIPED

from ..system.qemu import NAME, Board
from ..waiting import eventually
from .image_support import give_data

pytestmark = pytest.mark.timeout(900)

JOB = """
name = "image"
seed = 7
[data]
private = "private/digits"
public = "public/digits"
test = "test"
[model]
factory = "millpond.train.zoo.models:digits_cnn"
[train]
optimizer = "sgd"
learning_rate = 0.05
momentum = 0.9
batch = 16
epochs = 1
[federated]
rounds = 20
deadline = 300
quorum = 1.0
[evaluate]
target = 0.95
"""


def test_it_is_a_device_of_the_fleet(board: Board) -> None:
    found = json.loads(board.millpond("devices", "--format", "json").out)["devices"]
    (device,) = [one for one in found if one["name"] == NAME]
    assert (device["board"], device["state"]) == ("qemu-virt", "ready")
    assert device["welcome"]["machine"] == "aarch64"
    assert device["welcome"]["at_rest"]["cipher"], "private data are encrypted on its flash"
    assert board.user("uname -m; hostname") == f"aarch64\n{NAME}"


def test_the_tunnel_is_its_only_network(board: Board) -> None:
    assert board.admin("ls /sys/class/net").split() == ["lo", "mp0"]


def test_nobody_has_a_password_and_the_root_is_read_only(board: Board) -> None:
    shadow = board.admin("cut -d: -f2 /etc/shadow").split()
    assert shadow and set(shadow) == {"*"}
    assert board.admin("touch /usr/x 2>&1 || true").endswith("Read-only file system")
    assert board.admin("stat -L -c %F /etc/millpond/") == "directory"


def test_the_root_is_verified_as_it_is_read(board: Board) -> None:
    """Before: a partition, of which every byte was taken for the image's."""
    assert board.admin("findmnt --noheadings --output SOURCE /") == "/dev/dm-0"
    table = board.admin("dmsetup table root").split()
    assert table[2] == "verity" and table[-1] == "panic_on_corruption"
    assert f"millpond.verity={table[8]},{table[11]}" in board.admin("cat /proc/cmdline").split()


def test_the_seed_is_wiped(board: Board, image: Path) -> None:
    place = locate.find(image)[1].seed
    with (board.directory / "disk.img").open("rb") as disk:
        disk.seek(place.offset)
        assert disk.read(place.bytes) == WIPED.ljust(place.bytes, b"\0")
    assert board.admin("tr -d '\\0' </dev/millpond/seed") == WIPED.rstrip(b"\0").decode()


def test_a_user_has_no_private_part(board: Board) -> None:
    board.admin("echo secret >/volume/private/note; chmod 666 /volume/private/note")
    assert board.user("id -u") == "64003"
    assert board.user("ls /volume") == "public"
    assert len(board.admin("ls /etc/millpond/key.pem /dev/vda").split()) == 2
    for path in ("/volume/private/note", "/flash/private/note", "/etc/millpond/key.pem", "/dev/vda"):
        assert "No such file" in board.user(f"cat {path} 2>&1 || true")
    assert board.admin("cat /volume/private/note") == "secret"


def test_a_user_has_the_python_of_workers(board: Board) -> None:
    assert board.user("millpond-python -c 'import torch; print(torch.ones(2).sum().item())'") == "2.0"


def test_a_watchdog_runs_from_the_first_program_on(board: Board) -> None:
    assert "millpond: the watchdog runs" in board.console()
    assert (
        board.admin("cat /sys/class/watchdog/watchdog0/state /sys/class/watchdog/watchdog0/timeout")
        == "active\n60"
    )


def test_the_volume_is_a_partition_of_the_disk_that_the_identity_names(board: Board) -> None:
    assert "the volume is the partition" in board.console()
    assert board.admin("findmnt -n -o SOURCE /flash").startswith("/dev/nvme0n1p")
    assert board.admin("cat /etc/millpond/volume.toml").startswith(
        'disk = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_'
    )


def test_its_volume_is_mounted_on_the_host(board: Board, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "data").write_bytes(data)
    board.millpond("cp", tmp_path / "data", f"{NAME}:public/")
    assert board.user("sha256sum </volume/public/data | cut -c1-64") == hashlib.sha256(data).hexdigest()
    board.millpond("cp", f"{NAME}:public/data", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
    assert "by the kernel itself (FUSE passthrough)" in board.console()


def test_all_units_work(board: Board) -> None:
    assert board.admin("systemctl --failed --no-legend --plain") == ""


def test_it_trains_on_its_own_private_data(board: Board) -> None:
    base = give_data(board).parent
    (base / "job.toml").write_text(JOB)
    done = json.loads(board.millpond("train", "--format", "json", base / "job.toml", timeout=800).out)
    assert done["job"]["score"] >= 0.95
    with board.emulation.client() as client:
        ledger = client.ledgers()[NAME]
    assert ledger.sent["parameters"] > 0 and ledger.private_bytes > 0


def test_it_reboots(board: Board) -> None:
    before = board.boots()
    board.emulation.millpond("run", "--admin", NAME, "--", "systemctl reboot")
    eventually(lambda: board.boots() > before, "the reboot", 300, 0.1)
    board.wait_ready()
    assert board.user("cat /volume/public/data | wc -c") == str(3 << 20)
