# SPDX-License-Identifier: Apache-2.0
"""A fleet whose devices become fewer: by an editor, and by commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
