# SPDX-License-Identifier: Apache-2.0
"""The command 'mount', without the process that mounts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.cli.volumes import mounting
from millpond.host.cli.volumes.mounting import MountOptions


def test_one_command_at_a_time_mounts_at_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: two at once saw no mount there, and both mounted, one above the other."""
    begun, mounted = threading.Event(), threading.Event()
    monkeypatch.setattr(mounting, "_started", lambda _: begun.set() or (None if mounted.wait(30) else 1))
    place = tmp_path / "place"
    with ThreadPoolExecutor(1) as other:
        first = other.submit(mounting.mount, tmp_path, "csd0", place, MountOptions())
        assert begun.wait(30)
        try:
            with pytest.raises(LocalError, match="another command is mounting a volume there"):
                mounting.mount(tmp_path, "csd0", tmp_path / "." / "place", MountOptions())
        finally:
            mounted.set()
        assert first.result() is False
    mounting.mount(tmp_path, "csd0", place, MountOptions())
