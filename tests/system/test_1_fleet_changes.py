# SPDX-License-Identifier: Apache-2.0
"""A fleet whose devices become fewer, by an editor and by commands, and more."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.fs.fuse import mounts

from ..waiting import eventually
from .conftest import _switched_on
from .support import Emulation, create

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def shrinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    """Three devices, of which a person has cut the first one's table before the fleet was switched on."""
    emulation = create(tmp_path_factory.mktemp("shrinking"), ("csd0", "csd1", "csd2"))
    path = emulation.directory / "fleet.toml"
    path.write_text(re.sub(r'\[\[device\]\]\nname = "csd0"\n(?:[^\[\n].*\n|\n)*', "", path.read_text()))
    with _switched_on(emulation):
        yield emulation


def test_the_devices_behind_a_table_that_was_cut_are_ready(shrinking: Emulation) -> None:
    assert list(shrinking.wait(dict.fromkeys(("csd1", "csd2"), "ready"), 60)) == ["csd1", "csd2"]


def test_a_device_is_removed_from_the_running_daemon(shrinking: Emulation) -> None:
    shrinking.wait(dict.fromkeys(("csd1", "csd2"), "ready"), 60)
    result = shrinking.millpond("remove", "csd2")
    assert result.code == 0, result
    assert list(shrinking.devices()) == ["csd1"] == [one.name for one in shrinking.fleet.config.device]
    assert shrinking.millpond("run", "csd2", "--", "true").code == 2
    assert shrinking.millpond("run", "csd1", "--", "true").code == 0
    interfaces = Path(f"/proc/{shrinking.daemon().pid}/net/dev").read_text()
    assert "mp-csd1" in interfaces and "mp-csd2" not in interfaces


def test_a_device_is_added_to_the_running_daemon_and_machine(shrinking: Emulation) -> None:
    """Before: the daemon had to be restarted."""
    before = shrinking.daemon().pid
    result = shrinking.millpond("add", "csd7", "--board", "emulated")
    assert (result.code, result.out) == (
        0,
        "csd7 (emulated) is in the fleet, and the host daemon has it\n",
    ), result
    shrinking.wait({"csd1": "ready", "csd7": "ready"}, 60)
    eventually(
        lambda: shrinking.millpond("run", "csd[1,7]", "--", "uname -n").out == "csd1: csd1\ncsd7: csd7\n",
        "the SSH server of the new device answers, too",
    )
    assert shrinking.daemon().pid == before
    guarded = shrinking.millpond("run", "--admin", "csd7", "--", "nc -w 1 10.77.0.1 22 || echo none").out
    assert guarded.endswith("none\n") or "not found" in guarded
    again = shrinking.millpond("add", "csd7", "--board", "emulated")
    assert again.code == 2 and "csd7" in again.err
    assert shrinking.millpond("remove", "csd7").code == 0
    assert "csd7" not in shrinking.devices()
    assert shrinking.millpond("add", "csd7", "--board", "emulated").code == 0
    shrinking.wait({"csd1": "ready", "csd7": "ready"}, 60)


def test_the_mounts_of_a_fleet_end_with_its_emulation(shrinking: Emulation, tmp_path: Path) -> None:
    """Before: Ctrl-C of `millpond emulate` left them, and each access waited for devices that were gone."""
    if os.geteuid():
        pytest.skip("only root mounts in this namespace")
    place = tmp_path / "place"
    try:
        assert shrinking.millpond("mount", "csd1", place).code == 0
        assert mounts.is_volume(place)
        assert not shrinking.stop()
        assert not mounts.is_volume(place)
        assert f"unmounted csd1 at {place}\n" in (shrinking.base / "emulate.log").read_text()
    finally:
        mounts.unmount(place)
