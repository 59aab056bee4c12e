# SPDX-License-Identifier: Apache-2.0
"""Updates: kept when they work, left when they do not, and refused when they are not for this device."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from millpond.host.fleet import provisioning
from millpond.host.remote import bundles
from millpond.images.format import locate

from ..system.qemu import BOOT_SECONDS, NAME, Board
from ..waiting import eventually
from .image_support import ROOT, Builder

pytestmark = pytest.mark.timeout(1800)

LATER = 4_000_000_000
UNTRAINED = '\nraise ImportError("no worker trains here")\n'
BROKEN = '\nraise SystemExit("this agent does not start")\n'


@pytest.fixture(scope="module")
def later(builder: Builder) -> Path:
    return builder.build("later", LATER)


def changed(builder: Builder, folder: Path, module: str, more: str) -> Path:
    """An image with one module that has ``more`` at its end."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    path = folder / "source" / module
    path.write_text(path.read_text() + more)
    return builder.build(folder.name, LATER + 1, folder / "source")


@pytest.fixture(scope="module")
def broken(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image whose agent ends at once."""
    return changed(builder, tmp_path_factory.mktemp("broken"), "agent/millpond/agent/daemon.py", BROKEN)


@pytest.fixture(scope="module")
def untrained(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image whose agent works, and whose workers do not."""
    roles = "agent/millpond/train/worker/roles.py"
    return changed(builder, tmp_path_factory.mktemp("untrained"), roles, UNTRAINED)


def test_a_changed_bundle_is_refused(board: Board, later: Path) -> None:
    path, manifest = locate.find(later)
    bundle = bundles.make(board.fleet, path, manifest)
    good = bundle.path.read_bytes()
    before = board.running()
    try:
        bundle.path.write_bytes(good[: len(good) // 2] + b"\xff" * 64 + good[len(good) // 2 + 64 :])
        done = board.emulation.millpond("update", NAME, later, timeout=600)
    finally:
        bundle.path.write_bytes(good)
    assert done.code == 1 and "it did not install the update" in done.out + done.err
    assert board.running() == before


def test_anothers_signature_is_refused(board: Board, later: Path, tmp_path: Path) -> None:
    path, manifest = locate.find(later)
    stranger = provisioning.create(tmp_path / "stranger", "stranger", [])
    theirs = bundles.make(stranger, path, manifest)
    ours = bundles.make(board.fleet, path, manifest)
    good, before = ours.path.read_bytes(), board.running()
    try:
        shutil.copyfile(theirs.path, ours.path)
        done = board.emulation.millpond("update", NAME, later, timeout=600)
    finally:
        ours.path.write_bytes(good)
    assert done.code == 1 and "signature" in done.out.lower() + done.err.lower()
    assert board.running() == before


def test_a_later_image_is_kept(board: Board, later: Path) -> None:
    before = board.running()
    board.millpond("update", NAME, later, timeout=900)
    after = board.running()
    assert after["slot"] != before["slot"] and after["serial"] == LATER and not after["trial"]
    board.wait_ready()
    assert "is kept" in board.console()


def test_an_earlier_image_is_refused(board: Board, image: Path) -> None:
    done = board.emulation.millpond("update", NAME, image, timeout=300)
    assert done.code == 1 and "runs a later image" in done.out + done.err


def test_a_full_state_is_refused(board: Board, later: Path) -> None:
    board.admin("fallocate -l $(($(df --output=avail -B1 /var | tail -n 1) - 60000000)) /var/full")
    try:
        done = board.emulation.millpond("update", "--allow-older", NAME, later, timeout=300)
        assert done.code == 1 and "for updates" in done.out + done.err
    finally:
        board.admin("rm /var/full")


def test_an_agent_that_does_not_start_is_left(board: Board, broken: Path) -> None:
    before = board.running()
    done = board.emulation.millpond("update", "--patience", "1200", NAME, broken, timeout=1300)
    assert done.code == 1 and "fell back" in done.out + done.err, done
    after = board.running()
    assert (after["slot"], after["serial"]) == (before["slot"], before["serial"])


def test_a_slot_in_which_no_worker_trains_is_left_and_says_why(board: Board, untrained: Path) -> None:
    """Its agent answers the host, which was enough to be kept."""
    before = board.running()
    done = board.emulation.millpond("update", "--patience", "1200", NAME, untrained, timeout=1300)
    assert done.code == 1 and "fell back" in done.out + done.err, done
    assert "the worker: ImportError: no worker trains here" in done.out + done.err, done
    after = board.running()
    assert (after["slot"], after["serial"]) == (before["slot"], before["serial"])


def test_power_cut_while_it_installs(board: Board, later: Path) -> None:
    before = board.running()
    with board.updating(later) as process:

        def installing() -> bool:
            assert process.poll() is None, board.said()
            return "installing" in board.said()

        eventually(installing, "the installation", 600, 0.1)
        time.sleep(3)
        board.cut_power()
    board.wait_ready()
    after = board.running()
    assert (after["slot"], after["serial"]) == (before["slot"], before["serial"])
    board.millpond("update", "--allow-older", NAME, later, timeout=900)
    assert board.running()["slot"] != before["slot"]


def test_a_flipped_bit_restarts_the_machine_into_the_other_slot(board: Board) -> None:
    """Before: what had been changed on the disk was read, and ran."""
    before, boots, place = str(board.running()["slot"]), board.boots(), 64 << 20
    after = "B" if before == "A" else "A"
    for name in ("root", "esp"):
        board.admin(f"dd if=/dev/millpond/{name}{before} of=/dev/millpond/{name}{after} bs=1M conv=fsync")
    disk = f"/dev/millpond/root{before}"
    changed = f"dd if={disk} bs=1 skip={place} count=1 | tr '\\000-\\377' '\\001-\\377\\000'"
    board.admin(f"{changed} | dd of={disk} bs=1 seek={place} conv=notrunc,fsync")
    read = f"dd if=/dev/dm-0 of=/dev/null iflag=direct bs=4096 skip={place // 4096} count=1"
    board.emulation.millpond("run", "--admin", NAME, "--", f"systemd-run --on-active=3 {read}")
    eventually(lambda: board.boots() >= boots + 2, "the other slot's boot", 600, 0.5)
    board.wait_ready()
    assert board.running()["slot"] == after
    console = board.console()
    assert "Kernel panic - not syncing: dm-verity device corrupted" in console
    assert f"slot {before} has no root, or a damaged one" in console
    eventually(lambda: not board.running()["trial"], "that slot is kept", BOOT_SECONDS, 2)
